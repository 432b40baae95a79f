"""Programs that autocast has decided about, kept for when their functions are traced again.

A function is traced again for each `jit` around it, and then JAX finds the inner `jit`s of the function as it
has left them. So does autocast: what it decided and emitted is kept by what it was made of, the structure of
the program, the rules, and what is known of its constants. Nothing is taken for the same because the function
is: that only says how long it is kept.
"""

from __future__ import annotations

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
from mpjax.casting._kernels import kernels_in_float32, registered_kernels
from mpjax.casting._trace import Traced
from mpjax.jaxpr import as_function, is_variable, known_primitives, open_jaxpr
from mpjax.policy import Policy

_MOST_PROGRAMS = 8  # of one owner
_MOST_OWNERS = 64


class Program:
  """A program of a user's function, decided.

  Attributes:
    plan: what is decided about it.
    kernels: the kernels that stay in float32, by name.
  """

  def __init__(self, plan: CastPlan, only_dots: bool):
    self.plan = plan
    self.kernels = kernels_in_float32(plan)
    self._execute = functools.partial(execute, plan, only_dots=only_dots)
    # JAX keeps its jaxprs, by the types of the operands and by JAX's own settings, as long as this function.
    self._emit = lambda *operands: self._execute(operands)

  def __call__(self, operands: Sequence[Array], fp8_state: Fp8State | None) -> list[Array]:
    """Returns the program's results; for the arguments see `execute`."""
    if fp8_state is not None or self.plan.fp8_sites():  # it reads arrays that are no operands
      return self._execute(operands, fp8_state=fp8_state)
    emitted = jax.make_jaxpr(self._emit)(*operands)
    results = zip(open_jaxpr(emitted).outvars, as_function(emitted)(*operands), strict=True)
    return [x if is_variable(atom) else array_of(atom) for atom, x in results]


class _Owners:
  """The programs of owners: each one's as long as it lives, and of a limited number of owners."""

  def __init__(self) -> None:
    self._programs: dict[int, tuple[weakref.ref[Any], dict[Hashable, Program]]] = {}

  def programs_of(self, owner: object) -> dict[Hashable, Program]:
    """Returns where the programs of an owner are kept; nowhere, if it takes no weak reference."""
    number = id(owner)
    ref, programs = self._programs.pop(number, (None, {}))
    if ref is None:
      try:
        ref = weakref.ref(owner, lambda _: self._programs.pop(number, None))
      except TypeError:
        return {}
    self._programs[number] = ref, programs
    while len(self._programs) > _MOST_OWNERS:
      self._programs.pop(next(iter(self._programs)), None)
    return programs


_owners = _Owners()


def program_of(fun: Callable[..., Any], traced: Traced, rules: CastingRules, policy: Policy) -> Program:
  """Returns a traced program as it is decided, now or when the function was last traced to the same one.

  Args:
    fun: the user's function.
    traced: a call of it.
    rules: what decides.
    policy: whose settings they are.

  Raises:
    ValueError: for a pattern of an override or a recipe that matches nothing.
  """
  own = traced.key(rules, policy)
  programs = _owners.programs_of(_owner(fun)) if own is not None else {}
  key = (own, _key(rules))
  program = programs.pop(key, None)
  if program is None:
    plan = traced.plan(rules, policy)
    rules.check_all_matched(plan.fp8_paths())
    program = Program(plan, only_dots=rules.recompute == "dots")
  programs[key] = program
  while len(programs) > _MOST_PROGRAMS:
    programs.pop(next(iter(programs)), None)
  return program


def _owner(fun: Any) -> object:
  """Returns what lives as long as calls of a function are to be expected: a method is made for each call."""
  while isinstance(fun, functools.partial):
    fun = fun.func
  return fun.__self__ if isinstance(fun, types.MethodType) else fun


def _key(rules: CastingRules) -> Hashable:
  """Returns what is equal for rules only if they decide alike, here and now."""
  settings = (rules.ops, rules.overrides.key, rules.accum_dtype, rules.wide_gradients, rules.recompute)
  support = tuple((recipe, _fp8_products.support(recipe)) for recipe in rules.overrides.recipes)
  precision = str(jax.config.jax_default_matmul_precision)  # see `states_precision`
  return settings, support, precision, registered_kernels(), known_primitives()
