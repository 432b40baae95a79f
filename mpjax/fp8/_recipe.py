"""`Recipe`: the rules for FP8 products, as the `fp8` mapping of a policy gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mpjax._gone import instead
from mpjax.dtypes import one_of

RECIPES = ("auto", "current", "delayed", "per_channel", "mx", "nvfp4")
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
_KEEP_LAST = 0.15  # of a 12B model's linear layers, arXiv 2509.25149 keeps 16%


# What each field may be: one of some names, an integer in a range, true or false, or a share.
_FIELDS: dict[str, Any] = {
  "recipe": RECIPES,
  "forward_dtype": FORMATS,
  "gradient_dtype": FORMATS,
  "backward": ("policy", "compute"),
  "margin": range(65),
  "amax_history_len": range(1, (1 << 20) + 1),
  "emulate": bool,
  "first_layer": bool,
  "last_layer": bool,
  "keep_last": float,
  "attention": bool,
  "min_dim": range(1, (1 << 20) + 1),
  "saved_activations": ("compute", "fp8"),
}
_OF_FP8 = RECIPES[:-1]  # NVFP4 has a format of its own
# The recipes that use a field, for one that not all do.
_USED_BY = {
  "forward_dtype": _OF_FP8,
  "gradient_dtype": _OF_FP8,
  "margin": ("auto", "current", "delayed", "per_channel"),
  "amax_history_len": ("delayed",),
  "saved_activations": ("auto", "current", "delayed"),
}


def _why_wrong(value: Any, allowed: Any) -> str:
  """Returns what is expected of a field in the place of a value; empty if it may be that."""
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  if allowed is bool:
    return "" if isinstance(value, bool) else "expected true or false"
  if allowed is float:
    return "" if value is None or (number and 0 <= value <= 1) else "expected a share from 0 to 1"
  if isinstance(allowed, range):
    fits = number and isinstance(value, int) and value in allowed
    return "" if fits else f"expected an integer of at least {allowed[0]} and at most {allowed[-1]}"
  values = ("", FP4, *FORMATS.values()) if allowed is FORMATS else allowed
  return "" if isinstance(value, str) and value in values else one_of(value, allowed)


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
    self._set(
      recipe="mx" if self.recipe == "block" else self.recipe,  # its name in earlier configs
      forward_dtype=_long_name(self.forward_dtype),
      gradient_dtype=_long_name(self.gradient_dtype),
    )
    for key, allowed in _FIELDS.items():
      value = getattr(self, key)
      if wrong := _why_wrong(value, allowed):
        raise ValueError(f"fp8.{key}={value!r}: {wrong}")
      used_by = _USED_BY.get(key, RECIPES)
      if self.recipe not in used_by and value not in (_USUAL[key], FP4):
        raise ValueError(
          f"fp8 key {key!r} belongs to recipe: {', '.join(used_by)}; not to recipe: {self.recipe}"
        )
    if self.keep_last is None:
      self._set(keep_last=_KEEP_LAST if self.recipe == "nvfp4" else 0.0)
    forward, gradient = self._formats()
    self._set(forward_dtype=forward, gradient_dtype=gradient)

  def _set(self, **values: Any) -> None:
    for key, value in values.items():
      object.__setattr__(self, key, value)

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

  def __str__(self) -> str:
    short = lambda name: name.split("_")[1].upper()
    if not self.forward_dtype:
      return self.recipe
    backward = "the compute dtype" if self.backward == "compute" else short(self.gradient_dtype)
    return f"{self.recipe} scaling, {short(self.forward_dtype)} forward, {backward} backward"

  def without_histories(self) -> Recipe:
    """Returns the recipe with `current` instead of `delayed` scaling: for inference."""
    if self.recipe != "delayed":
      return self
    return dataclasses.replace(self, recipe="current", amax_history_len=_USUAL["amax_history_len"])

  def to_dict(self) -> dict[str, Any]:
    """Returns the fields that the recipe uses as plain data, which `parse_recipe` takes back."""
    used = [key for key in _FIELDS if self.recipe in _USED_BY.get(key, RECIPES)]
    return {key: getattr(self, key) for key in used if getattr(self, key) != ""}

  def shorthand(self) -> str | dict[str, Any]:
    """Returns the same in short: the name of the recipe, and the differences from its defaults."""
    usual = Recipe(self.recipe).to_dict()
    changed = {key: value for key, value in self.to_dict().items() if value != usual.get(key)}
    return {"recipe": self.recipe, **changed} if changed else self.recipe


_USUAL: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Recipe)}
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
  for key in given:
    if key not in _FIELDS:
      raise ValueError(f"unknown fp8 key {key!r}{instead(str(key), 'fp8') or ': ' + one_of(key, _FIELDS)}")
  return Recipe(**given)


def _long_name(dtype: Any) -> str:
  """Returns the name of a dtype, given by any name or as itself."""
  name = dtype if isinstance(dtype, str) else getattr(dtype, "name", getattr(dtype, "__name__", str(dtype)))
  return FORMATS.get(name, name)
