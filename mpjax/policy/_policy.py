"""`Policy`, and its readers: from a preset's name, a string, a mapping or a `jmp.Policy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import jax
import jmp
import numpy as np

from mpjax._render.html_sections import sections_html
from mpjax._render.text_sections import of_rows
from mpjax._types import DTypeLike, PolicyLike
from mpjax.dtypes import (
  DTYPE_NAMES,
  MASTER_WEIGHTS,
  STATE_DTYPES,
  cast_by_rank,
  cast_floating,
  check_dtype,
  did_you_mean,
  parse_dtype,
  platform,
)
from mpjax.formats._passes import PASSES, SHORT_NAMES
from mpjax.fp8 import Recipe
from mpjax.fp8._recipe import parse_recipe
from mpjax.patterns import component_regex
from mpjax.policies import ALIASES, presets, read_preset
from mpjax.policy._loss_scaling import LossScaling, parse_loss_scaling
from mpjax.policy._override import CHOICES, Override, require_possible
from mpjax.policy._policy_text import brief, plain, read_text, write_text

T = TypeVar("T")

_SHORT = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype"}
_SHORT |= {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
_TRIPLE = ("param_dtype", "compute_dtype", "output_dtype")
_EXAMPLE = "params=float32,compute=bfloat16,output=float32"
_FLOAT32 = np.dtype("float32")
_E4M3 = STATE_DTYPES["float8_e4m3fn"]
# Formats of 8 bits, allowed in no other field.
_ALSO = {"optimizer_dtype": STATE_DTYPES, "gather_dtype": {_E4M3.name: _E4M3}}


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Policy(jmp.Policy):
  """A `jmp.Policy` and the other precision settings of a run. Frozen and hashable; `get_policy` makes one.

  ```python
  half = mpjax.get_policy("bf16").cast_to_compute(params)  # bfloat16
  ```

  Attributes:
    param_dtype: dtype of the parameters that the optimiser updates (the master weights).
    compute_dtype: dtype of parameters and inputs; under autocast, of products and operations after them.
    output_dtype: dtype of the result of the model or loss function.
    reduce_dtype: dtype in which gradients cross devices; `None`: float32, or their own if that is wider.
    gather_dtype: dtype in which parameters that are divided over `fsdp` are gathered, if only matrix
      products read them: float8_e4m3fn, with a scale for each; or `compute_dtype` (also `None`).
    accum_dtype: accumulation dtype of matrix products; `None`: the device's default.
    grad_dtype: dtype of the gradients that half-precision products under autocast give float32
      parameters: float32 (also `None`), or `compute_dtype`.
    optimizer_dtype: dtype in which the optimiser keeps its state: float32; or, by `mpjax.quantized_state`,
      int8, float8_e4m3fn or bfloat16. It always computes in float32. `None`: `param_dtype`.
    master_weights: master weights of half-precision parameters (`mpjax.master_weights`): `"int16"`, `"int8"`,
      `"float32"`, `"stochastic"`; `None`, or `"none"`: no master weights, updates are rounded to nearest.
    vector_dtype: dtype of parameters of fewer than two dimensions (norms, biases); `None`: `param_dtype`.
    matmul_precision: a name of `jax.default_matmul_precision`, e.g. `"tensorfloat32"`; for several passes
      also `"bfloat16_x3"`, `"bfloat16_x6"`, `"bfloat16_x9"` or `"tensorfloat32_x3"`; `None`: JAX's default.
    loss_scaling: `LossScaling` or `None`; parsed from every value of `loss_scaling:` in YAML.
    fp8: the `Recipe` of FP8 products or `None`; parsed from every value of `fp8:` in YAML.
    autocast: whether a step runs the loss function under `mpjax.autocast`, or casts parameters and batch.
    overrides: (regex on the module path, `Override`) pairs, or a mapping, for autocast; the first match wins.
    name: the user's name for it; equality ignores it, and `reason`.
    reason: the reason for the choice, if the backend chose.
  """

  _: dataclasses.KW_ONLY
  reduce_dtype: np.dtype | None = None
  gather_dtype: np.dtype | None = None
  accum_dtype: np.dtype | None = None
  grad_dtype: np.dtype | None = None
  optimizer_dtype: np.dtype | None = None
  master_weights: str | None = None
  vector_dtype: np.dtype | None = None
  matmul_precision: str | None = None
  loss_scaling: LossScaling | None = None
  fp8: Recipe | None = None
  autocast: bool = False
  overrides: tuple[tuple[str, Override], ...] = ()
  name: str | None = None
  reason: str | None = None

  def __new__(cls, *args: Any, **kwargs: Any) -> Self:
    given = {*_TRIPLE[: len(args)], *kwargs}
    if cls is Policy and given and not given.issuperset(_TRIPLE):  # pickle makes one without arguments
      raise TypeError(
        f"mpjax.Policy takes {', '.join(_TRIPLE)}; for a name, or fewer dtypes, write "
        "mpjax.get_policy('bf16'), mpjax.get_policy('compute=bfloat16')"
      )
    return super().__new__(cls)

  def __post_init__(self) -> None:
    for field in _FIELDS:
      value = getattr(self, field)
      if field.endswith("_dtype") and (value is not None or field in _SHORT.values()):
        object.__setattr__(self, field, check_dtype(field, value, _ALSO.get(field, {}).values()))
    # NumPy holds float64 equal to None.
    if self.gather_dtype is not None and self.gather_dtype == self.compute_dtype:
      object.__setattr__(self, "gather_dtype", None)
    elif self.gather_dtype is not None and self.gather_dtype != _E4M3:
      raise ValueError(
        f"gather_dtype={self.gather_dtype.name!r}: expected compute_dtype, which is "
        f"{self.compute_dtype.name}, or float8_e4m3fn"
      )
    if self.matmul_precision is not None:
      full = SHORT_NAMES.get(str(self.matmul_precision), self.matmul_precision)
      object.__setattr__(self, "matmul_precision", full)
      try:
        with jax.default_matmul_precision(self.matmul_precision):
          pass
      except (TypeError, ValueError) as error:
        raise ValueError(
          f"matmul_precision={self.matmul_precision!r}: expected one of {', '.join(SHORT_NAMES)}, or a name "
          f"of jax.default_matmul_precision ({error})"
        ) from error
    if not isinstance(self.autocast, bool):
      raise ValueError(f"autocast={self.autocast!r}: expected true or false")
    object.__setattr__(self, "master_weights", self._checked_master_weights())
    object.__setattr__(self, "loss_scaling", parse_loss_scaling(self.loss_scaling))
    object.__setattr__(self, "fp8", parse_recipe(self.fp8))
    object.__setattr__(self, "overrides", parse_overrides(self.overrides))

  def _checked_master_weights(self) -> str | None:
    value = self.master_weights
    if value in (None, "none"):
      return None
    if value not in MASTER_WEIGHTS:
      choices = [*MASTER_WEIGHTS, "none"]
      raise ValueError(
        f"master_weights={value!r}: expected one of {', '.join(choices)}" + did_you_mean(str(value), choices)
      )
    dtypes = ("bfloat16",) if value.startswith("int") else ("bfloat16", "float16")
    if self.param_dtype.name not in dtypes:
      raise ValueError(
        f"master_weights={value!r} is for parameters in {' or '.join(dtypes)}, and param_dtype is "
        f"{self.param_dtype.name}" + (": those are master weights" if self.param_dtype == _FLOAT32 else "")
      )
    return value

  def cast_to_param(self, x: T) -> T:
    """Casts the floating leaves of a tree to `param_dtype`, or to `vector_dtype`."""
    if self.vector_dtype is None:
      return cast_floating(x, self.param_dtype)
    return cast_by_rank(x, self.vector_dtype, self.param_dtype)

  def cast_to_compute(self, x: T) -> T:
    """Casts the floating leaves of a tree to `compute_dtype`."""
    return cast_floating(x, self.compute_dtype)

  def cast_to_output(self, x: T) -> T:
    """Casts the floating leaves of a tree to `output_dtype`."""
    return cast_floating(x, self.output_dtype)

  def with_output_dtype(self, output_dtype: DTypeLike) -> Policy:
    """Returns the same policy with another `output_dtype`."""
    return _changed(self, {"output_dtype": output_dtype})

  def without_histories(self) -> Policy:
    """Returns the policy with `recipe: current` instead of delayed FP8 scaling: for inference."""
    return self if self.fp8 is None else _changed(self, {"fp8": self.fp8.without_histories()})

  @property
  def in_passes(self) -> bool:
    """Whether float32 products run in named passes of a narrower dtype."""
    return self.compute_dtype == _FLOAT32 and self.matmul_precision in PASSES

  @property
  def across_devices(self) -> dict[str, str]:
    """The fields that matter only for several devices: `{"reduce_dtype": "bfloat16"}`."""
    found = {key: getattr(self, key) for key in ("reduce_dtype", "gather_dtype")}
    return {key: np.dtype(dtype).name for key, dtype in found.items() if dtype is not None}

  def without_devices(self) -> Policy:
    """Returns the policy without the fields that matter only for several devices."""
    return _changed(self, dict.fromkeys(self.across_devices))

  def same_dtypes(self, other: jmp.Policy) -> bool:
    """Returns whether a `Policy` or `jmp.Policy` (never equal to this) has the same three dtypes."""
    return all(np.dtype(getattr(self, key)) == np.dtype(getattr(other, key)) for key in _SHORT.values())

  @property
  def label(self) -> str:
    """A short name for tables: its own; or a preset or the three dtypes, with the fewest changes."""
    return self._label(whole=False)

  @property
  def full_label(self) -> str:
    """The label with mappings, such as overrides, written out, and with the choice of `auto`."""
    label = self._label(whole=True)
    if self.reason is None:
      return label
    return f"{label} ({dataclasses.replace(self, name=None, reason=None)._label(whole=True)})"

  def _label(self, *, whole: bool) -> str:
    if self.name is not None:
      return self.name
    alike = {name: p for name, p in _preset_policies().items() if p.compute_dtype == self.compute_dtype}
    labels = {name: self._changes(preset) for name, preset in alike.items()} | {
      self._dtypes(): self._others()
    }
    start = min(labels, key=lambda name: len(labels[name]))
    short = lambda value: "..." if isinstance(value, dict) and not whole else value
    changes = {key: short(value) for key, value in labels[start].items()}
    return ",".join([start, *(write_text({key: value}) for key, value in changes.items())])

  def to_dict(self) -> dict[str, Any]:
    """Returns the whole policy as plain data for YAML, which `get_policy` takes back."""
    return {key: plain(getattr(self, key)) for key in _FIELDS}

  def __str__(self) -> str:
    others = self._others()
    return ",".join([self._dtypes(), write_text(others)] if others else [self._dtypes()])

  def __repr__(self) -> str:
    return f"get_policy({str(self)!r})"

  def _repr_html_(self) -> str:
    fields = {key: getattr(self, key).name for key in dict.fromkeys(_SHORT.values())} | self._others()
    rows = [write_text({key: value}).split("=", 1) for key, value in fields.items()]
    return sections_html([of_rows(f"policy {self.full_label}", [["field", "value"], *rows], left=(0, 1))])

  def __eq__(self, other: object) -> bool:
    return self._key() == other._key() if isinstance(other, Policy) else NotImplemented

  def __hash__(self) -> int:
    return hash(self._key())

  def _dtypes(self) -> str:
    return f"params={self.param_dtype.name},compute={self.compute_dtype.name},output={self.output_dtype.name}"

  def _others(self) -> dict[str, Any]:
    """Returns the fields other than the three dtypes that are not at their defaults, as short plain data."""
    changes = self._changes(Policy(*[_FLOAT32] * 3))
    return {key: value for key, value in changes.items() if key not in _SHORT.values()}

  def _changes(self, base: Policy) -> dict[str, Any]:
    """Returns the fields that differ from another policy's, as short plain data."""
    fields = zip(_FIELDS, self._key(), base._key(), strict=True)
    return {key: brief(getattr(self, key)) for key, own, other in fields if own != other}

  def _key(self) -> tuple[Any, ...]:
    # By name, since np.dtype("float64") == None.
    values = (getattr(self, key) for key in _FIELDS)
    return tuple(value.name if isinstance(value, np.dtype) else value for value in values)


