"""FP8 matrix products under autocast: which products they are, why others are not, and their emission."""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._calls import AT_THE_USER
from mpjax._types import Array, Fp8State, JaxprEqn, PyTree
from mpjax.casting._kinds import is_float, size
from mpjax.casting._reasons import Code
from mpjax.casting._sources import Product, Root
from mpjax.fp8 import Recipe, check_state, lacks, open_state
from mpjax.jaxpr import Calls, backward_depth, shape_of, times_run
from mpjax.products import (
  GRADIENT,
  LHS,
  NOTHING,
  RHS,
  Spec,
  free_dims,
  multiply_dot,
  multiply_ragged,
  observe,
  recipe_of_experts,
  spread,
  why_not_fp8,
)


class Fp8Product(NamedTuple):
  """One quantised product.

  Attributes:
    spec: the formats and the scaling, without the dtype of its result.
    roots: the identities of its operands in the program.
    number: its number among the products of a program.
  """

  spec: Spec
  roots: tuple[Root | None, Root | None]
  number: int


class ProductRole(NamedTuple):
  """The role of a matrix product in its program.

  Attributes:
    active: which of its operands come after a layer.
    gradients: which of its operands are gradients, in a backward pass inside the program.
    roots: the identities of its operands.
    size: elements of its result; in a backward pass, elements of the gradient operand.
    last: whether no product follows it.
    weights: which of its operands are weights.
    after: the share of the program's products with a weight that come after it; a loop counts as often as it
      runs, and all of a loop's products have the share of its first run.
  """

  active: tuple[bool, bool]
  gradients: tuple[bool, bool]
  roots: tuple[Root | None, Root | None]
  size: int
  last: bool = False
  weights: tuple[bool, bool] = (False, False)
  after: float = 1.0

  @property
  def first(self) -> bool:
    """Whether no layer came before it."""
    return not any(self.active)


def product_roles(
  products: Sequence[Product], is_followed: Callable[[Product], bool]
) -> dict[Calls, ProductRole]:
  """Returns the role of each product of a program, by its place.

  A backward product has the role of the forward product that it differentiates.

  Args:
    products: the products, in the order of the program.
    is_followed: whether another product may follow one.
  """
  known = {product.place: _role(product, is_followed(product)) for product in products}
  again = {place for place in known if any(backward_depth(call) for call, _ in place[:-1])}
  backward = {place for place, role in known.items() if any(role.gradients)}
  forward = {place: role for place, role in known.items() if place not in backward | again}
  forward |= _with_shares(forward)
  recomputed = _inherited({place: known[place] for place in again - backward}, forward)
  both = forward | recomputed
  return both | _inherited({place: known[place] for place in backward}, both)


def _role(product: Product, is_followed: bool) -> ProductRole:
  """Returns the role of a product by its place alone."""
  equation, (lhs, rhs) = product.equation, product.operands
  gradient = lhs.gradient or rhs.gradient or backward_depth(equation) > 0
  still = [not x.active and not x.gradient for x in (lhs, rhs)]
  return ProductRole(
    (lhs.active, rhs.active),
    (lhs.gradient, rhs.gradient),
    product.roots,
    size(equation.invars[0 if lhs.gradient else 1] if gradient else equation.outvars[0]),
    last=not is_followed,
    weights=(still[0] and not still[1], still[1]),
  )


def _inherited(
  products: Mapping[Calls, ProductRole], forward: Mapping[Calls, ProductRole]
) -> dict[Calls, ProductRole]:
  """Returns products of a backward pass with the roles of the forward products that they differentiate.

  Args:
    products: products of gradients, or recomputed ones; those without a forward product are left out.
    forward: the other products.
  """
  readers: dict[Root | None, list[ProductRole]] = {}
  for role in forward.values():
    for root in filter(None, role.roots):
      readers.setdefault(root, []).append(role)
  found = {}
  for place, role in products.items():
    roots = [root for root, gradient in zip(role.roots, role.gradients, strict=True) if not gradient]
    sources = [p for root in roots for p in readers.get(root, [])]
    sources = [p for p in sources if p.size == role.size] or sources
    if not sources or all(role.gradients):
      continue
    active = role.active  # of a recomputed product
    if any(role.gradients):
      active = (all(p.active[0] for p in sources), all(p.active[1] for p in sources))
    last, after = any(p.last for p in sources), min(p.after for p in sources)
    found[place] = role._replace(active=active, last=last, after=after)
  return found


