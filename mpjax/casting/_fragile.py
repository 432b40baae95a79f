"""Operations that stay fragile in half precision under every policy: differences, angles, orders, loops."""

from __future__ import annotations

import enum
import functools
import math
import operator
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.extend.core import primitives

from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting._cast_plan import CastPlan, Mode, Node
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import Kind, is_float, size
from mpjax.casting._loop_facts import ends_by_products
from mpjax.casting._product_roles import is_layer, is_outer, states_precision
from mpjax.jaxpr import (
  Calls,
  Trait,
  backward_depth,
  bodies_of,
  equations_in,
  has,
  is_variable,
  open_jaxpr,
  shape_of,
)

REASONS = {
  "difference": "a difference of half-precision products: if they are nearly equal, its digits cancel",
  "residual": "a residual of a linear model: if its noise is little, its digits cancel",
  "angle": "an angle from a half-precision product: a large one keeps no fraction of a period",
  "order": "an order of noisy half-precision values: rounding makes some of them equal",
  "small": "a sum of few rounded products, such as coordinates: no matrix unit makes it faster",
  "loop": "half-precision products decide when the loop ends: it may end late, or never",
}

_MATRIX_UNIT = 8  # elements that a GPU's matrix unit contracts at least
_ANGLES = frozenset({jax.lax.sin_p, jax.lax.cos_p, jax.lax.tan_p})
_NOISE = frozenset(
  {primitives.random_bits_p, primitives.threefry2x32_p, jax.lax.rng_bit_generator_p, jax.lax.rng_uniform_p}
)
_SQUARES = frozenset({jax.lax.square_p, jax.lax.integer_pow_p, jax.lax.mul_p})


class Fragile(NamedTuple):
  """An operation whose result half precision may destroy.

  Attributes:
    node: the decision about it.
    kind: one of `REASONS`.
  """

  node: Node
  kind: str


def fragile_nodes(plan: CastPlan, rules: CastingRules) -> Iterator[Fragile]:
  """Yields the fragile operations of a whole program under its policy, in the order of the program."""
  yield from _fragile_in(plan, fragile_equations(plan.jaxpr, rules), rules)


def _fragile_in(plan: CastPlan, kinds: dict[JaxprEqn, str], rules: CastingRules) -> Iterator[Fragile]:
  for node in plan.nodes:
    kind = _kind_in(node, kinds)
    operands = [plan.held[a].kind for a in node.equation.invars if is_variable(a)]
    keeps = (kind == "order" and Kind.HALF not in operands) or (
      kind == "small" and node.mode is not Mode.HALF
    )
    if kind and node.half is not None and not keeps:
      yield Fragile(node, kind)
    if ends_by_products(node.equation, rules) and _multiplies_in_half(node):
      yield Fragile(node, "loop")
    for inner in node.call.plans if node.call else ():
      yield from _fragile_in(inner, kinds, rules)


def _kind_in(node: Node, kinds: dict[JaxprEqn, str]) -> str:
  """Returns the kind of an equation, or of the first fragile one in a call that runs as one."""
  bodies = () if node.call else bodies_of(node.equation)
  inner = (e for body in bodies for e in equations_in(body))
  return next((kinds[e] for e in (node.equation, *inner) if e in kinds), "")


def _multiplies_in_half(node: Node) -> bool:
  inner = (one for plan in (node.call.plans if node.call else ()) for one in plan.all_nodes())
  return any(one.listed == "allow" and one.mode is Mode.HALF for one in inner)


def fragile_equations(jaxpr: AnyJaxpr, rules: CastingRules) -> dict[JaxprEqn, str]:
  """Returns the kind of each equation of a program that is fragile if its products are half precision."""
  analysis = _MadeOf(rules)
  analysis.solve(jaxpr, [_Made.NONE] * len(open_jaxpr(jaxpr).invars))
  return analysis.fragile