_FIELDS = tuple(field.name for field in dataclasses.fields(Policy) if field.name not in ("name", "reason"))


# The fields, which `__new__` would hide from `help` and editors.
_PARAMETERS = list(inspect.signature(Policy.__init__).parameters.values())[1:]
Policy.__signature__ = inspect.Signature(_PARAMETERS)


def get_policy(spec: PolicyLike, *, backend: str | None = None) -> Policy:
  """Returns the policy that `spec` describes.

  ```python
  policy = mpjax.get_policy("fp16")
  policy = mpjax.get_policy({"base": "fp16", "overrides": {".*/head": "fp32"}})
  ```

  Args:
    spec: one of

      - a preset: `fp32`, `tf32`, `bf16`, `fp16`, `fp8`, `bf16_pure`, `bf16_lean`, or `auto` (chosen by
        backend); also by the names of Keras (`mixed_bfloat16`, ...) and Lightning (`bf16-mixed`, ...);
      - a dtype or its name, for all three (`half`, `full`, `float16`, `f32`, ... as in `jmp`);
      - a `jmp` string, `params=float32,compute=bfloat16,output=float32` or `p=f32,c=bf16,o=f32` (params
        defaults to float32, compute to params, output to compute), and other fields as `str(policy)` writes;
      - a mapping of `Policy`'s fields, with `base` as the preset or string to start from;
      - a `jmp.Policy` or a `Policy`.
    backend: platform name for `auto` and `half`; `None` calls `jax.default_backend()`.

  Returns:
    An `mpjax.Policy`; a `Policy` is returned unchanged.

  Raises:
    ValueError: names the wrong part and the choices.
  """
  if isinstance(spec, (np.dtype, type)):
    dtype = check_dtype("policy", spec)
    return Policy(dtype, dtype, dtype, name=dtype.name)
  if isinstance(spec, Policy):
    return spec  # type: ignore[return-value]  # mypy does not know the base class
  if isinstance(spec, jmp.Policy):
    return Policy(spec.param_dtype, spec.compute_dtype, spec.output_dtype)
  if isinstance(spec, Mapping):
    return _from_mapping(spec, backend)
  if isinstance(spec, str):
    return _from_string(spec.strip(), backend)
  raise ValueError(
    f"policy {reprlib.repr(spec)} of type {type(spec).__name__}: expected a string, a mapping, a dtype, a "
    f"jmp.Policy or an mpjax.Policy; presets are {', '.join(presets())}"
  )