def _with_shares(products: Mapping[Calls, ProductRole]) -> dict[Calls, ProductRole]:
  """Returns products with a weight, with the share of them that comes after each.

  Args:
    products: products of the forward pass, in the order of the program.
  """

  def outermost_loop(place: Calls) -> Calls:
    """Returns the outermost loop around a product; the product itself without one."""
    return next((place[: i + 1] for i, (e, _) in enumerate(place) if times_run(e) > 1), place)

  weighted = (place for place, role in products.items() if not all(role.active))
  counts = {place: math.prod(times_run(equation) for equation, _ in place) for place in weighted}
  found: dict[Calls, ProductRole] = {}
  after = 0
  for _, together in itertools.groupby(reversed(counts), outermost_loop):
    places = list(together)
    after += sum(counts[place] for place in places)
    share = (after - 1) / sum(counts.values())
    found |= {place: products[place]._replace(after=share) for place in places}
  return found


class Sites:
  """Names for histories of delayed scaling, and numbers for products in the order of the decisions."""

  def __init__(self) -> None:
    self.numbers = itertools.count()
    self._names: dict[tuple[str, Hashable], str] = {}

  def name(self, path: str, weight: Hashable) -> str:
    """Returns the module path, and a number if it has several weights (each given by its identity)."""
    if (path, weight) not in self._names:
      i = sum(known == path for known, _ in self._names)
      self._names[path, weight] = f"{path}:{i}" if i else path or ":0"
    return self._names[path, weight]


class SideInputs(NamedTuple):
  """Inputs of an emitted program that the user's program does not have; bodies that read them get them, too.

  Attributes:
    scales: float32[3] for lhs, rhs and gradient, by number of the FP8 product; their cotangents are amaxes.
    tap_probes: the probes of a tap, by number of the tapped value: an array, or a tree of arrays, with
      a row for each step of the loops around the value.
  """

  scales: dict[int, Array]
  tap_probes: dict[int, PyTree]


def support(recipe: Recipe) -> tuple[str, bool | None]:
  """Returns why this machine quantises no product by a recipe, empty if it does, and `Spec.native`."""
  lack = lacks(recipe)
  # A machine without a GPU may compile for one: the platform decides.
  native = None if jax.default_backend() in ("cpu", "tpu") else False
  return ("" if recipe.emulate else lack), (native if lack else True)


def warn_of(recipes: set[Recipe], compute_dtype: str) -> None:
  """Warns if a policy asks for FP8 that the device does not have."""
  for recipe in recipes:
    if lack := support(recipe)[0]:
      warnings.warn(
        f"the policy asks for FP8 products, but {lack}: they run in {compute_dtype} instead. For the numbers "
        "of FP8 without its speed, put emulate: true into the policy's fp8 mapping",
        UserWarning,
        **AT_THE_USER,
      )


def decide(
  equation: JaxprEqn, path: str, recipe: Recipe, role: ProductRole | None, sites: Sites
) -> dict[str, Any]:
  """Decides whether a product that would run in half precision is an FP8 one: fields of its `Decision`.

  Args:
    equation: the product.
    path: its module path.
    recipe: the recipe of its module.
    role: its role in the program; `None` inside a custom derivative rule.
    sites: the names of delayed scaling's histories.
  """
  name, of_experts = equation.primitive.name, _is_ragged(equation)
  if lack := support(recipe)[0]:
    return {"code": Code.NO_UNITS, "about": lack}
  if name not in ("dot_general", "ragged_dot_general"):
    about = "it is a convolution" if name == "conv_general_dilated" else f"there is no FP8 {name}"
    return {"code": Code.UNFIT, "about": about}
  if role is None:
    return {"code": Code.IN_RULE}
  if any(role.gradients) and recipe.backward == "compute":
    return {"code": Code.IN_BACKWARD}
  if all(role.active) and not recipe.attention:
    return {"code": Code.ATTENTION}
  if role.first and not recipe.first_layer:
    return {"code": Code.FIRST_LAYER}
  if role.last and not recipe.last_layer:
    return {"code": Code.LAST_LAYER}
  if not all(role.active) and role.after < (recipe.keep_last or 0):
    return {"code": Code.LAST_LAYERS, "about": f"{recipe.keep_last:g}"}
  if of_experts:
    if lack := why_not_fp8(equation):
      return {"code": Code.UNFIT, "about": lack}
    recipe = recipe_of_experts(recipe)
  site = None
  # Gradients of a backward pass inside the program have no history: they have their own scale.
  if recipe.recipe == "delayed" and not any(role.gradients):
    side = int(not role.active[1])  # the position of the weight
    weight = id(equation) if all(role.active) else (role.roots[side], side)
    # Also if the sizes are unfit: another batch may have sizes that fit.
    site = sites.name(path, weight)
  if unfit := _unfit(equation, recipe):
    return {"code": Code.UNFIT, "about": unfit, "site": site}
  weights = None if of_experts else role.weights
  spec = Spec(recipe, gradients=role.gradients, weights=weights, native=support(recipe)[1])
  fp8 = Fp8Product(spec, role.roots, next(sites.numbers))
  code = Code.FP8_EXPERTS if of_experts else Code.FP8
  return {"code": code, "about": str(recipe), "fp8": fp8, "site": site}