def _is_small(equation: JaxprEqn) -> bool:
  """Returns whether a product of the forward pass contracts too few elements to fill a matrix unit."""
  if equation.primitive is not jax.lax.dot_general_p or is_outer(equation) or backward_depth(equation):
    return False
  (contracted, _), _ = equation.params["dimension_numbers"]
  sizes = [shape_of(equation.invars[0])[i] for i in contracted]
  return all(isinstance(n, int) for n in sizes) and 0 < math.prod(sizes) < _MATRIX_UNIT


class _Made(enum.Flag):
  """What a value is computed from."""

  NONE = 0
  PRODUCT = enum.auto()  # a product, times numbers
  SCALED = enum.auto()  # products, by elementwise operations
  SQUARES = enum.auto()  # sums of squares
  NOISE = enum.auto()  # random bits
  LINEAR = enum.auto()  # a product of inputs, parameters and constants
  BEHIND = enum.auto()  # a product, by any operations


class _MadeOf(ByRules[_Made]):
  """What values are computed from, up to the next product; `fragile` collects the findings."""

  nothing = _Made.NONE

  def __init__(self, rules: CastingRules):
    super().__init__(rules)
    self.fragile: dict[JaxprEqn, str] = {}

  def transfer(self, equation: JaxprEqn, operands: list[_Made], calls: Calls) -> list[_Made]:
    made = functools.reduce(operator.or_, operands, _Made.NONE)
    kind = self._kind(equation, operands, made)
    if kind:
      self.fragile[equation] = kind
    result = self._result(equation, operands, made) | made & _Made.BEHIND
    return [result if is_float(v.aval) else result & _Made.NOISE for v in equation.outvars]

  def _kind(self, equation: JaxprEqn, operands: list[_Made], made: _Made) -> str:
    if self._rules.list_of(equation.primitive) == "allow":
      return "small" if _is_small(equation) and not states_precision(equation) else ""
    if equation.primitive in _ANGLES:
      return "angle" if made & _Made.SCALED else ""
    if has(equation, Trait.ORDERS) or equation.primitive in (jax.lax.argmax_p, jax.lax.argmin_p):
      return "order" if _Made.SCALED in made and _Made.NOISE in made else ""
    if equation.primitive is jax.lax.sub_p and all(map(is_variable, equation.invars)):
      lhs, rhs = operands
      other = _Made.PRODUCT | _Made.SQUARES
      cancels = (lhs & _Made.PRODUCT and rhs & other) or (rhs & _Made.PRODUCT and lhs & other)
      residual = _Made.LINEAR in lhs ^ rhs and not (_Made.BEHIND in lhs and _Made.BEHIND in rhs)
      of_data = residual and size(equation.invars[0]) == size(equation.invars[1]) > 1
      return "difference" if cancels else "residual" if of_data else ""
    return ""

  def _result(self, equation: JaxprEqn, operands: list[_Made], made: _Made) -> _Made:
    listed = self._rules.list_of(equation.primitive)
    if equation.primitive in _NOISE:
      return _Made.NOISE
    if listed == "allow":
      layer = is_layer(equation, self._rules) and not is_outer(equation)
      first = _Made.NONE if _Made.BEHIND in made else _Made.LINEAR
      return _Made.PRODUCT | _Made.SCALED | _Made.BEHIND | first if layer else _Made.NONE
    if equation.primitive is jax.lax.reduce_sum_p:
      return operands[0] & _Made.SQUARES
    if equation.primitive in _SQUARES and all(a is equation.invars[0] for a in equation.invars):
      return _Made.SQUARES | made & _Made.NOISE
    if has(equation, Trait.SCALES) and not any(size(a) == 1 for a in equation.invars):
      return made & (_Made.SCALED | _Made.NOISE)
    if listed == "infer" or has(equation, Trait.SCALES):
      return made & ~_Made.SQUARES if has(equation, Trait.SCALES) else made
    return made & _Made.NOISE  # a float32 function of it: an island
