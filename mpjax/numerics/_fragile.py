"""Operations whose result half precision may destroy, to be measured: differences and angles of products."""

from __future__ import annotations

import enum
import functools
import operator

import jax

from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting import ByRules, CastingRules, is_float, is_layer, is_outer, size
from mpjax.jaxpr import Calls, Trait, has, is_variable, open_jaxpr

_ANGLES = frozenset({jax.lax.sin_p, jax.lax.cos_p, jax.lax.tan_p})
_SQUARES = frozenset({jax.lax.square_p, jax.lax.integer_pow_p, jax.lax.mul_p})


def fragile_equations(jaxpr: AnyJaxpr, rules: CastingRules) -> dict[JaxprEqn, str]:
  """Returns the equations of a program that are fragile if its products are half precision.

  `difference`: a difference of products; if they are nearly equal, its digits cancel. `angle`: the sine or
  cosine of an angle that a product makes; a large one keeps no fraction of a period.
  """
  analysis = _MadeOf(rules)
  analysis.solve(jaxpr, [_Made.NONE] * len(open_jaxpr(jaxpr).invars))
  return analysis.fragile


class _Made(enum.Flag):
  """What a value is computed from."""

  NONE = 0
  PRODUCT = enum.auto()  # a product, times numbers
  SCALED = enum.auto()  # products, by elementwise operations
  SQUARES = enum.auto()  # sums of squares


class _MadeOf(ByRules[_Made]):
  """What values are computed from, up to the next product; `fragile` collects the findings."""

  nothing = _Made.NONE

  def __init__(self, rules: CastingRules):
    super().__init__(rules)
    self.fragile: dict[JaxprEqn, str] = {}

  def transfer(self, equation: JaxprEqn, operands: list[_Made], calls: Calls) -> list[_Made]:
    made = functools.reduce(operator.or_, operands, _Made.NONE)
    if equation.primitive in _ANGLES and made & _Made.SCALED:
      self.fragile[equation] = "angle"
    if equation.primitive is jax.lax.sub_p and all(map(is_variable, equation.invars)) and _cancels(*operands):
      self.fragile[equation] = "difference"
    result = self._result(equation, operands, made)
    return [result if is_float(v.aval) else _Made.NONE for v in equation.outvars]

  def _result(self, equation: JaxprEqn, operands: list[_Made], made: _Made) -> _Made:
    listed, scales = self._rules.list_of(equation.primitive), has(equation, Trait.SCALES)
    if listed == "allow":
      layer = is_layer(equation, self._rules) and not is_outer(equation)
      return _Made.PRODUCT | _Made.SCALED if layer else _Made.NONE
    if equation.primitive is jax.lax.reduce_sum_p:
      return operands[0] & _Made.SQUARES
    if equation.primitive in _SQUARES and all(a is equation.invars[0] for a in equation.invars):
      return _Made.SQUARES
    if scales and not any(size(a) == 1 for a in equation.invars):
      return made & _Made.SCALED
    if scales:
      return made & ~_Made.SQUARES
    return made if listed == "infer" else _Made.NONE  # a float32 function of it is an island


def _cancels(lhs: _Made, rhs: _Made) -> bool:
  """Returns whether a difference is of products, or of a product and sums of squares, as in a distance."""
  other = _Made.PRODUCT | _Made.SQUARES
  return bool((lhs & _Made.PRODUCT and rhs & other) or (rhs & _Made.PRODUCT and lhs & other))