def matmul_precision(policy: Policy) -> contextlib.AbstractContextManager[Any]:
  """Returns a context that traces matrix products at the policy's precision, or at the caller's."""
  if policy.matmul_precision is None:
    return contextlib.nullcontext()
  return jax.default_matmul_precision(policy.matmul_precision)


def parse_overrides(
  spec: Mapping[str, Any] | Sequence[tuple[str, Any]], backend: str | None = None
) -> tuple[tuple[str, Override], ...]:
  """Reads per-module overrides.

  Args:
    spec: (regex on the module path, override) pairs, or a mapping; an override is an `Override`, a dtype, a
      preset, or a mapping or string of `Override`'s fields and `base`.
    backend: see `get_policy`.

  Raises:
    ValueError: names the pattern, and the part of the override that is wrong or cannot be set for a module.
  """
  pairs = list(spec.items()) if isinstance(spec, Mapping) else spec
  if not isinstance(pairs, (list, tuple)) or not all(
    isinstance(p, (list, tuple)) and len(p) == 2 for p in pairs
  ):
    raise ValueError(
      f"overrides={reprlib.repr(spec)}: expected a mapping from regular expressions to policies"
    )
  overrides: dict[str, Override] = {}
  for pattern, override in pairs:
    try:
      component_regex(pattern)
    except (ValueError, TypeError) as error:
      raise ValueError(f"policy override {pattern!r}: not a regular expression ({error})") from error
    try:
      overrides.setdefault(pattern, _read_override(override, backend))  # the first match wins
    except ValueError as error:
      raise ValueError(f"policy override {pattern!r}: {error}") from error
  return tuple(overrides.items())


