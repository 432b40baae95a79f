"""`Recipe`: the rules for FP8 products, as the `fp8` mapping of a policy gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpjax.dtypes import did_you_mean
from mpjax.patterns import component_regex

RECIPES = ("current", "delayed", "block")
# By short name: OCP's formats, which NVIDIA uses, and AMD's, which have no negative zero.
FORMATS = {
  "e4m3fn": "float8_e4m3fn",
  "e5m2": "float8_e5m2",
  "e4m3fnuz": "float8_e4m3fnuz",
  "e5m2fnuz": "float8_e5m2fnuz",
}
BLOCK = 32  # elements with one scale, in MXFP8
_AMAX_COMPUTE = ("max", "most_recent")
_SAVED = ("compute", "fp8")
_LARGEST_MARGIN = 64
_DELAYED_ONLY = ("amax_history_len", "amax_compute")
# The fields that a kind of recipe does not use. The scales of blocks are always powers of two.
_UNUSED = {"delayed": (), "current": _DELAYED_ONLY, "block": (*_DELAYED_ONLY, "margin", "pow2_scales")}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A rule for FP8 products: which are quantised, to which format, and by which scale.

  Attributes:
    recipe: the source of scales. `current`: the largest magnitude (amax) of the tensor itself. `delayed`:
      the amaxes of earlier steps (arXiv 2209.05433; `mpjax.init_fp8_state` makes the state).
      `block`: MXFP8, a power of two for every 32 elements along the contracted dimension.
    forward_dtype: format of weights and activations.
    gradient_dtype: format of incoming gradients; by default E5M2, for `block` the forward format.
    margin: binades left free above the amax.
    pow2_scales: round scales down to powers of two, which scale without rounding.
    amax_history_len: the number of earlier steps that `delayed` uses.
    amax_compute: `max` over them, or the `most_recent`.
    emulate: also quantise on devices without FP8 units, and multiply in a wider dtype there.
    first_layer: whether to quantise products that come before any other layer.
    last_layer: whether to quantise products that no other product follows.
    attention: whether to quantise products of two activations.
    min_dim: products with a dimension below this stay in the compute dtype: they are too small to gain.
    include: regular expressions on the module path; if given, products elsewhere are not quantised.
    exclude: regular expressions on the module path where products are not quantised.
    saved_activations: the dtype of activations that the backward pass needs: `compute` or `fp8`.
  """

  recipe: str = "current"
  forward_dtype: str = "float8_e4m3fn"
  gradient_dtype: str = ""
  margin: int = 0
  pow2_scales: bool = False
  amax_history_len: int = 1024
  amax_compute: str = "max"
  emulate: bool = False
  first_layer: bool = False
  last_layer: bool = False
  attention: bool = False
  min_dim: int = 128
  include: tuple[str, ...] = ()
  exclude: tuple[str, ...] = ()
  saved_activations: str = "compute"

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != "gradient_dtype" or value:
        object.__setattr__(self, field.name, _value(field.name, field.default, value))
    fnuz = self.forward_dtype.endswith("fnuz")
    if not self.gradient_dtype:
      of_gradients = "float8_e5m2fnuz" if fnuz else "float8_e5m2"
      own = self.forward_dtype if self.recipe == "block" else of_gradients
      object.__setattr__(self, "gradient_dtype", own)
    if "e5m2" in self.forward_dtype and "e5m2" in self.gradient_dtype:
      raise ValueError(
        f"fp8.forward_dtype={self.forward_dtype!r} with gradient_dtype={self.gradient_dtype!r}: cuBLASLt "
        "multiplies no E5M2 by E5M2; use e4m3 for one of them"
      )
    if fnuz != self.gradient_dtype.endswith("fnuz"):
      raise ValueError(
        f"fp8.forward_dtype={self.forward_dtype!r} with gradient_dtype={self.gradient_dtype!r}: no device "
        "multiplies an FNUZ format by another; use both, as in e4m3fnuz and e5m2fnuz"
      )
    if self.recipe == "block" and self.saved_activations == "fp8":
      raise ValueError(
        "fp8.saved_activations='fp8' does not apply to recipe: block, whose forward and backward products "
        "scale blocks of different elements"
      )
    usual = {field.name: field.default for field in dataclasses.fields(self)}
    _check_kind(self.recipe, {key for key, value in usual.items() if getattr(self, key) != value})

  @property
  def forward(self) -> np.dtype:
    """Format of weights and activations."""
    return np.dtype(self.forward_dtype)

  @property
  def gradient(self) -> np.dtype:
    """Format of gradients."""
    return np.dtype(self.gradient_dtype)

  @property
  def multiple(self) -> int:
    """The number that every dimension of a product must be a multiple of."""
    return BLOCK if self.recipe == "block" else 16

  def without_histories(self) -> Recipe:
    """Returns the recipe with `current` instead of `delayed` scaling: for inference."""
    if self.recipe != "delayed":
      return self
    usual = Recipe()
    return dataclasses.replace(
      self, recipe="current", amax_history_len=usual.amax_history_len, amax_compute=usual.amax_compute
    )

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields that the recipe uses as plain data, which `parse_recipe` takes back."""
    used = [f.name for f in dataclasses.fields(self) if f.name not in _UNUSED[self.recipe]]
    values = {name: getattr(self, name) for name in used}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}

  def shorthand(self) -> str | dict[str, Any]:
    """Returns the same in short: the name of the recipe, and the differences from its defaults."""
    usual = Recipe(self.recipe).to_dict()
    changed = {key: value for key, value in self.to_dict().items() if value != usual[key]}
    return {"recipe": self.recipe, **changed} if changed else self.recipe

  def excludes(self, path: str) -> str | None:
    """Returns the reason why products at a module path are not quantised; `None` if they may be."""
    for pattern in self.exclude:
      if component_regex(pattern).search(path):
        return f"fp8.exclude has {pattern!r}"
    if self.include and not any(component_regex(pattern).search(path) for pattern in self.include):
      return "no pattern of fp8.include matches its module"
    return None


RecipeLike = Recipe | str | Mapping[str, Any] | Iterable[tuple[str, Any]] | None


def parse_recipe(spec: RecipeLike) -> Recipe | None:
  """Reads a policy's `fp8` key.

  Args:
    spec: a `Recipe`, the name of one, a mapping of its fields, or (key, value) pairs.

  Returns:
    The `Recipe`; `None` for `None` and for an empty mapping.

  Raises:
    ValueError: names the wrong key, and the expected values.
  """
  if isinstance(spec, Recipe):
    return spec
  if isinstance(spec, str):
    spec = {"recipe": spec}
  try:
    given = dict(spec or ())
  except (TypeError, ValueError) as error:
    raise ValueError(f"fp8={spec!r}: expected a mapping such as {{recipe: current}}") from error
  if not given:
    return None
  fields = {field.name: field for field in dataclasses.fields(Recipe)}
  for key in given:
    if key not in fields:
      raise ValueError(
        f"unknown fp8 key {key!r}: expected one of {', '.join(fields)}" + did_you_mean(str(key), fields)
      )
  values = {key: _value(key, fields[key].default, value) for key, value in given.items()}
  _check_kind(values.get("recipe", "current"), given)
  return Recipe(**values)


def _check_kind(kind: str, keys: Iterable[str]) -> None:
  """Raises for keys that a kind of recipe does not use."""
  for key in _UNUSED[kind]:
    if key in keys:
      why = "belongs to recipe: delayed, not to" if key in _DELAYED_ONLY else "does not apply to"
      raise ValueError(f"fp8 key {key!r} {why} recipe: {kind}")


def _value(key: str, default: object, value: Any) -> Any:
  choices: dict[str, Any] = {"recipe": RECIPES, "amax_compute": _AMAX_COMPUTE, "saved_activations": _SAVED}
  if key in choices:
    if value not in choices[key]:
      raise ValueError(
        f"fp8.{key}={value!r}: expected one of {', '.join(choices[key])}"
        + did_you_mean(str(value), choices[key])
      )
    return value
  if key.endswith("_dtype"):
    name = value if isinstance(value, str) else getattr(value, "name", getattr(value, "__name__", str(value)))
    name = FORMATS.get(name, name)
    if name not in FORMATS.values():
      raise ValueError(
        f"fp8.{key}={value!r}: expected one of {', '.join(FORMATS)}" + did_you_mean(name, FORMATS)
      )
    return name
  if isinstance(default, bool):
    if not isinstance(value, bool):
      raise ValueError(f"fp8.{key}={value!r}: expected true or false")
    return value
  if isinstance(default, int):
    least, most = (0, _LARGEST_MARGIN) if key == "margin" else (1, 1 << 20)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
      raise ValueError(f"fp8.{key}={value!r}: expected an integer of at least {least} and at most {most}")
    return value
  return _patterns(key, value)


def _patterns(key: str, value: object) -> tuple[str, ...]:
  patterns = (value,) if isinstance(value, str) else value
  if not isinstance(patterns, (list, tuple)) or not all(isinstance(p, str) for p in patterns):
    raise ValueError(f"fp8.{key}={value!r}: expected a list of regular expressions on the module path")
  for pattern in patterns:
    try:
      component_regex(pattern)
    except ValueError as error:
      raise ValueError(f"fp8.{key}: {error}") from error
  return tuple(patterns)
