"""`Policy`, and its readers: from a preset's name, a string, a mapping or a `jmp.Policy`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jmp
import numpy as np

from mpjax._types import DTypeLike, PolicyLike
from mpjax.dtypes import (
  DTYPE_NAMES,
  MASTER_WEIGHTS,
  STATE_DTYPES,
  cast_by_rank,
  cast_floating,
  check_dtype,
  did_you_mean,
  one_of,
  parse_dtype,
  platform,
)
from mpjax.formats import PASSES, SHORT_NAMES
from mpjax.fp8 import Recipe, parse_recipe
from mpjax.patterns import component_regex
from mpjax.policies import ALIASES, presets, read_preset
from mpjax.policy._loss_scaling import LossScaling, parse_loss_scaling
from mpjax.policy._override import CHOICES, Override
from mpjax.policy._policy_text import brief, plain, read_text, write_text

T = TypeVar("T")

_OF_JMP = {"params": "param_dtype", "compute": "compute_dtype", "output": "output_dtype"}
_SHORT = {"p": "param_dtype", "c": "compute_dtype", "o": "output_dtype", **_OF_JMP}
_TRIPLE = tuple(_OF_JMP.values())
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

  # The defaults serve only the error for `Policy("bf16")`.
  param_dtype: np.dtype = None  # type: ignore[assignment]
  compute_dtype: np.dtype = None  # type: ignore[assignment]
  output_dtype: np.dtype = None  # type: ignore[assignment]
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

  def __post_init__(self) -> None:
    if any(getattr(self, key) is None for key in _TRIPLE):
      raise ValueError(
        f"mpjax.Policy takes {', '.join(_TRIPLE)}; for a name, or fewer dtypes, write "
        "mpjax.get_policy('bf16'), mpjax.get_policy('compute=bfloat16')"
      )
    put = functools.partial(object.__setattr__, self)
    for key in _DEFAULTS:
      value = getattr(self, key)
      if key.endswith("_dtype") and value is not None:
        put(key, check_dtype(key, value, _ALSO.get(key, {}).values()))
    if self.gather_dtype == self.compute_dtype:
      put("gather_dtype", None)
    if self.gather_dtype is not None and self.gather_dtype != _E4M3:
      raise ValueError(
        f"gather_dtype={self.gather_dtype.name!r}: expected compute_dtype, which is "
        f"{self.compute_dtype.name}, or float8_e4m3fn"
      )
    if self.matmul_precision is not None:
      put("matmul_precision", SHORT_NAMES.get(str(self.matmul_precision), self.matmul_precision))
      try:
        with matmul_precision(self):
          pass
      except (TypeError, ValueError) as error:
        raise ValueError(
          f"matmul_precision={self.matmul_precision!r}: expected one of {', '.join(SHORT_NAMES)}, or a name "
          f"of jax.default_matmul_precision ({error})"
        ) from error
    if not isinstance(self.autocast, bool):
      raise ValueError(f"autocast={self.autocast!r}: expected true or false")
    masters = None if self.master_weights == "none" else self.master_weights
    put("master_weights", masters)
    if masters not in (None, *MASTER_WEIGHTS):
      raise ValueError(f"master_weights={masters!r}: {one_of(masters, (*MASTER_WEIGHTS, 'none'))}")
    dtypes = ("bfloat16",) if str(masters).startswith("int") else ("bfloat16", "float16")
    if masters is not None and self.param_dtype.name not in dtypes:
      raise ValueError(
        f"master_weights={masters!r} is for parameters in {' or '.join(dtypes)}, and param_dtype is "
        f"{self.param_dtype.name}" + (": those are master weights" if self.param_dtype == _FLOAT32 else "")
      )
    put("loss_scaling", parse_loss_scaling(self.loss_scaling))
    put("fp8", parse_recipe(self.fp8))
    put("overrides", parse_overrides(self.overrides))

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

  def without_devices(self) -> Policy:
    """Returns the policy without the fields that matter only for several devices."""
    return _changed(self, {"reduce_dtype": None, "gather_dtype": None})

  def same_dtypes(self, other: jmp.Policy) -> bool:
    """Returns whether a `Policy` or `jmp.Policy` (never equal to this) has the same three dtypes."""
    return all(np.dtype(getattr(self, key)) == np.dtype(getattr(other, key)) for key in _TRIPLE)

  @property
  def label(self) -> str:
    """A short name for tables: its own; or a preset or the three dtypes, with the fewest changes."""
    return self.name or self._label(lambda value: "..." if isinstance(value, dict) else value)

  @property
  def full_label(self) -> str:
    """The label with mappings, such as overrides, written out, and with the choice of `auto`."""
    full = self._label(lambda value: value)
    return full if self.name is None else self.name if self.reason is None else f"{self.name} ({full})"

  def _label(self, shown: Callable[[Any], Any]) -> str:
    (_, base), *changes = as_changes(self).items()
    return ",".join([base, *(write_text({key: shown(value)}) for key, value in changes)])

  def to_dict(self) -> dict[str, Any]:
    """Returns the whole policy as plain data for YAML, which `get_policy` takes back."""
    return {key: plain(getattr(self, key)) for key in _DEFAULTS}

  def __str__(self) -> str:
    return self._text

  @functools.cached_property
  def _text(self) -> str:
    return write_text(self._dtypes() | self._changes(self.to_dict() | _OTHERS))

  def __repr__(self) -> str:
    return f"get_policy({str(self)!r})"

  # As plain data, which has dtypes by name, since np.dtype("float64") == None.
  def __eq__(self, other: object) -> bool:
    return self.to_dict() == other.to_dict() if isinstance(other, Policy) else NotImplemented

  def __hash__(self) -> int:
    return hash(str(self))

  def _dtypes(self) -> dict[str, str]:
    return {short: getattr(self, key).name for short, key in _OF_JMP.items()}

  def _changes(self, base: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that differ from another policy's plain data, as short plain data."""
    return {key: brief(getattr(self, key)) for key, value in self.to_dict().items() if value != base[key]}


