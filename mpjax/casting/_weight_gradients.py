"""Finds the gradients of parameters in a program with a backward pass inside.

`autocast(jax.grad(f))` sees the products of the backward pass as equations. A product is the gradient of an
input of the forward pass, and has a float32 result, if its result is only reshaped, scaled by a number and
added to others on its way out of the backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend.core import primitives

from mpjax._compat import newer
from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting._kinds import castable, size
from mpjax.jaxpr import Backward, CallKind, Calls, Facts, Trait, backward_depth, call_kind, has, open_jaxpr

_PASSES = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.MARKS_AXES | Trait.ADDS
_MOVES = frozenset({jax.lax.dynamic_update_slice_p, jax.lax.select_n_p, newer("stack_p"), newer("unstack_p")})
_NOWHERE = -1
_SCALES = frozenset({jax.lax.mul_p, jax.lax.div_p})


class WeightGradients(NamedTuple):
  """The values of a program that become gradients of parameters and nothing else.

  Attributes:
    others: how deep in backward passes each value has another use.
    depth: the number of backward passes around the program.
  """

  others: Facts[int]
  depth: int

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, outs: Sequence[bool], depth: int = 0) -> WeightGradients:
    """Finds the gradients of a program.

    Args:
      jaxpr: the program.
      outs: for each output, whether it is such a gradient, or leaves the backward pass.
      depth: the number of backward passes around the program.
    """
    outputs = [_NOWHERE if is_gradient else depth for is_gradient in outs]
    return cls(_Others(depth).solve(jaxpr, outputs), depth)

  @classmethod
  def leaving(cls, jaxpr: AnyJaxpr) -> WeightGradients:
    """Finds the gradients of a whole program: all outputs of its backward passes."""
    return cls.of(jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))

  def has_product(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation in a backward pass of the program computes the gradient of a parameter."""
    depth = max(self.depth, backward_depth(equation))
    return depth > 0 and all(self.others[v] < depth for v in equation.outvars)

  def has_sum(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation adds two such gradients."""
    return equation.primitive is primitives.add_jaxvals_p and self.has_product(equation)

  def inside(self, equation: JaxprEqn, i: int = 0) -> WeightGradients | None:
    """Returns the gradients of the i-th body of an equation; `None` if unknown."""
    others = self.others.inside(equation, i)
    return WeightGradients(others, max(self.depth, backward_depth(equation))) if others else None


class _Others(Backward[int]):
  """How deep in backward passes a value has another use than as a gradient on its way out of them.

  Such a use does not matter for a value that is made deeper: it has left its backward pass.
  """

  nothing = _NOWHERE

  def __init__(self, depth: int):
    self._depth = depth

  def join(self, a: int, b: int) -> int:
    return max(a, b)

  def enters(self, equation: JaxprEqn) -> bool:
    kind = call_kind(equation)
    return kind is not None and kind is not CallKind.WHILE and kind.is_plain

  def transfer(self, equation: JaxprEqn, results: list[int], calls: Calls) -> list[int]:
    depth = self._depth_of(equation, calls)
    goes_on = max(results, default=_NOWHERE) < depth and _passes(equation)
    return [_NOWHERE if goes_on else depth] * len(equation.invars)

  def choice(self, equation: JaxprEqn, results: list[int], calls: Calls) -> int:
    return self._depth_of(equation, calls)

  def _depth_of(self, equation: JaxprEqn, calls: Calls) -> int:
    return max(self._depth, backward_depth(equation), *(backward_depth(call) for call, _ in calls))


def _passes(equation: JaxprEqn) -> bool:
  """Returns whether an equation turns gradients into a gradient, with only another shape and scale."""
  primitive, operands = equation.primitive, [a for a in equation.invars if castable(a.aval)]
  if not all(castable(v.aval) for v in equation.outvars):
    return False
  if primitive in _SCALES:
    return sum(size(a) > 1 for a in operands) <= 1 and size(equation.invars[-1]) == 1
  if primitive is jax.lax.reduce_sum_p:  # over dimensions of size 1
    return size(equation.invars[0]) == size(equation.outvars[0])
  return primitive is not jax.lax.gather_p and (has(primitive, _PASSES) or primitive in _MOVES)
