"""The structure of a jaxpr: what two traces of one program have in common."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.jaxpr._bodies import constants_of, is_variable, once_for_each, open_jaxpr


class Structure:
  """The structure of a jaxpr; jaxprs of equal structures are the same program.

  Primitives, parameters, types, scopes and contexts are compared, and bodies by their own structures. The
  constants of bodies and functions among the parameters are what they are by identity. Neither the jaxpr's own
  constants count nor the lines of the source.
  """

  def __init__(self, jaxpr: Jaxpr):
    numbers: dict[Var, int] = {}

    def of(atom: Atom) -> Hashable:
      if not is_variable(atom):
        return np.asarray(atom.val).tobytes(), atom.aval
      return numbers[atom] if atom in numbers else (numbers.setdefault(atom, len(numbers)), atom.aval)

    inputs = tuple(map(of, (*jaxpr.constvars, *jaxpr.invars)))
    equations = tuple(
      (tuple(map(of, e.invars)), _equation(e), tuple(map(of, e.outvars))) for e in jaxpr.eqns
    )
    self._parts = (inputs, equations, tuple(map(of, jaxpr.outvars)))
    self._hash = hash(self._parts)

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    if self is other:
      return True
    return isinstance(other, Structure) and self._hash == other._hash and self._parts == other._parts


class _Same:
  """An object that is equal to itself alone."""

  def __init__(self, value: object):
    self._value = value

  def __hash__(self) -> int:
    return id(self._value)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Same) and self._value is other._value


def structure_of(jaxpr: AnyJaxpr) -> Structure:
  """Returns the structure of a jaxpr.

  Raises:
    TypeError: for a parameter that cannot be compared.
  """
  return _structure_of(open_jaxpr(jaxpr))


@once_for_each
def _structure_of(jaxpr: Jaxpr) -> Structure:
  return Structure(jaxpr)


def _equation(equation: JaxprEqn) -> Hashable:
  parameters = tuple((name, _parameter(value)) for name, value in sorted(equation.params.items()))
  return equation.primitive, parameters, equation.source_info.name_stack, equation.ctx


def _parameter(value: Any) -> Hashable:
  if isinstance(value, (Jaxpr, ClosedJaxpr)):
    return structure_of(value), tuple(map(_Same, constants_of(value)))
  if isinstance(value, (tuple, list)):
    return tuple(map(_parameter, value))
  return type(value), value
