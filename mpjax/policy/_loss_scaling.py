"""`LossScaling`: the rules of a loss scale, as data; other libraries' rules as presets."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import numbers
import reprlib
from collections.abc import Mapping
from typing import Any, TypeAlias

import jmp
import numpy as np

from mpjax._gone import instead
from mpjax._types import PolicyLike
from mpjax.dtypes import did_you_mean

LOWEST, HIGHEST = 2.0**-126, 2.0**126

# If the original has no bound, the bound is that of float32's normal range.
PRESETS: dict[str, dict[str, Any]] = {
  # torch.amp.GradScaler: torch/amp/grad_scaler.py, _amp_update_scale_
  "grad_scaler": {"min_scale": LOWEST, "max_scale": HIGHEST},
  # Megatron-LM DynamicGradScaler: megatron/core/optimizer/grad_scaler.py, optimizer_config.py
  "megatron": {"init_scale": 2.0**32, "growth_interval": 1000, "hysteresis": 2, "max_scale": HIGHEST},
  # DeepSpeed DynamicLossScaler with the defaults of its fp16 config: deepspeed/runtime/fp16/loss_scaler.py
  "deepspeed": {"growth_interval": 1000, "hysteresis": 2, "max_scale": HIGHEST},
  # keras.optimizers.LossScaleOptimizer
  "keras": {"init_scale": 2.0**15, "min_scale": LOWEST, "max_scale": HIGHEST},
  # jmp.DynamicLossScale, with the first scale of its README
  "jmp": {"init_scale": 2.0**15, "max_scale": HIGHEST},
  # flax.training.dynamic_scale.DynamicScale, which grows on the step after `growth_interval` finite ones
  "flax": {"growth_interval": 2001, "min_scale": LOWEST, "max_scale": HIGHEST},
}


@dataclasses.dataclass(frozen=True)
class LossScaling:
  """Rules of a loss scale: the validated arguments of `mpjax.dynamic_loss_scale`.

  ```python
  scaling = mpjax.LossScaling(growth_interval=1000)
  tx = mpjax.with_loss_scaling(optax.adamw(1e-3), mpjax.LossScaling.preset("megatron", init_scale=2.0**16))
  ```

  A scale or factor need not be a power of two; if it is not, unscaling rounds every gradient.

  Attributes:
    kind: `"dynamic"`, or `"static"`: the scale stays `init_scale`. For `"static"` the other fields have no
      meaning: they are not checked, and become the defaults.
    init_scale: first scale.
    growth_factor: multiplies the scale after `growth_interval` finite steps in a row.
    backoff_factor: multiplies the scale after `hysteresis` non-finite steps.
    growth_interval: finite steps in a row before the scale grows.
    min_scale: the scale never falls below it.
    max_scale: the scale never grows above it; at most 2**126, above which its reciprocal is
      subnormal and is flushed to zero.
    hysteresis: non-finite steps before the first back-off; growth restores this patience.

  Raises:
    ValueError: names the first field that is out of range.
  """

  kind: str = "dynamic"
  init_scale: float = 2.0**16
  growth_factor: float = 2.0
  backoff_factor: float = 0.5
  growth_interval: int = 2000
  min_scale: float = 1.0
  max_scale: float = 2.0**24
  hysteresis: int = 1

  @classmethod
  def preset(cls, name: str, **changes: Any) -> LossScaling:
    """Returns another library's rules by name, with some fields changed.

    | preset | first scale | grows on finite step | patience | bounds |
    |---|---|---|---|---|
    | `grad_scaler` (torch) | 2^16 | 2000 | 1 | none |
    | `megatron` | 2^32 | 1000 | 2, restored by growth | 1 and up |
    | `deepspeed` | 2^16 | 1000 | 2, restored by growth | 1 and up |
    | `keras` | 2^15 | 2000 | 1 | none |
    | `jmp` | 2^15 | 2000 | 1 | 1 and up |
    | `flax` | 2^16 | 2001 | 1 | none |

    "None" means the bounds of float32: 2^-126 and 2^126. DeepSpeed raises an exception at its lowest scale;
    here the scale stays there.

    Raises:
      ValueError: for an unknown preset, or a field out of range.
    """
    if name not in PRESETS:
      raise ValueError(
        f"unknown loss scaling preset {name!r}: expected one of {', '.join(PRESETS)}"
        + did_you_mean(str(name), list(PRESETS))
      )
    return cls(**{**PRESETS[name], **changes})

  def to_dict(self) -> dict[str, Any]:
    """Returns all fields as plain data, which a policy's `loss_scaling` takes back."""
    return dataclasses.asdict(self)

  def shorthand(self) -> str | float | dict[str, Any]:
    """Returns the same in short: a static scale's number, else the differences from `dynamic`."""
    if self.kind == "static":
      return self.init_scale
    usual = LossScaling().to_dict()
    changed = {key: value for key, value in self.to_dict().items() if value != usual[key]}
    return {"kind": self.kind, **changed} if changed else self.kind

  def __post_init__(self) -> None:
    if self.kind not in ("dynamic", "static"):
      raise ValueError(f"loss scaling kind {self.kind!r}: expected 'dynamic' or 'static'")
    if self.kind == "static":
      for field in dataclasses.fields(self):
        if field.name not in ("kind", "init_scale"):
          object.__setattr__(self, field.name, field.default)
    for name in ("init_scale", "growth_factor", "backoff_factor", "min_scale", "max_scale"):
      object.__setattr__(self, name, number(name, getattr(self, name)))
    for name in ("growth_interval", "hysteresis"):
      object.__setattr__(self, name, positive_integer(name, getattr(self, name)))
    for name in ("init_scale", "min_scale", "max_scale"):
      value = getattr(self, name)
      if not LOWEST <= value <= HIGHEST:
        raise ValueError(
          f"{name}={value!r}: expected a positive number from 2**-126 to 2**126, so that neither the "
          "scale nor its reciprocal leaves the normal range of float32"
        )
    if self.kind == "dynamic":
      self._check_adjustment()

  def _check_adjustment(self) -> None:
    # The scale is float32, and so are its factors.
    with np.errstate(over="ignore", under="ignore"):
      growth, backoff = np.float32(self.growth_factor), np.float32(self.backoff_factor)
    if growth <= 1:
      raise ValueError(f"growth_factor={self.growth_factor!r}: expected a number above 1, in float32 too")
    if not 0 < backoff < 1:
      raise ValueError(
        f"backoff_factor={self.backoff_factor!r}: expected a number between 0 and 1, in float32 too"
      )
    if self.min_scale > self.max_scale:
      raise ValueError(f"min_scale={self.min_scale!r} is above max_scale={self.max_scale!r}")
    if not self.min_scale <= self.init_scale <= self.max_scale:
      raise ValueError(
        f"init_scale={self.init_scale!r}: expected a value from min_scale={self.min_scale!r} "
        f"to max_scale={self.max_scale!r}"
      )


