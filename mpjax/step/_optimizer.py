"""The optimiser of a training step under its policy, and its state when the policy changes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Float32

from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_floating
from mpjax.loss_scale import LossScaleState, static_loss_scale, with_loss_scaling
from mpjax.loss_scale._finite import unscale
from mpjax.loss_scale._overwritten import hide, keep_from
from mpjax.loss_scale._state_access import find_loss_scales, find_scaler, refuse_multi_steps_outside
from mpjax.policy import Policy


def with_policy_scaling(
  tx: optax.GradientTransformation, policy: Policy, skip_nonfinite: bool, branch_on_cpu: bool = False
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` in the policy's optimiser dtype, with its loss scaling (or the guard) round it.

  Args:
    tx: any optax transform.
    policy: of the step.
    skip_nonfinite: puts a guard round it where the policy does not scale the loss.
    branch_on_cpu: as `with_loss_scaling` takes it, for policies that compute in half precision.

  Raises:
    ValueError: by `init`, if there is more than one loss scale in the state.
  """
  wrapped = optax.with_extra_args_support(tx)
  if policy.optimizer_dtype is not None:
    wrapped = _in_dtype(wrapped, policy.optimizer_dtype)
  if policy.loss_scaling is not None:
    half = jnp.dtype(policy.compute_dtype).itemsize < 4
    wrapped = optax.with_extra_args_support(
      with_loss_scaling(wrapped, policy.loss_scaling, branch_on_cpu=branch_on_cpu and half)
    )
  elif skip_nonfinite:
    wrapped = static_loss_scale(wrapped, 1.0)
  else:
    wrapped = _without_scale(wrapped)

  def init(params: PyTree) -> PyTree:
    state = wrapped.init(params)
    refuse_multi_steps_outside(state)
    scales = find_loss_scales(state)
    if len(scales) > 1:
      raise ValueError(
        f"{len(scales)} loss scales, at {', '.join(scales)}: a training step scales one loss by one scale, "
        f"round the whole of tx or from the policy (loss_scaling={policy.loss_scaling}, "
        f"skip_nonfinite={skip_nonfinite}); take the others away"
      )
    return state

  return optax.GradientTransformationExtraArgs(init, wrapped.update)


def _in_dtype(
  inner: optax.GradientTransformationExtraArgs, dtype: np.dtype
) -> optax.GradientTransformationExtraArgs:
  """Returns `inner` with parameters and gradients, and so its state, in a dtype."""

  def init(params: PyTree) -> PyTree:
    return inner.init(cast_floating(params, dtype))

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    return inner.update(cast_floating(updates, dtype), state, cast_floating(params, dtype), **extra)

  return optax.GradientTransformationExtraArgs(init, update)


def _without_scale(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
  """Keeps `tx` from leaves that are overwritten, unless a loss scale of its own does that."""
  kept = keep_from(tx)

  def update(updates: PyTree, state: PyTree, params: PyTree = None, **extra: object) -> tuple[PyTree, PyTree]:
    return (kept if find_scaler(state) is None else tx).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(kept.init, update)


def gradient_norm(grads: PyTree, opt_state: PyTree) -> Float32[Array, ""]:
  """Computes the global norm of unscaled gradients; leaves that are overwritten are none.

  Args:
    grads: as the optimiser takes them; scaled, if there is a loss scale.
    opt_state: the state that they are for.
  """
  scaler = find_scaler(opt_state)
  scale = jnp.ones([], jnp.float32) if scaler is None else scaler.scale
  squares = [jnp.sum(jnp.square(jnp.abs(g))) for g in jax.tree.leaves(unscale(hide(grads), scale))]
  return jnp.sqrt(sum(squares, start=jnp.zeros([]))).astype(jnp.float32)


def adopt_opt_state(
  tx: optax.GradientTransformation, params: PyTree, old: PyTree, same_scaling: bool
) -> PyTree:
  """Makes an optimiser's state of one of another policy: what fits stays, the rest begins anew.

  Args:
    tx: the optimiser, with what the new policy puts round it.
    params: the parameters under the new policy.
    old: the state under the old policy.
    same_scaling: keeps the loss scale, too.
  """
  new = tx.init(params)
  if same_scaling and _alike(new, old):
    return old
  if not can_adopt(new, old):
    return new
  return new._replace(inner_state=_inner(old)) if isinstance(new, LossScaleState) else _inner(old)


def can_adopt(new: PyTree, old: PyTree) -> bool:
  """Returns whether an optimiser's state fits another, whatever loss scales are round them."""
  return _alike(_inner(new), _inner(old))


def _inner(state: PyTree) -> PyTree:
  return state.inner_state if isinstance(state, LossScaleState) else state


def _alike(a: PyTree, b: PyTree) -> bool:
  """True if two trees have the same paths, shapes and dtypes."""
  return _described(a) == _described(b)


def _described(tree: PyTree) -> list[tuple[Any, ...]]:
  return [(path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
