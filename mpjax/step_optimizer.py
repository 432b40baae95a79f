"""The optimiser of a training step: the policy's dtype and loss scaling round the user's transform."""

from __future__ import annotations

from typing import Any

import optax

from mpjax.loss_scale.access import find_loss_scales, get_loss_scale
from mpjax.loss_scale.overwritten import keep_from
from mpjax.loss_scale.transform import LossScaleState, static_loss_scale, with_loss_scaling
from mpjax.policy import Policy, cast_floating


def with_policy(
  tx: optax.GradientTransformation, policy: Policy, skip_nonfinite: bool
) -> optax.GradientTransformationExtraArgs:
  """`tx` in the policy's optimiser dtype, with its loss scaling (or the guard) round it."""
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
    wrapped = with_loss_scaling(wrapped, policy.loss_scaling)
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
