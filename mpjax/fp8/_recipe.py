"""`Recipe`: the rules for FP8 products, as the `fp8` mapping of a policy gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpjax._gone import instead
from mpjax.dtypes import did_you_mean

RECIPES = ("auto", "current", "delayed", "per_channel", "mx", "nvfp4")
_FORMER = {"block": "mx"}  # names in configs of earlier versions
# By short name: OCP's formats, which NVIDIA uses; AMD's, which have no negative zero; that of TPU v5 and v6.
FORMATS = {
  "e4m3fn": "float8_e4m3fn",
  "e5m2": "float8_e5m2",
  "e4m3fnuz": "float8_e4m3fnuz",
  "e5m2fnuz": "float8_e5m2fnuz",
  "e4m3b11fnuz": "float8_e4m3b11fnuz",
}
FP4 = "float4_e2m1fn"
BLOCKS = {"mx": 32, "nvfp4": 16}  # elements with one scale
_SAVED = ("compute", "fp8")
_BACKWARD = ("policy", "compute")
_LARGEST_MARGIN = 64
_KEEP_LAST = 0.15  # of a 12B model's linear layers, arXiv 2509.25149 keeps 16%
_DELAYED_ONLY = ("amax_history_len",)
_SHARED = ("backward", "emulate", "first_layer", "last_layer", "attention", "min_dim")
_TENSORS_ONLY = ("margin", "saved_activations")
# The fields that a kind of recipe does not use. The scales of blocks have formats of their own.
_UNUSED: dict[str, tuple[str, ...]] = {
  "auto": _DELAYED_ONLY,
  "current": _DELAYED_ONLY,
  "delayed": (),
  "per_channel": (*_DELAYED_ONLY, "saved_activations"),
  "mx": (*_DELAYED_ONLY, *_TENSORS_ONLY),
  "nvfp4": (*_DELAYED_ONLY, *_TENSORS_ONLY, "forward_dtype", "gradient_dtype"),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
  """A rule for low-precision products: which are quantised, to which format, and by which scale.

  Attributes:
    recipe: the source of scales.
      `auto`: the recipe and formats of the device (`mpjax.formats.LOW_PRECISION`).
      `current`: the largest magnitude (amax) of the tensor itself.
      `delayed`: the amaxes of earlier steps (arXiv 2209.05433; `mpjax.init_fp8_state` makes the state).
      `per_channel`: the amax of the values that are summed together.
      `mx`: MXFP8, a power of two for every 32 elements along the contracted dimension.
      `nvfp4`: 4-bit elements, an E4M3 scale for every 16, and one for the tensor (arXiv 2509.25149).
    forward_dtype: format of weights and activations; by default the recipe's own, E4M3FN for FP8.
    gradient_dtype: format of incoming gradients; by default E5M2; for `per_channel` and `mx` the
      forward format.
    backward: products of the backward pass: as the `policy` says, or in the `compute` dtype.
    margin: binades left free above the amax.
    amax_history_len: the number of earlier steps whose largest amax `delayed` uses.
    emulate: also quantise on devices without units for the recipe, and multiply in a wider dtype there.
    first_layer: whether to quantise products that come before any other layer.
    last_layer: whether to quantise products that no other product follows.
    keep_last: share of the products with a weight, from the last one on, that stay in the compute dtype;
      by default 0.15 for `nvfp4`, 0 for others.
    attention: whether to quantise products of two activations.
    min_dim: products with a dimension below this stay in the compute dtype: they are too small to gain.
    saved_activations: the dtype of activations that the backward pass needs: `compute` or `fp8`.
  """

  recipe: str = "auto"
  forward_dtype: str = ""
  gradient_dtype: str = ""
  backward: str = "policy"
  margin: int = 0
  amax_history_len: int = 1024
  emulate: bool = False
  first_layer: bool = False
  last_layer: bool = False
  keep_last: float | None = None
  attention: bool = False
  min_dim: int = 128
  saved_activations: str = "compute"

  def __post_init__(self) -> None:
    given = set()
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if value != field.default:
        given.add(field.name)
        object.__setattr__(self, field.name, _value(field.name, field.default, value))
    _check_kind(self.recipe, given, self)
    if self.keep_last is None:
      object.__setattr__(self, "keep_last", _KEEP_LAST if self.recipe == "nvfp4" else 0.0)
    for name, dtype in zip(("forward_dtype", "gradient_dtype"), self._formats(), strict=True):
      object.__setattr__(self, name, dtype)

  def _formats(self) -> tuple[str, str]:
    """Returns the formats of a recipe; those of `auto` that are not given stay empty."""
    if self.recipe == "nvfp4":
      return FP4, FP4
    forward, gradient = self.forward_dtype, self.gradient_dtype
    if self.recipe == "auto" and not forward:
      return forward, gradient
    forward = forward or "float8_e4m3fn"
    if FP4 in (forward, gradient):
      raise ValueError(f"fp8: {FP4} belongs to recipe: nvfp4, not to recipe: {self.recipe}")
    fnuz = forward in ("float8_e4m3fnuz", "float8_e5m2fnuz")
    if not gradient:
      gradient = (
        forward if self.recipe in ("mx", "per_channel") else "float8_e5m2fnuz" if fnuz else "float8_e5m2"
      )
    both = f"fp8.forward_dtype={forward!r} with gradient_dtype={gradient!r}"
    if "e5m2" in forward and "e5m2" in gradient:
      raise ValueError(f"{both}: cuBLASLt multiplies no E5M2 by E5M2; use e4m3 for one of them")
    if fnuz != (gradient in ("float8_e4m3fnuz", "float8_e5m2fnuz")):
      raise ValueError(
        f"{both}: no device multiplies an FNUZ format by another; use both, as in e4m3fnuz and e5m2fnuz"
      )
    return forward, gradient

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
    return BLOCKS.get(self.recipe, 16)

  @property
  def of_tensors(self) -> bool:
    """Whether a tensor has one scale, whatever product reads it."""
    return self.recipe in ("current", "delayed")

  @property
  def asks_for_tensors(self) -> bool:
    """Whether a field asks for something that only recipes with a scale for each tensor have."""
    usual = {field.name: field.default for field in dataclasses.fields(self)}
    return any(getattr(self, name) != usual[name] for name in _TENSORS_ONLY)

  def __str__(self) -> str:
    short = lambda name: name.split("_")[1].upper()
    if not self.forward_dtype:
      return self.recipe
    backward = "the compute dtype" if self.backward == "compute" else short(self.gradient_dtype)
    return f"{self.recipe} scaling, {short(self.forward_dtype)} forward, {backward} backward"

  def of_kind(self, recipe: str) -> Recipe:
    """Returns another kind of recipe for the same products: with the fields that every kind has."""
    shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name in _SHARED}
    return Recipe(recipe, **shared)

  def without_histories(self) -> Recipe:
    """Returns the recipe with `current` instead of `delayed` scaling: for inference."""
    if self.recipe != "delayed":
      return self
    return dataclasses.replace(self, recipe="current", amax_history_len=Recipe().amax_history_len)

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields that the recipe uses as plain data, which `parse_recipe` takes back."""
    used = [f.name for f in dataclasses.fields(self) if f.name not in _UNUSED[self.recipe]]
    return {name: getattr(self, name) for name in used if getattr(self, name) not in ("", None)}

  def shorthand(self) -> str | dict[str, Any]:
    """Returns the same in short: the name of the recipe, and the differences from its defaults."""
    usual = Recipe(self.recipe).to_dict()
    changed = {key: value for key, value in self.to_dict().items() if value != usual.get(key)}
    return {"recipe": self.recipe, **changed} if changed else self.recipe


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
      hint = instead(str(key), "fp8") or did_you_mean(str(key), fields)
      raise ValueError(f"unknown fp8 key {key!r}: expected one of {', '.join(fields)}{hint}")
  values = {key: _value(key, fields[key].default, value) for key, value in given.items()}
  recipe = Recipe(**values)
  _check_kind(recipe.recipe, given, recipe)
  return recipe


