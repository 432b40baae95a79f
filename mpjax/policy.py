"""Policies: which dtype holds what, as data that a YAML file, a string or a `jmp.Policy` can give.

A `Policy` is a `jmp.Policy` (param, compute and output dtypes) with the rest of what a run needs to
know beside it. `get_policy` is the one way in; `Policy.to_dict` and `str` are the ways out.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jmp
import numpy as np
import yaml

from mpjax import _compat
from mpjax.dtypes import DTYPE_NAMES, cast_floating, check_dtype, did_you_mean, parse_dtype, platform
from mpjax.fp8._recipe import Recipe, parse_recipe, to_pairs
from mpjax.loss_scale._presets import LossScaling, parse_loss_scaling
from mpjax.patterns import component_regex

T = TypeVar("T")

_STRING_KEYS = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype"}
_STRING_KEYS |= {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
_EXAMPLE = "params=float32,compute=bfloat16,output=float32"


@dataclasses.dataclass(frozen=True, eq=False)
class Policy(jmp.Policy):
  """A `jmp.Policy` and what else a run needs to know about precision. Frozen and hashable.

  Equal policies agree in every field but `name`, `reason` and `autocast`; a policy whose other fields are
  at their defaults also equals the `jmp.Policy` of the same three dtypes.

  Attributes:
    param_dtype: dtype of the parameters that the optimiser updates (the master weights).
    compute_dtype: dtype that parameters and inputs are cast to for a step; under autocast, that of the
      matrix products and of what follows them.
    output_dtype: dtype of what the model or loss function returns.
    reduce_dtype: dtype in which gradients cross devices; `None`: float32, or their own where that is wider.
    accum_dtype: accumulation dtype of matrix products; `None`: the device's default.
    optimizer_dtype: dtype in which the optimiser sees parameters and gradients and keeps its state;
      `None`: `param_dtype`.
    matmul_precision: a `jax.default_matmul_precision` name, e.g. `"tensorfloat32"`; `None`: JAX's.
    loss_scaling: `LossScaling`, or `None` for none.
    fp8: FP8 recipe as sorted (key, value) pairs (`to_dict` gives the mapping); empty: no FP8.
    autocast: whether a training step runs the loss function under `mpjax.autocast`, rather than cast the
      parameters and the batch.
    overrides: (regex on the module path, policy string) pairs, first match wins; for autocast.
    name: what the user called it.
    reason: why this was chosen, where the backend chose.
  """

  _: dataclasses.KW_ONLY
  reduce_dtype: Any = None
  accum_dtype: Any = None
  optimizer_dtype: Any = None
  matmul_precision: str | None = None
  loss_scaling: LossScaling | None = None
  fp8: tuple[tuple[str, Any], ...] = ()
  autocast: bool = False
  overrides: tuple[tuple[str, str], ...] = ()
  name: str | None = None
  reason: str | None = None

  def __post_init__(self) -> None:
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
      object.__setattr__(self, field, check_dtype(field, getattr(self, field)))
    for field in ("reduce_dtype", "accum_dtype", "optimizer_dtype"):
      if getattr(self, field) is not None:
        object.__setattr__(self, field, check_dtype(field, getattr(self, field)))
    if self.matmul_precision is not None:
      try:
        with jax.default_matmul_precision(self.matmul_precision):
          pass
      except (TypeError, ValueError) as error:
        raise ValueError(
          f"matmul_precision={self.matmul_precision!r}: expected a name of jax.default_matmul_precision "
          f"({error})"
        ) from error
    object.__setattr__(self, "loss_scaling", parse_loss_scaling(self.loss_scaling))
    object.__setattr__(self, "fp8", to_pairs(self.fp8))
    if not isinstance(self.autocast, bool):
      raise ValueError(f"autocast={self.autocast!r}: expected true or false")
    object.__setattr__(self, "overrides", parse_overrides(self.overrides))

  @property
  def fp8_recipe(self) -> Recipe | None:
    """What `fp8` says, with defaults; `None` for no FP8."""
    return parse_recipe(self.fp8)

  def without_histories(self) -> Policy:
    """The policy with `recipe: current` in place of delayed FP8 scaling: for inference."""
    if self.fp8_recipe is None or self.fp8_recipe.recipe != "delayed":
      return self
    pairs = {k: v for k, v in self.fp8 if not k.startswith("amax_")} | {"recipe": "current"}
    return dataclasses.replace(self, fp8=to_pairs(pairs))

  def cast_to_param(self, x: T) -> T:
    """Casts the floating leaves of a tree to `param_dtype`."""
    return cast_floating(x, self.param_dtype)

  def cast_to_compute(self, x: T) -> T:
    """Casts the floating leaves of a tree to `compute_dtype`."""
    return cast_floating(x, self.compute_dtype)

  def cast_to_output(self, x: T) -> T:
    """Casts the floating leaves of a tree to `output_dtype`."""
    return cast_floating(x, self.output_dtype)

  def with_output_dtype(self, output_dtype: Any) -> Policy:
    """The same policy with another `output_dtype`."""
    return dataclasses.replace(self, output_dtype=output_dtype)  # type: ignore[call-arg]

  def to_dict(self) -> dict[str, Any]:
    """The whole policy as plain data that YAML can hold; `get_policy` takes it back to an equal one."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name in ("name", "reason"):
        continue
      if isinstance(value, np.dtype):
        value = value.name
      elif isinstance(value, LossScaling):
        value = dataclasses.asdict(value)
      elif field.name == "fp8":
        value = {key: list(x) if isinstance(x, tuple) else x for key, x in value}
      elif field.name == "overrides":
        # A list: the first match wins, and writers of YAML sort the keys of a mapping.
        value = [list(pair) for pair in value]
      out[field.name] = value
    return out

  def __str__(self) -> str:
    return f"params={self.param_dtype.name},compute={self.compute_dtype.name},output={self.output_dtype.name}"

  def _extras(self) -> tuple[Any, ...]:
    # A jmp.Policy does not say by which means a training step applies it.
    skip = ("param_dtype", "compute_dtype", "output_dtype", "name", "reason", "autocast")
    return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in skip)

  def __eq__(self, other: object) -> bool:
    if isinstance(other, Policy):
      return _triple(self) == _triple(other) and self._extras() == other._extras()
    if type(other) is jmp.Policy:
      return self == get_policy(other)
    return NotImplemented

  def __hash__(self) -> int:
    return hash(_triple(self))


