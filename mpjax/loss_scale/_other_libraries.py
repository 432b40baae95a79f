"""Converts loss scales of jmp, flax and torch to mpjax's state and back, so that a run can move."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import jax.numpy as jnp
import jmp
import optax
from flax.training.dynamic_scale import DynamicScale

from mpjax._types import PyTree
from mpjax.loss_scale._state_access import find_loss_scales, get_loss_scale
from mpjax.loss_scale._transform import LossScaleState, first_state, scaling_of, with_loss_scaling
from mpjax.policy import LossScaling
from mpjax.policy._loss_scaling import (
  HIGHEST,
  LOWEST,
  LossScalingSpec,
  number,
  positive_integer,
)

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
_TARGETS = ("jmp", "flax", "torch")


def import_loss_scale(
  source: object,
  inner: optax.GradientTransformation,
  inner_state: PyTree,
  *,
  axis_name: Hashable | None = None,
) -> tuple[optax.GradientTransformationExtraArgs, LossScaleState]:
  """Returns a transform and a state that continue from another library's loss scale.

  ```python
  dynamic_scale = flax.training.dynamic_scale.DynamicScale()
  old_opt_state = optax.adamw(1e-3).init(params)
  tx, opt_state = mpjax.loss_scale.import_loss_scale(dynamic_scale, optax.adamw(1e-3), old_opt_state)
  ```

  Args:
    source: a `jmp` loss scale, a `flax.training.dynamic_scale.DynamicScale`, or the `state_dict()` of a
      `torch.amp.GradScaler`; concrete, not traced. If it has no bound, the bound is that of float32.
      A `jmp.DynamicLossScale` that went through `jit` has lost its `min_loss_scale` and says 1.
    inner: the optimiser without the loss scale.
    inner_state: its state.
    axis_name: as for `mpjax.dynamic_loss_scale`.

  Returns:
    `(tx, opt_state)`: `inner` wrapped with the same rules, and its state with the same scale and the
    same count of finite steps. The count of skipped steps starts at zero.

  Raises:
    TypeError: if `source` has another type.
    ValueError: if `inner_state` has a loss scale; if `source` is of a disabled GradScaler, lacks a key, or
      has values out of range.
  """
  config, good_steps = _describe(source)
  if find_loss_scales(inner_state):
    raise ValueError(
      "inner_state has a loss scale already: pass the optimiser without a loss scale, and its state, as in "
      "import_loss_scale(source, tx, tx.init(params)); a step's is get_loss_scale(opt_state).inner_state"
    )
  tx = with_loss_scaling(inner, config, axis_name=axis_name)
  return tx, first_state(config, inner_state)._replace(good_steps=jnp.asarray(good_steps, jnp.int32))


def export_loss_scale(
  opt_state: PyTree, to: str, *, scaling: LossScalingSpec, path: str | None = None
) -> jmp.LossScale | DynamicScale | dict[str, float]:
  """Returns the loss scale in `opt_state` as another library's object, without bounds that it cannot hold.

  ```python
  tx = mpjax.with_loss_scaling(optax.adamw(1e-3), "flax")
  scale = mpjax.loss_scale.export_loss_scale(tx.init(params), "flax", scaling="flax")
  ```

  Args:
    opt_state: what `mpjax.get_loss_scale` takes; concrete, not traced.
    to: `"jmp"` gives a `jmp` loss scale, `"flax"` a `DynamicScale`, `"torch"` a dict that
      `GradScaler.load_state_dict` takes.
    scaling: the rules that the transform was made with, as `mpjax.with_loss_scaling` takes them: the state
      does not hold them.
    path: a part of the key path of the loss scale to use, if there are several.

  Returns:
    A `jmp` loss scale, a flax `DynamicScale` or a dict, at the same scale and count of finite steps.

  Raises:
    ValueError: if `to` is unknown, or that library cannot express the rules.
  """
  if to not in _TARGETS:
    raise ValueError(f"to={to!r}: expected one of {', '.join(_TARGETS)}")
  config = scaling_of(scaling)
  if config is None:
    raise ValueError(f"scaling={scaling!r} is not a loss scaling: there is nothing to export")
  state = get_loss_scale(opt_state, path=path)
  scale = float(state.scale)
  if config.kind == "static":
    if to != "jmp":
      raise ValueError(f"{to} has no static loss scale: export to 'jmp', or multiply the loss by {scale!r}")
    return jmp.StaticLossScale(jnp.asarray(scale, jnp.float32))
  if config.hysteresis > 1:
    raise ValueError(f"{to} backs off at every non-finite step: it has no hysteresis={config.hysteresis}")
  if to == "torch":
    values = (scale, config.growth_factor, config.backoff_factor, config.growth_interval)
    return dict(zip(_TORCH_KEYS, (*values, int(state.good_steps)), strict=True))
  if to == "flax":
    return DynamicScale(
      growth_factor=config.growth_factor,
      backoff_factor=config.backoff_factor,
      growth_interval=config.growth_interval - 1,
      fin_steps=jnp.asarray(state.good_steps, jnp.int32),
      scale=jnp.asarray(scale, jnp.float32),
      minimum_scale=config.min_scale,
    )
  if config.growth_factor * config.backoff_factor != 1 or config.growth_factor % 1:
    raise ValueError(
      "jmp has one integer factor for growth and back-off: it cannot express "
      f"growth_factor={config.growth_factor!r} with backoff_factor={config.backoff_factor!r}"
    )
  return jmp.DynamicLossScale(
    loss_scale=jnp.asarray(scale, jnp.float32),
    counter=jnp.asarray(state.good_steps, jnp.int32),
    period=config.growth_interval,
    factor=int(config.growth_factor),
    min_loss_scale=jnp.asarray(config.min_scale, jnp.float32),
  )


def _describe(source: object) -> tuple[LossScaling, int]:
  """Returns the rules of `source`, with its scale as the first one, and its count of finite steps."""
  if isinstance(source, jmp.DynamicLossScale):
    factor = number("factor", source.factor)
    return _dynamic(
      source.loss_scale,
      growth_factor=factor,
      backoff_factor=1 / factor,
      growth_interval=source.period,
      min_scale=float(source.min_loss_scale),
    ), int(source.counter)
  if isinstance(source, (jmp.StaticLossScale, jmp.NoOpLossScale)):
    return LossScaling(kind="static", init_scale=float(source.loss_scale)), 0
  if isinstance(source, DynamicScale):
    lowest = source.minimum_scale
    return _dynamic(
      source.scale,
      growth_factor=source.growth_factor,
      backoff_factor=source.backoff_factor,
      growth_interval=source.growth_interval + 1,
      min_scale=LOWEST if lowest is None else float(lowest),
    ), int(source.fin_steps)
  if isinstance(source, Mapping):
    return _describe_torch(source)
  raise TypeError(
    f"loss scale of type {type(source).__name__}: expected jmp.DynamicLossScale, jmp.StaticLossScale, "
    "jmp.NoOpLossScale, flax.training.dynamic_scale.DynamicScale or the state_dict of a torch GradScaler"
  )


def _describe_torch(source: Mapping[str, Any]) -> tuple[LossScaling, int]:
  if not source:
    raise ValueError(
      "an empty GradScaler state_dict comes from a disabled scaler: there is no loss scale in it"
    )
  missing = [key for key in _TORCH_KEYS if key not in source]
  if missing:
    raise ValueError(
      f"not a GradScaler state_dict: {', '.join(missing)} missing, expected {', '.join(_TORCH_KEYS)}"
    )
  scale, growth, backoff, interval, tracker = (source[key] for key in _TORCH_KEYS)
  interval = positive_integer("growth_interval", interval)
  config = _dynamic(
    scale,
    growth_factor=growth,
    backoff_factor=backoff,
    growth_interval=interval,
    min_scale=LOWEST,
  )
  tracker = number("_growth_tracker", tracker)
  if tracker != int(tracker) or tracker < 0:
    raise ValueError(f"_growth_tracker={tracker!r}: expected a count of finite steps")
  return config, int(tracker)


def _dynamic(scale: object, *, min_scale: float, **rules: Any) -> LossScaling:
  try:
    scale = number("scale", scale)
    # A scale below the source's own minimum (set by hand, for example) stays.
    low = max(min(min_scale, scale), LOWEST)
    return LossScaling(kind="dynamic", init_scale=scale, min_scale=low, max_scale=HIGHEST, **rules)
  except ValueError as error:
    raise ValueError(str(error).replace("init_scale", "scale")) from error