def _check_kind(kind: str, keys: Iterable[str], recipe: Recipe) -> None:
  """Raises for keys that a kind of recipe does not use; a format or dtype may be the recipe's own."""
  for key in _UNUSED[kind]:
    own = "compute" if key == "saved_activations" else FP4 if kind == "nvfp4" else None
    if key not in keys or getattr(recipe, key) == own:
      continue
    why = "belongs to recipe: delayed, not to" if key in _DELAYED_ONLY else "does not apply to"
    raise ValueError(f"fp8 key {key!r} {why} recipe: {kind}")


def _value(key: str, default: object, value: Any) -> Any:
  choices: dict[str, Any] = {
    "recipe": RECIPES,
    "saved_activations": _SAVED,
    "backward": _BACKWARD,
  }
  if key == "recipe" and isinstance(value, str):
    value = _FORMER.get(value, value)
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
    if not name or name == FP4:  # as a recipe writes its own
      return name
    if name not in FORMATS.values():
      raise ValueError(
        f"fp8.{key}={value!r}: expected one of {', '.join(FORMATS)}" + did_you_mean(name, FORMATS)
      )
    return name
  if key == "keep_last":
    if value is not None and (
      isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1
    ):
      raise ValueError(f"fp8.keep_last={value!r}: expected a share from 0 to 1")
    return value if value is None else float(value)
  if isinstance(default, bool):
    if not isinstance(value, bool):
      raise ValueError(f"fp8.{key}={value!r}: expected true or false")
    return value
  least, most = (0, _LARGEST_MARGIN) if key == "margin" else (1, 1 << 20)
  if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
    raise ValueError(f"fp8.{key}={value!r}: expected an integer of at least {least} and at most {most}")
  return value
