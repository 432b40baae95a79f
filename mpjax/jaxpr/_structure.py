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
_LARGE = 1 << 16  # bytes


def structure_of(jaxpr: AnyJaxpr) -> Hashable | None:
  """Returns what is equal for two jaxprs that are the same program; computed once for each.

  Primitives, parameters, types, scopes and contexts of the equations count, and so do bodies with the values
  of their constants. The jaxpr's own constants and the lines of the source do not count. `None` for a jaxpr
  that cannot be compared: a parameter is a function, as of a custom derivative rule, which hides the values
  that it closes over; or a body has a large array as a constant.
  """
  return _structure_of(open_jaxpr(jaxpr))


@once_for_each
def _structure_of(jaxpr: Jaxpr) -> Hashable | None:
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
    found = inputs, equations, tuple(map(of, jaxpr.outvars))
    hash(found)
  except TypeError:
    return None
  return found


def _equation(equation: JaxprEqn) -> Hashable:
  called = ("policy",) if call_kind(equation) is CallKind.REMAT else ()  # called, not traced
  parameters = [(k, v if k in called else _parameter(v)) for k, v in sorted(equation.params.items())]
  return equation.primitive, tuple(parameters), equation.source_info.name_stack, equation.ctx


def _parameter(value: Any) -> Hashable:
  if isinstance(value, (tuple, list)):
    return tuple(map(_parameter, value))
  body = structure_of(value) if isinstance(value, (Jaxpr, ClosedJaxpr)) else ()
  if body is None or isinstance(value, _FUNCTIONS):
    raise TypeError(f"{value!r} cannot be compared")
  return (body, *map(_constant, constants_of(value))) if body else (type(value), value)


def _constant(value: Any) -> Hashable:
  if getattr(value, "nbytes", 0) > _LARGE or not getattr(value, "is_fully_addressable", True):
    raise TypeError("a large constant, or one on other processes")
  return type(value), np.shape(value), np.asarray(value).dtype, np.asarray(value).tobytes()