def get_policy(spec: Any, *, backend: str | None = None) -> Policy:
  """The policy that `spec` describes.

  Args:
    spec: one of
      - a preset: `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `bf16_pure`, or `auto` (chosen by backend);
      - a dtype name for all three (`half`, `full`, `float16`, `f32`, ... as in `jmp`);
      - a `jmp` string: `params=float32,compute=bfloat16,output=float32` or `p=f32,c=bf16,o=f32`, where
        params defaults to float32, compute to params and output to compute;
      - a mapping of `Policy`'s fields, with `base` naming the preset or string to start from;
      - a `jmp.Policy` or a `Policy`.
    backend: platform name for `auto` and `half`; `None` asks `jax.default_backend()`, at the call.

  Raises:
    ValueError: names the part that is wrong and the choices.
  """
  if isinstance(spec, Policy):
    return spec
  if isinstance(spec, jmp.Policy):
    return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
  if isinstance(spec, Mapping):
    return _from_mapping(spec, backend)
  if isinstance(spec, str):
    return _from_string(spec.strip(), backend)
  raise ValueError(
    f"policy {spec!r} of type {type(spec).__name__}: expected a string, a mapping, a jmp.Policy or an "
    f"mpjax.Policy; presets are {', '.join(presets())}"
  )


def matmul_precision(policy: Policy) -> contextlib.AbstractContextManager[Any]:
  """A context in which matrix products are traced at the policy's precision, or at the caller's."""
  if policy.matmul_precision is None:
    return contextlib.nullcontext()
  return jax.default_matmul_precision(policy.matmul_precision)


def presets() -> list[str]:
  """Names of the presets, in alphabetical order."""
  return sorted(path.name.removesuffix(".yaml") for path in _compat.preset_dir().iterdir())


