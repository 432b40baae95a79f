"""Parameters that a program reads in a narrower dtype alone: they can cross devices in it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Array, Jaxpr, JaxprEqn, Var
from mpjax.jaxpr import (
  CallKind,
  Trait,
  alignment,
  call_kind,
  custom_vjp_rules,
  dtype_of,
  has,
  is_variable,
  open_jaxpr,
  shape_of,
  values_read,
)


def read_in(closed: AnyJaxpr, inputs: Sequence[int]) -> list[np.dtype | None]:
  """Returns the one dtype in which a program reads each of its inputs; `None` if there are several.

  Args:
    closed: a jaxpr.
    inputs: positions among its inputs.
  """
  body = open_jaxpr(closed)
  return [_single(_reads(body, body.invars[i])) for i in inputs]


def only_multiplied(closed: AnyJaxpr, inputs: Sequence[int]) -> list[bool]:
  """Returns of each input of a program whether matrix products alone read it, in whatever dtype.

  Args:
    closed: a jaxpr.
    inputs: positions among its inputs.
  """
  body = open_jaxpr(closed)
  return [_is_multiplied(body, body.invars[i]) for i in inputs]


def _is_multiplied(body: Jaxpr, start: Var) -> bool:
  values, found = {start}, False
  for equation in body.eqns:
    read = [i for i, a in enumerate(equation.invars) if is_variable(a) and a in values]
    if not read:
      continue
    kind = call_kind(equation)
    if kind is not None and kind.is_plain:
      aligned = [(open_jaxpr(inner), operands) for inner, operands in alignment(equation)]
      inside = [
        (inner, inner.invars[operands.index(i)]) for i in read for inner, operands in aligned if i in operands
      ]
      if not inside or not all(_is_multiplied(*pair) for pair in inside):
        return False
      found = True
    elif kind is None and has(equation, Trait.SAME_WEIGHT | Trait.ALIAS):
      values.update(equation.outvars)
    elif kind is None and has(equation, Trait.PRODUCT):
      found = True
    else:
      return False
  return found and not any(is_variable(a) and a in values for a in body.outvars)


def _single(reads: set[np.dtype]) -> np.dtype | None:
  return next(iter(reads)) if len(reads) == 1 else None


def _reads(body: Jaxpr, start: Var, in_rule: bool = False) -> set[np.dtype]:
  """Returns the dtypes in which a variable of a jaxpr, or of a forward rule, is used."""
  values, found = {start}, set()
  for equation in body.eqns:
    read = [i for i, atom in enumerate(values_read(equation)) if is_variable(atom) and atom in values]
    if not read:
      continue
    kind = call_kind(equation)
    if equation.primitive is jax.lax.convert_element_type_p:
      found.add(np.dtype(equation.params["new_dtype"]))
    elif has(equation, Trait.ALIAS) and len(equation.invars) == len(equation.outvars):
      values.update(equation.outvars[i] for i in read)
    elif has(equation, Trait.PASSES_ON) and len(equation.invars) == 1:
      values.update(equation.outvars)
    elif kind is CallKind.CUSTOM_VJP and not in_rule:  # the backward rule reads what the forward one returns
      found |= _in_call(equation, read, in_rule) | _in_forward_rule(equation, read)
    elif kind is not None and kind.is_plain:  # of other rules the body is not the whole truth
      found |= _in_call(equation, read, in_rule)
    else:
      found.add(dtype_of(start))
  if any(is_variable(atom) and atom in values for atom in body.outvars):
    found.add(dtype_of(start))
  return found


def _in_call(equation: JaxprEqn, read: Sequence[int], in_rule: bool) -> set[np.dtype]:
  """Returns the dtypes in which the bodies of a call use some of its operands."""
  aligned = alignment(equation)
  found: set[np.dtype] = set()
  for i in read:
    bodies = [(body, operands.index(i)) for body, operands in aligned if i in operands]
    if not bodies:
      return {dtype_of(equation.invars[i])}
    for body, position in bodies:
      inner = open_jaxpr(body)
      found |= _reads(inner, inner.invars[position], in_rule)
  return found


def _in_forward_rule(equation: JaxprEqn, read: Sequence[int]) -> set[np.dtype]:
  """Returns the dtypes in which the forward rule of a `custom_vjp` uses some of its operands."""
  forward, _ = custom_vjp_rules(equation)

  def flat(*operands: Array) -> list[Array]:
    residuals, outs = forward(list(operands), [True] * len(operands))
    return [*residuals, *outs]

  shapes = [jax.ShapeDtypeStruct(shape_of(a), dtype_of(a)) for a in equation.invars]
  try:
    rule = open_jaxpr(jax.make_jaxpr(flat)(*shapes))
  except NameError:  # of an axis, which a collective in the rule names
    return {dtype_of(equation.invars[i]) for i in read}
  # One that calls its own function again would have no end.
  return set().union(*(_reads(rule, rule.invars[i], in_rule=True) for i in read))
