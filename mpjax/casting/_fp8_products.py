"""Which matrix products under autocast are FP8, why others are not, and how one is carried out."""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from mpjax.casting._kinds import is_float
from mpjax.casting._product_roles import Product
from mpjax.fp8._amax_probe import GRADIENT, LHS, NOTHING, RHS, observe
from mpjax.fp8._delayed import check_state, open_state
from mpjax.fp8._dot_general import fp8_dot_general
from mpjax.fp8._eligibility import (
  Windows,
  conv_operands,
  conv_result,
  conv_sizes,
  sizes_of,
  unfit,
  windows_of,
)
from mpjax.fp8._hardware import fp8_units
from mpjax.fp8._recipe import Recipe


@dataclasses.dataclass
class Fp8:
  """A product that is quantised.

  Attributes:
    recipe: how.
    gradients: which of its operands are gradients.
    windows: the convolution that it is, if it is one.
    native: as of `fp8_dot_general`.
    roots: what identifies its operands in the program.
    site: under delayed scaling, what its history is kept under.
    use: under delayed scaling, its number among the products of a program.
  """

  recipe: Recipe
  gradients: tuple[bool, bool]
  windows: Windows | None
  native: bool | None
  roots: tuple[Any, Any]
  site: str | None = None
  use: int = 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Histories:
  """What delayed scaling knows at a step, and the probes of values that are looked at.

  Attributes:
    scales: by site, float32[3] for lhs, rhs and gradient.
    probes: by number of the product, float32[3].
    watches: by number of the value, the probe that what is seen of it goes to (`_probes.py`); with a row for
      each step of the loops that it is in, where those are kept apart.
    tie: a probe that every result has, so that the state has a next value whatever the program does.
  """

  scales: dict[str, Any] = dataclasses.field(default_factory=dict)
  probes: dict[int, Any] = dataclasses.field(default_factory=dict)
  tie: Any = None
  watches: dict[int, Any] = dataclasses.field(default_factory=dict)

  def of(self, products: Sequence[Fp8], watched: Sequence[int] = ()) -> Histories:
    """Those of some products and values."""
    sites = {fp8.site for fp8 in products}
    numbers = {fp8.use for fp8 in products if fp8.site is not None}
    return Histories(
      {site: x for site, x in self.scales.items() if site in sites},
      {number: x for number, x in self.probes.items() if number in numbers},
      watches={number: self.watches[number] for number in watched},
    )

  @property
  def arrays(self) -> list[Any]:
    """All of it, in one order."""
    return [*self.scales.values(), *self.probes.values(), *self.watches.values()]

  def with_arrays(self, arrays: Sequence[Any]) -> Histories:
    """The same with other arrays."""
    given = iter(arrays)
    scales = {site: next(given) for site in self.scales}
    probes = {number: next(given) for number in self.probes}
    return Histories(scales, probes, watches={number: next(given) for number in self.watches})


class Support(NamedTuple):
  """Whether products of a recipe are quantised on this machine, and what multiplies them.

  Attributes:
    why_not: why they are not, or `None`.
    native: as of `fp8_dot_general`.
  """

  why_not: str | None
  native: bool | None


def support(recipe: Recipe) -> Support:
  """What the default backend's device does with a recipe."""
  has_units, lack = fp8_units(recipe)
  platform = jax.default_backend()
  if has_units:
    return Support(None, True)
  if recipe.emulate:
    # On a machine without a GPU this may be compiled for one: the platform decides.
    return Support(None, None if platform in ("cpu", "tpu") else False)
  return Support(lack, None)


def works(recipe: Recipe) -> bool:
  """Whether anything is quantised on this machine."""
  return support(recipe).why_not is None


def warn_of(recipes: set[Recipe], compute_dtype: Any) -> None:
  """Says so where a policy asks for FP8 that the device does not have."""
  for recipe in recipes:
    lack = support(recipe).why_not
    if lack is not None:
      warnings.warn(
        f"the policy asks for FP8 products and {lack}: they run in {compute_dtype} instead. For the numbers "
        "of FP8 without its speed, put emulate: true into the policy's fp8 mapping",
        UserWarning,
        stacklevel=_stacklevel(),
      )