def _from_string(text: str, backend: str | None) -> Policy:
  if "=" in text:
    values = read_text(text)
    policy = _from_mapping(values, backend)
    return dataclasses.replace(policy, name=text) if values.keys() <= _SHORT.keys() else policy
  name = ALIASES.get(text, text)
  # `bf16` is first a preset (float32 master weights), then a dtype; `bfloat16` has jmp's meaning.
  if name not in presets():
    if name != "half" and name not in DTYPE_NAMES:
      raise ValueError(
        f"unknown policy {text!r} (Unknown dtype or preset): expected one of {', '.join(presets())}, a dtype "
        f"such as half, or a string such as {_EXAMPLE!r}"
        + did_you_mean(text.replace("float8", "fp8"), [*presets(), "half", *DTYPE_NAMES, *ALIASES])
      )
    dtype = parse_dtype(name, text, backend)
    return Policy(dtype, dtype, dtype, name=text)
  data = read_preset(name)
  if "by_backend" not in data:
    return dataclasses.replace(_from_mapping(data, backend), name=name)
  device = platform(backend)
  chosen = data["by_backend"][device]
  reason = f"{name} on {device}: {chosen['base']}, {chosen['reason']}"
  return dataclasses.replace(get_policy(chosen["base"]), name=name, reason=reason)


