"""The loops of training runs: one of one's own, and a step of mpjax; the policy `None` is plain JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

import mpjax


class Run(NamedTuple):
  """What a training run gave.

  Attributes:
    losses: of each step.
    skipped: how many steps the loss scale skipped.
    result: what a program has besides, by name.
  """

  losses: np.ndarray
  skipped: int
  result: dict[str, Any]


def autocast(fun: Callable[..., Any], policy: str | None) -> Callable[..., Any]:
  return fun if policy is None else mpjax.autocast(fun, policy)


def scaled(tx: optax.GradientTransformation, policy: str | None) -> optax.GradientTransformation:
  return tx if policy is None else mpjax.with_loss_scaling(tx, policy)


def run(
  loss_fn: Callable[..., Any],
  params: Any,
  tx: optax.GradientTransformation,
  policy: str | None,
  batches: Iterable[Any],
) -> tuple[Any, np.ndarray, int]:
  """Trains in a loop of one's own; returns parameters, losses and the number of skipped steps."""
  tx = scaled(tx, policy)
  opt_state = tx.init(params)

  @jax.jit
  def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, jax.Array]:
    loss, grads = mpjax.value_and_grad(autocast(loss_fn, policy), opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  losses = []
  for batch in batches:
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(loss)
  metrics = mpjax.loss_scale.loss_scale_metrics(opt_state)
  return params, np.asarray(losses), int(metrics.get("skipped_steps", 0))


def train(
  loss_fn: Callable[..., Any],
  model: Any,
  tx: optax.GradientTransformation,
  policy: str | None,
  batches: Iterable[Any],
  **options: Any,
) -> tuple[Any, np.ndarray, int]:
  """Trains by `make_train_step`; returns the last state, losses and the number of skipped steps.

  Its plain float32 step is the same step without autocast.
  """
  plain = {"base": "fp32", "autocast": False}
  step = mpjax.make_train_step(loss_fn, tx, plain if policy is None else policy, **options)
  state, losses, skipped = step.init(model), [], 0
  for batch in batches:
    state, metrics = step(state, batch)
    losses.append(metrics["loss"])
    skipped = int(metrics.get("skipped_steps", 0))
  return state, np.asarray(losses), skipped