def barred(equation: Any, path: str, recipe: Recipe, product: Product | None) -> str | None:
  """Why a product is not FP8, whatever its sizes; `None` if it may be."""
  lack, excluded = support(recipe).why_not, recipe.excludes(path)
  if lack is not None:
    return f"{lack} (emulate: true quantises all the same)"
  if excluded is not None:
    return excluded
  if equation.primitive not in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
    return f"there is no FP8 {equation.primitive.name}"
  if product is None:
    return "it is inside a custom derivative rule, or recomputed in a backward pass"
  if all(product.active) and not recipe.attention:
    return "it multiplies two activations (fp8.attention)"
  if product.first and not recipe.first_layer:
    return "it is in the first layer (fp8.first_layer)"
  if product.last and not recipe.last_layer:
    return "it is in the last layer (fp8.last_layer)"
  if equation.primitive is jax.lax.conv_general_dilated_p and windows_of(equation) is None:
    return "a convolution whose windows overlap is no matrix product"
  return None


def decide(equation: Any, recipe: Recipe, product: Product) -> Fp8 | str:
  """A product that is not barred as FP8, or why its sizes are unfit."""
  lhs, rhs = (a.aval.shape for a in equation.invars[:2])
  windows = windows_of(equation) if equation.primitive is jax.lax.conv_general_dilated_p else None
  if windows is None:
    sizes = sizes_of(lhs, rhs, equation.params["dimension_numbers"])
  else:
    sizes = conv_sizes(windows, lhs, rhs)
  why_not = unfit(sizes, recipe)
  return why_not or Fp8(recipe, product.gradients, windows, support(recipe).native, product.roots)


def emit(fp8: Fp8, equation: Any, operands: list[Any], histories: Histories, out_dtype: Any) -> Any:
  """The result of an FP8 product.

  Args:
    fp8: the decision.
    equation: the product in the user's program.
    operands: in any floating dtypes.
    histories: of the product, under delayed scaling.
    out_dtype: dtype of the result.
  """
  lhs, rhs = operands
  dimension_numbers = equation.params["dimension_numbers"]
  if fp8.windows is not None:
    lhs, rhs = conv_operands(lhs, rhs, fp8.windows)
    dimension_numbers = (((lhs.ndim - 1,), (0,)), ((), ()))
  scales = probe = None
  recipe = fp8.recipe
  if recipe.recipe == "delayed" and fp8.site not in histories.scales:
    recipe = recipe.without_histories()
  elif fp8.site is not None:
    of_lhs, of_rhs, of_gradient = histories.scales[fp8.site]
    scales = (of_lhs, of_rhs, of_gradient)
    probe = histories.probes[fp8.use]
    lhs, rhs = observe(lhs, probe, LHS), observe(rhs, probe, RHS)
  out = fp8_dot_general(
    lhs,
    rhs,
    dimension_numbers,
    recipe,
    scales=scales,
    out_dtype=out_dtype,
    gradient_operand=fp8.gradients,
    native=fp8.native,
  )
  if probe is not None:
    out = observe(out, probe, GRADIENT)
  return out if fp8.windows is None else conv_result(out, fp8.windows)


def keep(histories: Histories, results: list[Any]) -> list[Any]:
  """A program's results, tied to the state."""
  if histories.tie is None:
    return results
  return [observe(x, histories.tie, NOTHING) if is_float(x) else x for x in results]


def number(products: Sequence[Fp8]) -> dict[str, list[int]]:
  """Numbers the products under delayed scaling; those of each site."""
  uses: dict[str, list[int]] = {}
  for i, fp8 in enumerate(products):
    if fp8.site is not None:
      fp8.use = i
      uses.setdefault(fp8.site, []).append(i)
  return uses


def open_histories(state: Any, recipes: dict[str, Recipe], uses: dict[str, list[int]]) -> Histories:
  """What delayed scaling knows, from its state.

  Raises:
    ValueError: if the program has products under delayed scaling and there is no state, or one of another
      function. A product that the state does not have is scaled by its own amax.
  """
  recipes = {site: recipes[site] for site in uses}
  if state is None and not recipes:
    return Histories()
  if state is None:
    raise ValueError(
      "fp8 recipe 'delayed' scales by the amaxes of earlier steps: pass them as mpjax.autocast(..., "
      "fp8_state=state), first from mpjax.init_fp8_state(function, policy)(*arguments); or use 'current'"
    )
  check_state(state, {site: recipe.amax_history_len for site, recipe in recipes.items()})
  known = {site: numbers for site, numbers in uses.items() if site in state["amax"]}
  return Histories(*open_state(state, {site: recipes[site] for site in known}, known))


def _stacklevel() -> int:
  """The stack level of the caller's own code."""
  frame, level = sys._getframe(1), 1
  while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
    "mpjax",
    "jax",
  ):
    frame, level = frame.f_back, level + 1
  return level
