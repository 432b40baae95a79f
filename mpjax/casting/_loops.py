"""How a loop uses its carry: solvers, layers and recurrences."""

from __future__ import annotations

import functools
import operator
from typing import NamedTuple

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.casting._reasons import Code
from mpjax.casting._sources import is_layer, is_outer, states_precision
from mpjax.jaxpr import (
  FULL_PRECISION,
  CallKind,
  Calls,
  Trait,
  at_region_edge,
  bodies_of,
  call_kind,
  call_layout,
  dtype_of,
  equations_in,
  has,
  inside,
  marked_path,
  open_jaxpr,
)

_LONG = 32  # steps: a network has about as many layers
_SUMS = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.ADDS
_BILINEAR = Trait.PRODUCT | Trait.SCALES | Trait.ACCUMULATES
_CHOOSES = frozenset({jax.lax.select_n_p, jax.lax.dynamic_update_slice_p})
_ACTIVATIONS = frozenset(
  {jax.lax.tanh_p, jax.lax.logistic_p, jax.lax.erf_p, jax.lax.max_p, jax.lax.min_p, jax.lax.reduce_max_p}
)


class LoopFacts(NamedTuple):
  """Facts about a loop, or about a call with a rule of its own: whether it is a solver.

  Attributes:
    solver: why its bodies run in float32 under every policy; `None` for others. A fixed point or an adaptive
      step ends where an error is small, which a rounding error never is. A value that passes through an
      arg-max or another integer, such as the next token, does not count. A filter solves a linear system for
      its state at each step, as exactly as it knows the state. A solver's derivative rule is one.
    layers: for each carry, whether its product with weights of the step's own makes a later one. These are
      those of stacked layers, which a `scan` reads row by row, and those that are taken from an array by the
      number of the step.
    recurrent: the products of a long linear recurrence of a `scan`. The state of the loop reaches them and
      the next step only by linear operations, and the matrix that multiplies it is the same at each step.
      After n steps the state is multiplied by the n-th power of the matrix, with n times the relative error
      of a rounding.
  """

  solver: Code | None = None
  layers: tuple[bool, ...] = ()
  recurrent: frozenset[JaxprEqn] = frozenset()


def loop_facts(call: JaxprEqn, rules: CastingRules) -> LoopFacts:
  """Returns the facts about an equation; there are none about most."""
  if call not in rules.found_in_loops:
    kind, found = call_kind(call), LoopFacts()
    if kind in (CallKind.SCAN, CallKind.WHILE):
      found = _of_loop(call, rules)
    elif kind is not None and kind.is_custom_rule:
      found = LoopFacts(_of_one_solver(call, rules))
    rules.found_in_loops[call] = found
  return rules.found_in_loops[call]


def why_in_solver(calls: Calls, rules: CastingRules, path: str = "") -> Code | None:
  """Returns why equations inside some calls run in float32 under every policy; `None` if they do not.

  Args:
    calls: the calls, outermost first.
    rules: the rules; an override of the carry of a loop has the last word.
    path: the module path of the outermost.
  """
  for call, _ in calls:
    path = inside(path, marked_path(call))
    why = loop_facts(call, rules).solver
    carries = range(len(call_layout(call).carry)) if why else ()
    if why and "half" not in [rules.overrides.at(inside(path, f"carry_{i}")).loop_carry for i in carries]:
      return why
  return None


def _of_one_solver(equation: JaxprEqn, rules: CastingRules) -> Code | None:
  """Returns why the bodies of a call are in float32, if all their products are in solvers."""
  why = None
  for body in bodies_of(equation):
    for inner in open_jaxpr(body).eqns:
      if _is_half_product(inner, rules):
        return None
      own = loop_facts(inner, rules).solver or _of_one_solver(inner, rules)
      if not own and any(_is_half_product(e, rules) for b in bodies_of(inner) for e in equations_in(b)):
        return None
      why = why or own
  return why


def _of_loop(loop: JaxprEqn, rules: CastingRules) -> LoopFacts:
  layout, is_long = call_layout(loop), loop.params.get("length", 0) >= _LONG
  entering = [_Origin(own=k in (layout.rows or layout.carry)) for k in range(len(loop.invars))]
  for k in layout.carry:
    paths = frozenset([(k, None)] if is_long else [])
    state = _Origin(states=frozenset([k]), depends=True, paths=paths)
    entering[k] = state if is_float(loop.invars[k].aval) else _Origin(own=True)
  analysis = _Origins(rules)
  bodies, _ = analysis.enter(loop, layout, entering)
  leaving: dict[int, _Origin] = {}
  solver: Code | None = None
  for facts, body in zip(bodies, layout.bodies, strict=True):
    if not body.decides:
      leaving = dict(zip(layout.carry, facts.outputs, strict=False))
    elif facts.outputs[0].made:
      solver = Code.SOLVER
  if solver is None and not analysis.has_layers and any(fact.solved for fact in leaving.values()):
    solver = Code.STATE_FILTER
  # What leaves has the states of all earlier steps.
  behind = {k: {k, *fact.states} for k, fact in leaving.items()}
  layers = (any(k in fact.layered and j in behind[k] for j, fact in leaving.items()) for k in layout.carry)
  linear = {k: {k, *(i for i, _ in fact.paths)} for k, fact in leaving.items()}
  products = ((i, k, product) for k, fact in leaving.items() for i, product in fact.paths)
  recurrent = (product for i, k, product in products if product is not None and k in linear[i])
  return LoopFacts(solver, tuple(layers), frozenset(recurrent))