LossScalingSpec: TypeAlias = LossScaling | PolicyLike | float | None


def parse_loss_scaling(spec: LossScalingSpec) -> LossScaling | None:
  """Returns the `LossScaling` that `spec` describes; `None` for no scaling.

  Args:
    spec: a `LossScaling`, or a policy that has one; `None` or `"none"`; `"dynamic"`; the name of a preset; a
      number (a static scale); or a mapping of `LossScaling`'s fields, with `preset` as the one to start
      from.

  Raises:
    ValueError: names the wrong part and the choices.
  """
  if spec is None or isinstance(spec, LossScaling):
    return spec
  if isinstance(spec, jmp.Policy) and hasattr(spec, "loss_scaling"):  # an mpjax.Policy
    return spec.loss_scaling
  if isinstance(spec, Mapping):
    fields = [f.name for f in dataclasses.fields(LossScaling)]
    values = dict(spec)
    for key in values:
      if key not in (*fields, "preset"):
        hint = instead(str(key), "loss_scaling") or did_you_mean(str(key), ["preset", *fields])
        raise ValueError(
          f"unknown loss_scaling key {key!r}: expected one of preset, {', '.join(fields)}{hint}"
        )
    return LossScaling.preset(values.pop("preset"), **values) if "preset" in values else LossScaling(**values)
  if isinstance(spec, str) and spec in ("dynamic", "none"):
    return LossScaling() if spec == "dynamic" else None
  if isinstance(spec, str) and spec in PRESETS:
    return LossScaling.preset(spec)
  try:
    return LossScaling(kind="static", init_scale=number("loss_scaling", spec))
  except ValueError as error:
    raise ValueError(
      f"loss_scaling={reprlib.repr(spec)} of type {type(spec).__name__}: expected none, dynamic, "
      f"a preset ({', '.join(PRESETS)}), a number (a static scale), a mapping such as "
      "{kind: dynamic, init_scale: 65536}, or in Python a policy, as "
      "mpjax.get_policy('fp16')" + _yaml_hint(spec) + did_you_mean(str(spec), ["none", "dynamic", *PRESETS])
    ) from error


def number(name: str, value: object) -> float:
  """Returns `value` as a finite float; YAML 1.1 reads `1e-4` as a string and `on` as a boolean.

  Raises:
    ValueError: names `name`, if it is not one.
  """
  if hasattr(value, "item") and getattr(value, "size", 1) == 1:
    value = value.item()
  if isinstance(value, str):
    with contextlib.suppress(ValueError):
      value = float(value)
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real) or not math.isfinite(value):
    raise ValueError(f"{name}={value!r}: expected a finite number" + _yaml_hint(value))
  return float(value)


def positive_integer(name: str, value: object) -> int:
  """Returns `value` as an integer from 1 to the largest of int32.

  Raises:
    ValueError: names `name`, if it is not one.
  """
  out = number(name, value)
  if out != int(out) or not 1 <= out < 2**31:
    raise ValueError(f"{name}={value!r}: expected a positive integer below 2**31")
  return int(out)


def _yaml_hint(value: object) -> str:
  return " (YAML reads on, off, yes and no as booleans: quote the word)" if isinstance(value, bool) else ""