def _from_mapping(spec: Mapping[str, Any], backend: str | None) -> Policy:
  values = _fields(spec, backend)
  if "overrides" in values:
    values["overrides"] = parse_overrides(values["overrides"], backend)
  base = values.pop("base", None)
  if base is None:
    values.setdefault("param_dtype", _FLOAT32)
    values.setdefault("compute_dtype", values["param_dtype"])
    values.setdefault("output_dtype", values["compute_dtype"])
    return Policy(**values)
  if values.get("fp8") in _NO_CHANGE:
    del values["fp8"]
  return _changed(get_policy(base, backend=backend), values)


def _changed(policy: Policy, values: Mapping[str, Any]) -> Policy:
  """Returns a policy with other values of fields, without its name; the same object if nothing differs."""
  changed: Policy = dataclasses.replace(policy, **values, name=None, reason=None)
  return policy if changed == policy else changed


@functools.cache
def _preset_policies() -> Mapping[str, Policy]:
  """Returns the policies of the presets, by name, except `auto`, which is one of the others."""
  return {name: get_policy(name) for name in presets() if name != "auto"}


_NO_CHANGE: tuple[Any, ...] = ({}, [], ())  # an `fp8` mapping that keeps the base's; null removes it


def _fields(spec: Mapping[str, Any], backend: str | None, more: tuple[str, ...] = ()) -> dict[str, Any]:
  """Returns a mapping under the full names of fields, with parsed dtypes."""
  values: dict[str, Any] = {}
  for key, value in spec.items():
    field = _SHORT.get(key, key)
    if field not in ("base", *_FIELDS, *more):
      choices = ["base", *_FIELDS, *more]
      raise ValueError(
        f"unknown policy key {key!r}: expected one of {', '.join([*choices, *_SHORT])}"
        + did_you_mean(str(key), [*choices, "params", "compute", "output"])
      )
    if field in values:
      raise ValueError(f"policy key {key!r} repeats {field!r}")
    if field.endswith("_dtype") and value is not None:
      value = parse_dtype(value, f"{key}: {value}", backend, _ALSO.get(field))
    values[field] = value
  return values


def _read_override(spec: Override | PolicyLike, backend: str | None) -> Override:
  if isinstance(spec, Override):
    return spec
  if isinstance(spec, str) and "=" in spec:
    spec = read_text(spec)
  if isinstance(spec, Mapping):
    return _override_from_mapping(spec, backend)
  policy = get_policy(spec, backend=backend)
  others = policy._others()
  if policy in _preset_policies().values():
    for key in ("loss_scaling", "autocast", "fp8"):  # these fields of a preset are for the whole run
      others.pop(key, None)
  if others or not policy.same_dtypes(Policy(*[policy.compute_dtype] * 3)):  # more than a dtype
    others |= {"param_dtype": policy.param_dtype, "output_dtype": policy.output_dtype}
  require_possible(others, policy.compute_dtype)
  return Override(policy.compute_dtype, policy.fp8 is not None)


def _override_from_mapping(spec: Mapping[str, Any], backend: str | None) -> Override:
  values = _fields(spec, backend, tuple(CHOICES))
  base = _read_override(values.pop("base"), backend) if values.get("base") is not None else Override()
  changes = {key: values.pop(key) for key in ("compute_dtype", *CHOICES) if key in values}
  if base.compute_dtype is None and values.keys() & {"param_dtype", "output_dtype"}:
    changes.setdefault("compute_dtype", values.get("param_dtype", _FLOAT32))  # as in a policy
  if "fp8" in values and values["fp8"] is None:
    changes["fp8"] = False
  elif "fp8" in values and values["fp8"] not in _NO_CHANGE:
    raise ValueError(
      f"fp8={values['fp8']!r} cannot be set for a module, whose recipe is the policy's own; "
      "name the preset, fp8"
    )
  values.pop("fp8", None)
  override = dataclasses.replace(base, **changes)
  require_possible(values, override.compute_dtype)
  if override == Override():
    raise ValueError(f"expected a dtype, a preset, or a mapping of base, compute_dtype, {', '.join(CHOICES)}")
  return override