class _Origin(NamedTuple):
  """What a value in a loop is computed from.

  Attributes:
    states: the states, by their operands, without those behind an integer.
    own: whether it also depends on other values that differ from step to step.
    depends: whether it depends on a state in any way.
    layered: the states that a product with weights of the step's own multiplied on the way.
    paths: each state that it is linear in, with each product by a constant on the way.
    made: whether products in half precision make it, or floats that were compared.
    multiplied: whether a product is behind it, with no linear algebra after that.
    solved: whether linear algebra lies between it and a state.
  """

  states: frozenset[int] = frozenset()
  own: bool = False
  depends: bool = False
  layered: frozenset[int] = frozenset()
  paths: frozenset[tuple[int, JaxprEqn | None]] = frozenset()
  made: bool = False
  multiplied: bool = False
  solved: bool = False

  @property
  def is_constant(self) -> bool:
    """Whether it is the same at each step."""
    return not (self.own or self.states)


class _Origins(ByRules[_Origin]):
  """What values in a loop are computed from; `has_layers` if products reach an activation function."""

  nothing = _Origin()

  def __init__(self, rules: CastingRules):
    super().__init__(rules)
    self.has_layers = False

  def join(self, a: _Origin, b: _Origin) -> _Origin:
    return _Origin(*map(operator.or_, a, b))

  def transfer(self, equation: JaxprEqn, operands: list[_Origin], calls: Calls) -> list[_Origin]:
    found = functools.reduce(self.join, operands, self.nothing)
    half, solves = _is_half_product(equation, self._rules), has(equation, Trait.ALGEBRA)
    if not (half or solves) and _bends(equation):
      self.has_layers |= found.multiplied and any(size(a) > 1 for a in equation.invars)
    behind = bool(found.states or found.multiplied or found.solved)
    result = found._replace(
      layered=found.layered | self._layered(equation, operands),
      paths=self._paths(equation, operands, found),
      made=found.made or half,
      multiplied=not solves and (found.multiplied or half),
      solved=found.solved or (solves and behind),
    )
    other = _Origin(own=not found.is_constant, depends=found.depends)
    return [
      result if is_float(v.aval) else other._replace(made=result.made and not _is_index(equation, v))
      for v in equation.outvars
    ]

  def _layered(self, equation: JaxprEqn, operands: list[_Origin]) -> frozenset[int]:
    """Returns the states that an equation multiplies by weights of the step's own."""
    listed = self._rules.list_of(equation.primitive)
    if listed != "allow" and not at_region_edge(marked_path(equation)) and not has(equation, Trait.KERNEL):
      return frozenset()
    pairs = zip(operands, equation.invars, strict=True)
    floats = [fact for fact, a in pairs if is_float(a.aval) and size(a) > 1]
    weights = any(fact.own and not fact.states for fact in floats)
    return frozenset().union(*(fact.states for fact in floats if weights))

  def _paths(
    self, equation: JaxprEqn, operands: list[_Origin], found: _Origin
  ) -> frozenset[tuple[int, JaxprEqn | None]]:
    """Returns the states that an equation's results are linear in, with the products on the way."""
    if has(equation, _SUMS) or equation.primitive in _CHOOSES:
      return found.paths
    moving = [fact for fact in operands if fact.depends]
    if len(moving) != 1 or not has(equation, _BILINEAR):
      return frozenset()
    divides = equation.primitive in (jax.lax.div_p, jax.lax.rem_p) and operands[1] is moving[0]
    if divides or not all(fact.is_constant for fact in operands if fact is not moving[0]):
      return frozenset()
    half = _is_half_product(equation, self._rules)
    return found.paths.union((state, equation) for state, _ in found.paths if half)


def _bends(equation: JaxprEqn) -> bool:
  """Returns whether an equation is an activation function, or part of one."""
  return has(equation, Trait.EXPONENTIAL) or equation.primitive in _ACTIVATIONS


def _is_half_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  layer = is_layer(equation, rules) and not states_precision(equation)
  return layer and not is_outer(equation) and FULL_PRECISION not in marked_path(equation).split("/")


def _is_index(equation: JaxprEqn, result: Atom) -> bool:
  """Returns whether a result is an index, a count, or a number that was rounded to an integer."""
  if not np.issubdtype(dtype_of(result), np.integer):
    return False
  return any(is_float(a.aval) or dtype_of(a) == np.dtype(bool) for a in equation.invars)
