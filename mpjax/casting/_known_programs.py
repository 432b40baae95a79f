"""The programs that one autocast has made: a function that is traced again finds what was made of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend import linear_util
from jax.extend.core import ClosedJaxpr, Jaxpr

from mpjax._types import AnyJaxpr, Array, Atom, Fp8State, JaxprEqn, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import CastPlan
from mpjax.casting._emit import array_of, execute
from mpjax.casting._explain import kernels_in_float32
from mpjax.casting._trace import Traced
from mpjax.jaxpr import (
  CallKind,
  as_function,
  call_kind,
  constants_of,
  is_variable,
  known_primitives,
  once_for_each,
  open_jaxpr,
)

_MOST = 8
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, linear_util.WrappedFun)
_LARGE = 1 << 16  # bytes


class KnownProgram:
  """A decided program.

  Attributes:
    kernels: why kernels stay in float32, for a warning of each.
  """

  def __init__(self, plan: CastPlan):
    self.kernels = kernels_in_float32(plan)
    self._plan = plan
    # JAX keeps its jaxprs, by the types of the operands and JAX's own settings, as long as this function.
    self._emit = lambda *operands: execute(plan, operands)

  def __call__(self, operands: Sequence[Array], fp8_state: Fp8State | None) -> list[Array]:
    """Returns the program's results; for the arguments see `execute`."""
    if fp8_state is not None or self._plan.fp8_sites():  # it reads arrays that are not operands
      return execute(self._plan, operands, fp8_state=fp8_state)
    emitted = jax.make_jaxpr(self._emit)(*operands)
    results = zip(open_jaxpr(emitted).outvars, as_function(emitted)(*operands), strict=True)
    return [x if is_variable(atom) else array_of(atom) for atom, x in results]


class KnownPrograms(dict[Hashable, KnownProgram]):
  """The last programs of one autocast, by all that its decisions about them depend on.

  `jax.jit` traces a function again for each function around it, which for a differential equation that is
  solved inside takes five times as long if it is decided and emitted again.
  """

  def of(self, traced: Traced) -> KnownProgram:
    """Returns the program of an equal trace, or a new one.

    Raises:
      ValueError: for a pattern of an override that matches nothing.
    """
    structure, overrides = _structure_of(traced.closed), traced.rules.overrides
    support = [(recipe, _fp8_products.support(recipe)) for recipe in overrides.recipes]
    precision = str(getattr(jax.config, "jax_default_matmul_precision", None))  # see `states_precision`
    key = (structure, traced.policy, overrides.key, *traced.known(), *support, precision, known_primitives())
    program = self.pop(key, None)
    if program is None:
      program = KnownProgram(traced.plan)
      overrides.check_all_matched()
    if structure is not None:
      self[key] = program
    if len(self) > _MOST:
      del self[next(iter(self))]
    return program


@once_for_each
def _structure_of(jaxpr: AnyJaxpr) -> Hashable | None:
  """Returns what is equal for two jaxprs that are one program but for constants and lines of the source.

  `None` for a jaxpr that cannot be compared: a parameter is a function, as of a custom derivative rule, which
  hides the values that it closes over; or a body has a large array as a constant.
  """
  numbers: dict[Var, int] = {}

  def of(atom: Atom) -> Hashable:
    if not is_variable(atom):
      return np.asarray(atom.val).tobytes(), atom.aval
    return numbers[atom] if atom in numbers else (numbers.setdefault(atom, len(numbers)), atom.aval)

  body = open_jaxpr(jaxpr)
  try:
    equations = tuple((*map(of, e.invars), _equation(e), *map(of, e.outvars)) for e in body.eqns)
    found = (*map(of, (*body.constvars, *body.invars)), equations, *map(of, body.outvars))
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
  body = _structure_of(value) if isinstance(value, (Jaxpr, ClosedJaxpr)) else ()
  if body is None or isinstance(value, _FUNCTIONS):
    raise TypeError(f"{value!r} cannot be compared")
  return (body, *map(_constant, constants_of(value))) if body else (type(value), value)


def _constant(value: Any) -> Hashable:
  if getattr(value, "nbytes", 0) > _LARGE or not getattr(value, "is_fully_addressable", True):
    raise TypeError("a large constant, or one on other processes")
  return type(value), np.shape(value), np.asarray(value).dtype, np.asarray(value).tobytes()
