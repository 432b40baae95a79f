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
from mpjax.dtypes import did_you_mean, one_of

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
_NAMES: dict[str, dict[str, Any]] = {"none": {}, "dynamic": {}, **PRESETS}


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

    They are those of `grad_scaler` (torch), `megatron`, `deepspeed`, `keras`, `jmp` and `flax`; the page on
    loss scaling has them in a table. DeepSpeed raises an exception at its lowest scale; here the scale stays.

    Raises `ValueError` for an unknown preset, or a field out of range.
    """
    if name not in PRESETS:
      raise ValueError(f"unknown loss scaling preset {name!r}: {one_of(name, PRESETS)}")
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
    for field in dataclasses.fields(self)[1:]:
      is_read = self.kind == "dynamic" or field.name == "init_scale"
      value = getattr(self, field.name) if is_read else field.default
      counts = isinstance(field.default, int)
      checked = number(field.name, value, counts=counts)
      object.__setattr__(self, field.name, int(checked) if counts else checked)
    scales = ("init_scale", "min_scale", "max_scale")
    least, most = (self.min_scale, self.max_scale) if self.kind == "dynamic" else (LOWEST, HIGHEST)
    between = f"a value from min_scale={least!r} to max_scale={most!r}"
    in_range = (
      "a positive number from 2**-126 to 2**126, so that neither the scale nor its reciprocal leaves the "
      "normal range of float32"
    )
    # The scale is float32, and so are its factors.
    with np.errstate(over="ignore", under="ignore"):
      growth, backoff = np.float32(self.growth_factor), np.float32(self.backoff_factor)
    for name, holds, expected in (
      *((key, LOWEST <= getattr(self, key) <= HIGHEST, in_range) for key in scales),
      ("growth_factor", growth > 1, "a number above 1, in float32 too"),
      ("backoff_factor", 0 < backoff < 1, "a number between 0 and 1, in float32 too"),
      ("min_scale", least <= most, f"at most max_scale={most!r}"),
      ("init_scale", least <= self.init_scale <= most, between),
    ):
      if not holds:
        raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")


LossScalingSpec: TypeAlias = LossScaling | PolicyLike | float | None


def parse_loss_scaling(spec: LossScalingSpec) -> LossScaling | None:
  """Returns the `LossScaling` that `spec` describes, or `None`; `ValueError` for any other.

  It is a `LossScaling`, or a policy that has one; `None` or `"none"`; `"dynamic"`; the name of a preset; a
  number (a static scale); or a mapping of `LossScaling`'s fields, with `preset` as the one to start from.
  """
  if spec is None or isinstance(spec, LossScaling):
    return spec
  if isinstance(spec, jmp.Policy) and hasattr(spec, "loss_scaling"):  # an mpjax.Policy
    return spec.loss_scaling
  if isinstance(spec, str) and spec in _NAMES:
    return None if spec == "none" else parse_loss_scaling(_NAMES[spec])
  if isinstance(spec, Mapping):
    fields = ["preset", *(f.name for f in dataclasses.fields(LossScaling))]
    for key in spec:
      if key not in fields:
        hint = instead(str(key), "loss_scaling") or did_you_mean(str(key), fields)
        raise ValueError(f"unknown loss_scaling key {key!r}: expected one of {', '.join(fields)}{hint}")
    values = dict(spec)
    return LossScaling.preset(values.pop("preset"), **values) if "preset" in values else LossScaling(**values)
  try:
    return LossScaling(kind="static", init_scale=number("loss_scaling", spec))
  except ValueError as error:
    raise ValueError(
      f"loss_scaling={reprlib.repr(spec)} of type {type(spec).__name__}: expected none, dynamic, "
      f"a preset ({', '.join(PRESETS)}), a number (a static scale), a mapping such as "
      "{kind: dynamic, init_scale: 65536}, or in Python a policy, as "
      "mpjax.get_policy('fp16')" + _yaml_hint(spec) + did_you_mean(str(spec), _NAMES)
    ) from error


def number(name: str, value: object, *, counts: bool = False) -> float:
  """Returns `value` as a finite float, or if it `counts`, an integer from 1 on; else raises `ValueError`.

  YAML 1.1 reads `1e-4` as a string and `on` as a boolean.
  """
  if hasattr(value, "item") and getattr(value, "size", 1) == 1:
    value = value.item()
  if isinstance(value, str):
    with contextlib.suppress(ValueError):
      value = float(value)
  if isinstance(value, (bool, np.bool_)) or not isinstance(value, numbers.Real) or not math.isfinite(value):
    raise ValueError(f"{name}={value!r}: expected a finite number" + _yaml_hint(value))
  out = float(value)
  if counts and (out != int(out) or not 1 <= out < 2**31):
    raise ValueError(f"{name}={value!r}: expected a positive integer below 2**31")
  return out


def _yaml_hint(value: object) -> str:
  return " (YAML reads on, off, yes and no as booleans: quote the word)" if isinstance(value, bool) else ""
