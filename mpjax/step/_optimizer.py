"""What a policy asks of a training step: that all of it is honoured, and what goes round the optimiser."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from mpjax.casting._autocast import make_rules
from mpjax.loss_scale._overwritten import keep_from
from mpjax.loss_scale._state_access import find_loss_scales, get_loss_scale
from mpjax.loss_scale._transform import LossScaleState, static_loss_scale, with_loss_scaling
from mpjax.policy import Policy, cast_floating

_NEEDS_AUTOCAST = (
  ("accum_dtype", "an accumulation dtype of matrix products"),
  ("overrides", "per-module precision"),
  ("fp8", "FP8 matrix products"),
)


def with_policy(
  tx: optax.GradientTransformation, policy: Policy, skip_nonfinite: bool, branch_on_cpu: bool = False
) -> optax.GradientTransformationExtraArgs:
  """`tx` in the policy's optimiser dtype, with its loss scaling (or the guard) round it.

  `branch_on_cpu` is that of `with_loss_scaling`, for policies that compute in half precision.
  """
  inner = optax.with_extra_args_support(tx)
  wrapped = inner
  if policy.optimizer_dtype is not None:
    dtype = policy.optimizer_dtype
    wrapped = optax.GradientTransformationExtraArgs(
      lambda params: inner.init(cast_floating(params, dtype)),
      lambda updates, state, params=None, **extra: inner.update(
        cast_floating(updates, dtype), state, cast_floating(params, dtype), **extra
      ),
    )
  if policy.loss_scaling is not None:
    half = jnp.dtype(policy.compute_dtype).itemsize < 4
    wrapped = with_loss_scaling(wrapped, policy.loss_scaling, branch_on_cpu=branch_on_cpu and half)
  elif skip_nonfinite:
    wrapped = static_loss_scale(wrapped, 1.0)
  else:
    wrapped = _without_scale(wrapped)

  def init(params: Any) -> Any:
    state = wrapped.init(params)
    scales = find_loss_scales(state)
    if len(scales) > 1:
      raise ValueError(
        f"{len(scales)} loss scales, at {', '.join(scales)}: a training step scales one loss by one scale, "
        f"round the whole of tx or from the policy (loss_scaling={policy.loss_scaling}, "
        f"skip_nonfinite={skip_nonfinite}); take the others away"
      )
    return state

  return optax.GradientTransformationExtraArgs(init, wrapped.update)


def _without_scale(tx: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
  """`tx` kept from leaves that are overwritten, unless a loss scale of its own does that."""
  kept = keep_from(tx)

  def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
    return (kept if find_scaler(state) is None else tx).update(updates, state, params, **extra)

  return optax.GradientTransformationExtraArgs(kept.init, update)


def find_scaler(opt_state: Any) -> LossScaleState | None:
  """The one loss scale in an optimiser's state, if there is any."""
  return get_loss_scale(opt_state) if find_loss_scales(opt_state) else None


def adopt_opt_state(tx: optax.GradientTransformation, params: Any, old: Any, same_scaling: bool) -> Any:
  """An optimiser's state from one of another policy: what fits stays, the rest begins anew."""
  new = tx.init(params)
  if same_scaling and _alike(new, old):
    return old
  inner = lambda state: state.inner_state if isinstance(state, LossScaleState) else state
  if not _alike(inner(new), inner(old)):
    return new
  return new._replace(inner_state=inner(old)) if isinstance(new, LossScaleState) else inner(old)


def _alike(a: Any, b: Any) -> bool:
  describe = lambda tree: [
    (path, leaf.shape, leaf.dtype) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
  ]
  return describe(a) == describe(b)


def require_honoured(policy: Policy, over_devices: bool = True) -> None:
  """Raises for what the policy asks and `make_train_step` does not do: nothing is silently ignored.

  Args:
    policy: the policy.
    over_devices: whether the step has a mesh.
  """
  for key, means in () if policy.autocast else _NEEDS_AUTOCAST:
    value = getattr(policy, key)
    if value not in (None, ()):
      shown = dict(value) if isinstance(value, tuple) else value
      raise ValueError(
        f"policy key {key}={shown!r} asks for {means}, which needs autocast: true in the policy"
      )
  if policy.reduce_dtype is not None and not over_devices:
    raise ValueError(
      f"policy key reduce_dtype={policy.reduce_dtype.name!r} says in which dtype gradients cross devices, "
      "which needs a mesh: make_train_step(..., mesh=jax.make_mesh(...))"
    )
  if policy.autocast:
    make_rules(policy, None, None)
  if policy.optimizer_dtype is not None and policy.optimizer_dtype.itemsize < 4:
    raise ValueError(
      f"policy key optimizer_dtype={policy.optimizer_dtype.name!r}: optimiser state below float32 stalls "
      "without stochastic rounding, which is not supported yet; use float32"
    )
