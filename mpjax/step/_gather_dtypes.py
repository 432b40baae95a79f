"""Parameters that a program reads only in a narrower dtype: they can cross devices in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Array, JaxprEqn
from mpjax.jaxpr import (
  Backward,
  CallKind,
  Calls,
  Trait,
  bodies_of,
  call_kind,
  custom_vjp_rules,
  dtype_of,
  has,
  open_jaxpr,
  shape_of,
  values_read,
)

Dtypes: TypeAlias = frozenset[np.dtype]


def read_in(closed: AnyJaxpr, inputs: Sequence[int]) -> list[np.dtype | None]:
  """Returns the one dtype in which a program reads each of some inputs; `None` if there are several."""
  found = _reads(closed)
  return [next(iter(found[i])) if len(found[i]) == 1 else None for i in inputs]


def only_multiplied(closed: AnyJaxpr, inputs: Sequence[int]) -> list[bool]:
  """Returns, for each of some inputs of a program, whether only matrix products read it, in any dtype."""
  found = _ReadOtherwise().solve(closed, [True] * len(open_jaxpr(closed).outvars)).inputs
  return [not found[i] for i in inputs]


class _ReadOtherwise(Backward[bool]):
  """Whether anything but matrix products reads a value, or a view of it."""

  nothing = False

  def enters(self, equation: JaxprEqn) -> bool:
    kind = call_kind(equation)
    return kind is not None and kind.is_plain

  def transfer(self, equation: JaxprEqn, results: list[bool], calls: Calls) -> list[bool]:
    otherwise = call_kind(equation) is not None or not has(equation, Trait.PRODUCT)
    if call_kind(equation) is None and has(equation, Trait.SAME_WEIGHT | Trait.ALIAS):
      otherwise = any(results)
    return [otherwise] * len(equation.invars)


class _Reads(Backward[Dtypes]):
  """The dtypes in which a value, or a view of it, is read; `in_rule`: in a rule of a `custom_vjp`."""

  nothing: Dtypes = frozenset()

  def __init__(self, in_rule: bool):
    self._in_rule = in_rule

  def enters(self, equation: JaxprEqn) -> bool:
    kind = call_kind(equation)
    if kind is CallKind.CUSTOM_VJP and not self._in_rule:
      return False  # the backward rule reads what the forward one returns
    return kind is not None and kind.is_plain  # other rules do more than the body shows

  def transfer(self, equation: JaxprEqn, results: list[Dtypes], calls: Calls) -> list[Dtypes]:
    given = values_read(equation)
    kept = [frozenset([dtype_of(a)]) for a in given]
    if equation.primitive is jax.lax.convert_element_type_p:
      kept = [frozenset([np.dtype(equation.params["new_dtype"])])]
    elif has(equation, Trait.ALIAS) and len(equation.invars) == len(equation.outvars):
      kept = results
    elif has(equation, Trait.PASSES_ON) and len(equation.invars) == 1:
      kept = [self.nothing.union(*results)]
    elif call_kind(equation) is CallKind.CUSTOM_VJP and not self._in_rule:
      body = self.solve(bodies_of(equation)[0], results).inputs
      kept = list(map(self.join, body, _in_forward_rule(equation)))
    return [*kept, *[self.nothing] * (len(equation.invars) - len(given))]


def _reads(closed: AnyJaxpr, in_rule: bool = False) -> list[Dtypes]:
  outputs = [frozenset([dtype_of(atom)]) for atom in open_jaxpr(closed).outvars]
  return _Reads(in_rule).solve(closed, outputs).inputs


def _in_forward_rule(equation: JaxprEqn) -> list[Dtypes]:
  """Returns the dtypes in which the forward rule of a `custom_vjp` reads its operands."""
  forward, _ = custom_vjp_rules(equation)

  def flat(*operands: Array) -> list[Array]:
    residuals, outs = forward(list(operands), [True] * len(operands))
    return [*residuals, *outs]

  shapes = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in equation.invars]
  try:
    rule = jax.make_jaxpr(flat)(*shapes)
  except NameError:  # an axis that a collective in the rule names is missing
    return [frozenset([dtype_of(a)]) for a in equation.invars]
  return _reads(rule, in_rule=True)  # a rule that calls its own function again would not end
