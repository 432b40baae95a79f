"""Finds the gradients of parameters in a program that has a backward pass inside.

`autocast(jax.grad(f))` sees the products of the backward pass as equations. One whose result is only viewed
in another shape, scaled by a number and added to others on its way out of the backward pass is the gradient
of something that came into the forward pass, and has a float32 result.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
from jax.extend.core import primitives

from mpjax._compat import newer
from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._kinds import castable, size
from mpjax.jaxpr import (
  CallKind,
  Trait,
  alignment,
  backward_depth,
  call_kind,
  has,
  is_variable,
  live,
  open_jaxpr,
  scan_parts,
)

_PASSES = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.MARKS_AXES | Trait.ADDS
_MOVES = frozenset({jax.lax.dynamic_update_slice_p, jax.lax.select_n_p, newer("stack_p"), newer("unstack_p")})
_SCALES = frozenset({jax.lax.mul_p, jax.lax.div_p})


class WeightGradients:
  """The values of a jaxpr that become gradients of parameters and nothing else, and those of its bodies.

  Args:
    jaxpr: the program.
    outs: for each output, whether it is such a gradient, or leaves the backward pass.
    depth: how many backward passes the jaxpr is inside of.
  """

  def __init__(self, jaxpr: AnyJaxpr, outs: Sequence[bool], depth: int = 0):
    self._depth = depth
    self._made: dict[Var, int] = {}
    self._bodies: dict[tuple[int, int], WeightGradients] = {}
    body = open_jaxpr(jaxpr)
    equations = live(body).equations
    self._made.update((v, self._depth_of(e)) for e in equations for v in e.outvars)
    pairs = zip(body.outvars, outs, strict=True)
    others = (a for a, is_gradient in pairs if is_variable(a) and not is_gradient)
    self._others = {a for a in others if self._made.get(a, depth) <= depth}
    for equation in reversed(equations):
      self._read(equation)
    self.inputs = [self._is_gradient(v) for v in body.invars]

  @classmethod
  def leaving(cls, jaxpr: AnyJaxpr) -> WeightGradients:
    """Returns those of a whole program: all that leaves its backward passes."""
    return cls(jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))

  def has_product(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation of the jaxpr, in a backward pass, makes the gradient of a parameter."""
    return self._depth_of(equation) > 0 and all(map(self._is_gradient, equation.outvars))

  def has_sum(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation adds two such gradients."""
    return equation.primitive is primitives.add_jaxvals_p and self.has_product(equation)

  def inside(self, equation: JaxprEqn, body: AnyJaxpr) -> WeightGradients | None:
    """Returns those of a body of an equation; `None` where they are not known."""
    return self._bodies.get((id(equation), id(open_jaxpr(body))))

  def _depth_of(self, equation: JaxprEqn) -> int:
    return max(self._depth, backward_depth(equation))

  def _is_gradient(self, v: Atom) -> bool:
    return is_variable(v) and v not in self._others

  def _read(self, equation: JaxprEqn) -> None:
    """Notes what an equation reads that does not go on as a gradient."""
    if call_kind(equation) is not None:
      goes_on = self._call(equation)
    else:
      goes_on = [self._passes(equation)] * len(equation.invars)
    depth = self._depth_of(equation)
    for a, is_gradient in zip(equation.invars, goes_on, strict=True):
      if is_variable(a) and not is_gradient and self._made.get(a, self._depth) <= depth:
        self._others.add(a)

  def _passes(self, equation: JaxprEqn) -> bool:
    primitive, operands = equation.primitive, [a for a in equation.invars if castable(a.aval)]
    if not all(map(self._is_gradient, equation.outvars)) or not all(
      castable(v.aval) for v in equation.outvars
    ):
      return False
    if primitive in _SCALES:
      return sum(size(a) > 1 for a in operands) <= 1 and size(equation.invars[-1]) == 1
    if primitive is jax.lax.reduce_sum_p:  # of dimensions of size 1
      return size(equation.invars[0]) == size(equation.outvars[0])
    return primitive is not jax.lax.gather_p and (has(primitive, _PASSES) or primitive in _MOVES)

  def _call(self, equation: JaxprEqn) -> list[bool]:
    """Returns which operands of a call go on as gradients."""
    kind, n = call_kind(equation), len(equation.invars)
    if kind is None or kind is CallKind.WHILE or not kind.is_plain:
      return [False] * n
    outs = [self._is_gradient(v) for v in equation.outvars]
    consts, carry = scan_parts(equation)[:2] if kind is CallKind.SCAN else (0, 0)
    while True:  # until what goes round a loop is known
      goes_on = [kind is not CallKind.COND] + [True] * (n - 1) if n else []
      for body, indices in alignment(equation):
        inner = WeightGradients(body, outs, self._depth_of(equation))
        self._bodies[id(equation), id(open_jaxpr(body))] = inner
        for i, is_gradient in zip(indices, inner.inputs, strict=True):
          goes_on[i] = goes_on[i] and is_gradient
      before = list(outs)
      outs[:carry] = [a and b for a, b in zip(outs, goes_on[consts : consts + carry], strict=False)]
      if outs == before:
        return goes_on if alignment(equation) else [False] * n
