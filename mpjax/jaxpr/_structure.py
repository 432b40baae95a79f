"""The structure of a jaxpr: what two traces of one program have in common."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable
from typing import Any

import numpy as np
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.jaxpr._bodies import constants_of, is_variable, once_for_each, open_jaxpr
from mpjax.jaxpr._primitives import CallKind, call_kind

_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, linear_util.WrappedFun)


class Structure:
  """The structure of a jaxpr: jaxprs of equal structures are the same program.

  Primitives, parameters, types, scopes and contexts of the equations count; bodies count by their own
  structures and the identity of their constants. The jaxpr's own constants and the lines of the source do not
  count.

  Attributes:
    is_known: whether another jaxpr can have the same structure. None can if a parameter is a function, as of
      a custom derivative rule, since the values that it closes over are hidden; or if a body has a large
      array as a constant.
  """

  def __init__(self, jaxpr: Jaxpr):
    numbers: dict[Var, int] = {}

    def of(atom: Atom) -> Hashable:
      if not is_variable(atom):
        return np.asarray(atom.val).tobytes(), atom.aval
      if atom in numbers:
        return numbers[atom]
      numbers[atom] = len(numbers)
      return atom.aval

    try:
      inputs = tuple(map(of, (*jaxpr.constvars, *jaxpr.invars)))
      equations = tuple((*map(of, e.invars), _equation(e), *map(of, e.outvars)) for e in jaxpr.eqns)
      self._parts: Hashable = (inputs, equations, tuple(map(of, jaxpr.outvars)))
      self._hash = hash(self._parts)
      self.is_known = True
    except TypeError:
      self._parts, self._hash, self.is_known = None, id(self), False

  def __hash__(self) -> int:
    return self._hash

  def __eq__(self, other: object) -> bool:
    if self is other or not (isinstance(other, Structure) and self.is_known and other.is_known):
      return self is other
    return self._hash == other._hash and self._parts == other._parts


_LARGE = 1 << 16  # bytes


class _Same:
  """An object that equals only itself; a `TypeError` for a large array, which would be kept alive."""

  def __init__(self, value: object):
    if getattr(value, "nbytes", 0) > _LARGE:
      raise TypeError("a large constant")
    self._value = value

  def __hash__(self) -> int:
    return id(self._value)

  def __eq__(self, other: object) -> bool:
    return isinstance(other, _Same) and self._value is other._value


def structure_of(jaxpr: AnyJaxpr) -> Structure:
  """Returns the structure of a jaxpr, computed once for each."""
  return _structure_of(open_jaxpr(jaxpr))


@once_for_each
def _structure_of(jaxpr: Jaxpr) -> Structure:
  return Structure(jaxpr)


def _equation(equation: JaxprEqn) -> Hashable:
  policy = "policy" if call_kind(equation) is CallKind.REMAT else None  # it is called, not traced
  parameters = tuple(
    (name, value if name == policy else _parameter(value)) for name, value in sorted(equation.params.items())
  )
  return equation.primitive, parameters, equation.source_info.name_stack, equation.ctx


def _parameter(value: Any) -> Hashable:
  if isinstance(value, (Jaxpr, ClosedJaxpr)):
    return structure_of(value), tuple(map(_Same, constants_of(value)))
  if isinstance(value, (tuple, list)):
    return tuple(map(_parameter, value))
  if isinstance(value, _FUNCTIONS):
    raise TypeError(f"{value!r} is a function")
  return type(value), value
