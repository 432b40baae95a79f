"""Programs that autocast has decided about, kept for the next trace of their functions.

A function is traced again for each `jit` around it, and then JAX reuses the inner `jit`s of the unchanged
function. Autocast also reuses its decisions and emitted programs. The key is what they depend on: the
structure of the program, the rules, and the known values of its constants. The function itself is not part of
the key: it only determines how long a program is kept.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from mpjax._types import Array, Fp8State
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import CastPlan
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._emit import array_of, execute
from mpjax.casting._kernels import kernels_in_float32
from mpjax.casting._trace import Traced
from mpjax.jaxpr import as_function, is_variable, known_primitives, open_jaxpr
from mpjax.policy import Policy

_MOST_PROGRAMS = 8  # of a function


class Program:
  """A program of a user's function, with autocast's decisions.

  Attributes:
    plan: the decisions.
    kernels: the kernels that stay in float32, by name.
  """

  def __init__(self, plan: CastPlan):
    self.plan = plan
    self.kernels = kernels_in_float32(plan)
    self._execute = functools.partial(execute, plan)
    # JAX keeps its jaxprs, by the types of the operands and JAX's own settings, as long as this function.
    self._emit = lambda *operands: self._execute(operands)

  def __call__(self, operands: Sequence[Array], fp8_state: Fp8State | None) -> list[Array]:
    """Returns the program's results; for the arguments see `execute`."""
    if fp8_state is not None or self.plan.fp8_sites():  # it reads arrays that are not operands
      return self._execute(operands, fp8_state=fp8_state)
    emitted = jax.make_jaxpr(self._emit)(*operands)
    results = zip(open_jaxpr(emitted).outvars, as_function(emitted)(*operands), strict=True)
    return [x if is_variable(atom) else array_of(atom) for atom, x in results]


# By the object that lives as long as the function may be called.
_programs: weakref.WeakKeyDictionary[Any, dict[Hashable, Program]] = weakref.WeakKeyDictionary()


def program_of(fun: Callable[..., Any], traced: Traced, rules: CastingRules, policy: Policy) -> Program:
  """Returns a decided program: a new one, or the one from the last equal trace of the function.

  Args:
    fun: the user's function.
    traced: a call of it.
    rules: the rules.
    policy: the policy of the rules.

  Raises:
    ValueError: for a pattern of an override or a recipe that matches nothing.
  """
  own, programs = traced.key(rules, policy), {}
  with contextlib.suppress(TypeError):  # for an owner without a hash or weak references
    programs = _programs.setdefault(_owner(fun), {}) if own is not None else {}
  key = (own, _key(rules))
  program = programs.pop(key, None)
  if program is None:
    plan = traced.plan(rules, policy)
    rules.overrides.check_all_matched()
    program = Program(plan)
  programs[key] = program
  if len(programs) > _MOST_PROGRAMS:
    del programs[next(iter(programs))]
  return program


def _owner(fun: Any) -> object:
  """Returns an object that lives as long as a function may be called: a method is made for each call."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  return fun.__self__ if isinstance(fun, types.MethodType) else fun


def _key(rules: CastingRules) -> Hashable:
  """Returns a key that is equal for rules only if they decide alike in the present context."""
  settings = (rules.ops, rules.overrides.key, rules.accum_dtype, rules.wide_gradients, rules.recompute)
  support = tuple((recipe, _fp8_products.support(recipe)) for recipe in rules.overrides.recipes)
  precision = str(getattr(jax.config, "jax_default_matmul_precision", None))  # see `states_precision`
  return settings, support, precision, known_primitives()