def _is_ragged(equation: JaxprEqn) -> bool:
  return "ragged_dot_dimension_numbers" in equation.params


def _unfit(equation: JaxprEqn, recipe: Recipe) -> str | None:
  """Returns why a product of an equation's sizes is not quantised; `None` if it is.

  It counts as [M, K] x [K, N], without batch dimensions, one of experts with the weight of one. All three
  sizes matter: each is contracted in one of the forward and the two backward products.
  """
  lhs, rhs = map(shape_of, equation.invars[:2])
  ragged = equation.params.get("ragged_dot_dimension_numbers")
  contracted, batch = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
  dims = (contracted, (batch[0], (*batch[1], *ragged.rhs_group_dimensions)) if ragged else batch)
  parts = {
    "M": [lhs[i] for i in free_dims(len(lhs), dims, 0)],
    "K": [lhs[i] for i in contracted[0]],
    "N": [rhs[i] for i in free_dims(len(rhs), dims, 1)],
  }
  if not all(isinstance(size, int) for part in parts.values() for size in part):
    return "a dimension is symbolic, so it may not be a multiple of 16"
  sizes = {name: math.prod(part) for name, part in parts.items()}
  shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
  odd = [name for name, size in sizes.items() if size % recipe.multiple]
  if odd:
    return f"{shown}: {', '.join(odd)} is not a multiple of {recipe.multiple}"
  if min(sizes.values()) < recipe.min_dim:
    return f"{shown}: smaller than fp8.min_dim={recipe.min_dim}"
  return None


def emit(
  fp8: Fp8Product, equation: JaxprEqn, operands: Sequence[Array], side: SideInputs, out_dtype: np.dtype
) -> Array:
  """Returns the result of an FP8 product.

  Args:
    fp8: the decision.
    equation: the product in the user's program.
    operands: in any floating dtypes.
    side: under delayed scaling, its scales.
    out_dtype: dtype of the result.
  """
  spec = dataclasses.replace(fp8.spec, out_dtype=out_dtype)
  if _is_ragged(equation):
    return multiply_ragged(equation, operands, spec)
  lhs, rhs = operands[:2]  # originals may follow, in a product of an inner autocast
  dims = equation.params["dimension_numbers"]
  scales = side.scales.get(fp8.number)
  if scales is None:
    return multiply_dot(lhs, rhs, dims, spec)
  lhs, rhs = observe(lhs, scales, LHS), observe(rhs, scales, RHS)
  return observe(multiply_dot(lhs, rhs, dims, spec, list(scales)), scales, GRADIENT)


def tie_to_state(tie: Array | None, results: list[Array]) -> list[Array]:
  """Returns a program's results, tied so that a state of delayed scaling always has a next value.

  Args:
    tie: the probe that `open_state` gives for this; `None` without a state.
    results: arrays of any dtypes.
  """
  if tie is None:
    return results
  return [observe(x, tie, NOTHING) if is_float(jax.typeof(x)) else x for x in results]


def open_state_for(
  state: Fp8State | None, products: Iterable[tuple[str, Fp8Product]]
) -> tuple[SideInputs, Array | None]:
  """Returns what a program's products under delayed scaling read in a step, and the probe for `tie_to_state`.

  Args:
    state: the state from `mpjax.init_fp8_state`, or `None`.
    products: the FP8 products of the program that have a history, with its name.

  Raises:
    ValueError: if the program has products under delayed scaling but there is no state, or one of another
      function. A product without a history in the state is scaled by its own amax.
  """
  uses: dict[str, list[Fp8Product]] = {}
  for site, fp8 in products:
    uses.setdefault(site, []).append(fp8)
  if state is None and not uses:
    return SideInputs({}, {}), None
  if state is None:
    raise ValueError(
      "fp8 recipe 'delayed' scales by the amaxes of earlier steps: pass them as mpjax.autocast(..., "
      "fp8_state=state), first from mpjax.init_fp8_state(function, policy)(*arguments); or use 'current'"
    )
  recipes = {site: found[0].spec.recipe for site, found in uses.items()}
  check_state(state, {site: recipe.amax_history_len for site, recipe in recipes.items()})
  known = {site: found for site, found in uses.items() if site in state["amax"]}
  scales, tie = open_state(state, {site: recipes[site] for site in known})
  by_number: dict[int, Array] = {}
  for site, found in known.items():  # of products that share a history, the larger amax counts
    several = spread(scales[site], len(found)) if len(found) > 1 else scales[site][None]
    by_number |= {fp8.number: several[i] for i, fp8 in enumerate(found)}
  return SideInputs(by_number, {}), tie
