"""The part of a training step after its gradients, without the step's own skip."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_like
from mpjax.loss_scale import apply_updates, find_scaler, get_loss_scale, is_inexact, keep_dtypes, map_parts
from mpjax.optim import unstored
from mpjax.step import TrainState, TrainStep, state_of, unrounded, with_policy, with_step_arguments


def after_gradients(step: TrainStep) -> Callable[[Array, PyTree, TrainState], tuple[PyTree, ...]]:
  """Returns a function from (loss, unscaled gradients, state) to what the step computes from them.

  It leaves out the skip that the step puts around its optimiser, which shows zeros in place of a NaN. A skip
  inside the user's optimiser stays.

  It returns the unrounded updates of the master weights that move, these parameters after the step, and the
  optimiser's state before it is stored in few bytes. The last result is bool[]: whether a loss scale inside
  the user's own optimiser has replaced these by zeros and the old state although the gradients are finite.
  """
  policy = step.policy
  skips = policy.loss_scaling is not None or step.options.skip_nonfinite
  given = with_step_arguments(step.inner_tx)
  tx = with_policy(given, dataclasses.replace(policy, loss_scaling=None), guarded=False)

  def run(loss: Array, grads: PyTree, state: TrainState) -> tuple[PyTree, ...]:
    grads, params = step.trained.arguments(state, grads)
    masters, layers = unrounded(params, step.layers(state))
    before = unstored(state_of(layers._replace(scaler=None)))
    scaler = find_scaler(before)
    if scaler is not None:
      times = lambda g: g * scaler.scale.astype(g.dtype) if is_inexact(g) else g
      grads = map_parts(times, lambda g: g, grads)
    updates, after = tx.update(grads, before, masters, value=loss)
    after = keep_dtypes(after, before) if skips else after
    new = cast_like(apply_updates(masters, updates), params)
    skipped = jnp.asarray(False)
    if scaler is not None:
      skipped = get_loss_scale(after).skipped_steps > scaler.skipped_steps
    return step.trained.moving(state, updates), step.trained.moving(state, new), after, skipped

  return run