# The plain data of fields that are not given; equality ignores `name` and `reason`.
_DEFAULTS = {f.name: plain(f.default) for f in dataclasses.fields(Policy) if f.name not in ("name", "reason")}
_OTHERS = {key: value for key, value in _DEFAULTS.items() if key not in _TRIPLE}


def as_changes(policy: Policy) -> dict[str, Any]:
  """Returns a preset or the dtypes as `base`, and the fewest changes that make a policy, for `get_policy`."""
  alike = {name: p for name, p in _preset_policies().items() if p.compute_dtype == policy.compute_dtype}
  bases = {name: preset.to_dict() for name, preset in alike.items()}
  bases[write_text(policy._dtypes())] = policy.to_dict() | _OTHERS
  changes = {name: policy._changes(base) for name, base in bases.items()}
  name = min(changes, key=lambda name: len(changes[name]))
  return {"base": name, **changes[name]}


def get_policy(spec: PolicyLike, *, backend: str | None = None) -> Policy:
  """Returns the policy that `spec` describes; a `Policy` as it is.

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
  """Reads per-module overrides: (regex on the module path, override) pairs, or a mapping.

  An override is an `Override`, a dtype, a preset, or a mapping or string of `Override`'s fields and `base`.
  `ValueError` names the pattern, and the part that is wrong or cannot be set for a module.
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
        "such as half, or a string such as 'params=float32,compute=bfloat16,output=float32'"
        + did_you_mean(text.replace("float8", "fp8"), [*presets(), "half", *DTYPE_NAMES, *ALIASES])
      )
    dtype = parse_dtype(name, text, backend)
    return Policy(dtype, dtype, dtype, name=text)
  data = read_preset(name)
  if "by_backend" not in data:
    return _preset(name)
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
  if values.get("fp8") in ({}, [], ()):  # keeps the base's; null removes it
    del values["fp8"]
  return _changed(get_policy(base, backend=backend), values)


def _changed(policy: Policy, values: Mapping[str, Any]) -> Policy:
  """Returns a policy with other values of fields, without its name; the same object if nothing differs."""
  changed: Policy = dataclasses.replace(policy, **values, name=None, reason=None)
  return policy if changed == policy else changed


@functools.cache
def _preset(name: str) -> Policy:
  """Returns the policy of a preset that is the same on every backend."""
  return dataclasses.replace(_from_mapping(read_preset(name), None), name=name)


def _preset_policies() -> Mapping[str, Policy]:
  """Returns the policies of the presets, by name, except `auto`, which is one of the others."""
  return {name: _preset(name) for name in presets() if name != "auto"}


def _fields(spec: Mapping[str, Any], backend: str | None, more: tuple[str, ...] = ()) -> dict[str, Any]:
  """Returns a mapping under the full names of fields, with parsed dtypes."""
  values: dict[str, Any] = {}
  for key, value in spec.items():
    field = _SHORT.get(key, key)
    if field not in ("base", *_DEFAULTS, *more):
      raise ValueError(f"unknown policy key {key!r}: {one_of(key, ('base', *_DEFAULTS, *more, *_SHORT))}")
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
    values = _fields(spec, backend, tuple(CHOICES))
    base = values.pop("base", None)
    override = Override() if base is None else _read_override(base, backend)
    if override.compute_dtype is None and values.keys() & {"param_dtype", "output_dtype"}:
      values.setdefault("compute_dtype", values.get("param_dtype", _FLOAT32))  # as in a policy
  else:
    policy = get_policy(spec, backend=backend)
    override = Override(policy.compute_dtype, policy.fp8 is not None)
    values = policy._changes(_OTHERS | dict.fromkeys(_TRIPLE, policy.compute_dtype.name))
    if policy in _preset_policies().values():
      for key in ("loss_scaling", "autocast", "fp8"):  # these fields of a preset are for the whole run
        values.pop(key, None)
    if values:  # more than a dtype
      values |= {"param_dtype": policy.param_dtype, "output_dtype": policy.output_dtype}
  own = {key: value for key, value in values.items() if key in ("compute_dtype", *CHOICES)}
  own |= {"fp8": False} if values.get("fp8", {}) is None else {}
  override = dataclasses.replace(override, **own)
  computes = plain(override.compute_dtype)
  # What each other field may say: nothing, under each name that a policy has for it.
  possible: dict[str, tuple[Any, ...]] = {
    "param_dtype": ("float32",),
    "output_dtype": ("float32", computes),
    "autocast": (True, computes != "float32"),
    "fp8": ([], {}),
  }
  for key, value in values.items():
    if key not in own and plain(value) not in possible.get(key, (None, "none", [], {})):
      raise ValueError(
        f"{key}={plain(value)!r} cannot be set for a module, since it holds for the whole program: put it "
        "into the policy, next to overrides; for FP8 products name the preset, fp8"
      )
  if override == Override():
    raise ValueError(f"expected a dtype, a preset, or a mapping of base, compute_dtype, {', '.join(CHOICES)}")
  return override