def _from_string(text: str, backend: str | None) -> Policy:
  if "=" in text:
    return _from_pairs(text, backend)
  # `bf16` is a preset (float32 master weights) before it is a dtype; `bfloat16` has jmp's meaning.
  if text not in presets() and (text == "half" or text in DTYPE_NAMES):
    dtype = parse_dtype(text, text, backend)
    return Policy(dtype, dtype, dtype, name=text)
  if text not in presets():
    choices = [*presets(), "half", *DTYPE_NAMES]
    raise ValueError(
      f"unknown policy {text!r} (Unknown dtype or preset): expected one of {', '.join(presets())}, a dtype "
      f"such as half, or a string such as {_EXAMPLE!r}" + did_you_mean(text, choices)
    )
  data = yaml.safe_load(_compat.preset_dir().joinpath(f"{text}.yaml").read_text())
  if "by_backend" in data:
    device = platform(backend)
    data = data["by_backend"][device]
    return dataclasses.replace(
      get_policy(data["base"]),
      name=text,
      reason=f"{text} on {device}: {data['base']}, {data['reason']}",
    )
  return dataclasses.replace(_from_mapping(data, backend), name=text)


def _from_pairs(text: str, backend: str | None) -> Policy:
  dtypes: dict[str, np.dtype] = {}
  for part in text.split(","):
    key, _, value = part.partition("=")
    key = key.strip()
    if key not in _STRING_KEYS:
      raise ValueError(
        f"Unknown key {key!r} in policy {text!r}: expected params (p), compute (c) or output (o)"
        + did_you_mean(key, list(_STRING_KEYS))
      )
    field = _STRING_KEYS[key]
    if field in dtypes:
      raise ValueError(f"key {key!r} stands twice in policy {text!r}")
    dtypes[field] = parse_dtype(value.strip(), text, backend)
  param = dtypes.get("param_dtype", np.dtype("float32"))
  compute = dtypes.get("compute_dtype", param)
  return Policy(param, compute, dtypes.get("output_dtype", compute), name=text)


def _from_mapping(spec: Mapping[Any, Any], backend: str | None) -> Policy:
  fields = [f.name for f in dataclasses.fields(Policy) if f.name not in ("name", "reason")]
  dtype_fields = [f for f in fields if f.endswith("_dtype")]
  aliases = {k: v for k, v in _STRING_KEYS.items() if len(k) > 1}
  values: dict[str, Any] = {}
  for key, value in spec.items():
    field = aliases.get(key, key)
    if field not in (*fields, "base"):
      choices = ["base", *fields]
      raise ValueError(
        f"unknown policy key {key!r}: expected one of {', '.join(choices)}"
        + did_you_mean(str(key), [*choices, *aliases])
      )
    if field in values:
      raise ValueError(f"policy key {key!r} repeats {field!r}")
    if field in dtype_fields and value is not None:
      value = parse_dtype(value, f"{key}: {value}", backend)
    values[field] = value
  base = values.pop("base", None)
  if base is not None:
    policy = get_policy(base, backend=backend)
    if values.get("fp8") == {}:  # nothing is changed of what the base says; null takes it away
      del values["fp8"]
    return dataclasses.replace(policy, **values)
  values.setdefault("param_dtype", np.dtype("float32"))
  values.setdefault("compute_dtype", values["param_dtype"])
  values.setdefault("output_dtype", values["compute_dtype"])
  return Policy(**values)


def parse_overrides(spec: Any) -> tuple[tuple[str, str], ...]:
  """(regex, policy string) pairs from a mapping or from pairs; `ValueError` that names what is wrong."""
  pairs = list(spec.items()) if isinstance(spec, Mapping) else spec
  if not isinstance(pairs, (list, tuple)) or not all(
    isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs
  ):
    raise ValueError(f"overrides={spec!r}: expected a mapping from regular expressions to policies")
  for pattern, policy in pairs:
    try:
      component_regex(pattern)
    except (ValueError, TypeError) as error:
      raise ValueError(f"policy override {pattern!r}: not a regular expression ({error})") from error
    parsed = get_policy(policy)
    if not isinstance(policy, str) and parsed.fp8 and parsed.name != "fp8":
      raise ValueError(
        f"policy override {pattern!r}: name the preset, as in {pattern}: fp8; the recipe is that of the "
        "whole policy's fp8 mapping"
      )
  return tuple((pattern, _as_string(get_policy(p)) if not isinstance(p, str) else p) for pattern, p in pairs)


def _as_string(policy: Policy) -> str:
  return "fp8" if policy.fp8 else str(policy)


_triple: Callable[[jmp.Policy], tuple[Any, Any, Any]] = lambda p: (
  p.param_dtype,
  p.compute_dtype,
  p.output_dtype,
)
