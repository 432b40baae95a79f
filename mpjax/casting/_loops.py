"""Calls and loops: the use that a loop makes of its carry, and the decisions about bodies and carries."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn, Var
from mpjax.casting._cast_plan import Call, CastPlan, LoopCarry, Mode
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import FLOAT32, Held, Kind, is_float, joined, size, strongest
from mpjax.casting._reasons import Code
from mpjax.casting._sources import is_layer, is_outer, states_precision
from mpjax.jaxpr import (
  FULL_PRECISION,
  CallKind,
  CallLayout,
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
  is_variable,
  marked_path,
  open_jaxpr,
  variables_of,
)

# For each result of a call, the half dtype that all its readers want, if there is one.
Wanted: TypeAlias = Sequence[np.dtype | None]
_LOGARITHMS = frozenset({jax.lax.log_p, jax.lax.log1p_p})
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

  An override of the carry of a loop has the last word. `path` is the module path of the outermost.
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
    activates = has(equation, Trait.EXPONENTIAL) or equation.primitive in _ACTIVATIONS
    if activates and not (half or solves):
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


def _is_half_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  layer = is_layer(equation, rules) and not states_precision(equation)
  return layer and not is_outer(equation) and FULL_PRECISION not in marked_path(equation).split("/")


def _is_index(equation: JaxprEqn, result: Atom) -> bool:
  """Returns whether a result is an index, a count, or a number that was rounded to an integer."""
  if not np.issubdtype(dtype_of(result), np.integer):
    return False
  return any(is_float(a.aval) or dtype_of(a) == np.dtype(bool) for a in equation.invars)


def decide_bodies(call: Call, wanted: Wanted) -> Call:
  """Returns a call with the decisions about its bodies."""
  layout = call_layout(call.equation)
  if call_kind(call.equation) in (CallKind.SCAN, CallKind.WHILE):
    return _decide_loop(call, layout, wanted)
  bodies = enumerate(layout.bodies)
  plans = tuple(
    call.around.decide(call, jaxpr, i, [call.ins[k] for k in ins], wanted) for i, (jaxpr, ins, _) in bodies
  )
  outs = plans[0].outs
  if len(plans) > 1:
    outs = tuple(_of_branches(column) for column in zip(*(plan.outs for plan in plans), strict=True))
  return dataclasses.replace(call, plans=plans, outs=outs)


def _of_branches(held: Sequence[Held]) -> Held:
  """Returns how a result of several branches is held."""
  kind = strongest(held)
  return joined(held, Kind.ISLAND if kind is Kind.HALF and any(h.wide for h in held) else kind)


def _decide_loop(call: Call, layout: CallLayout, wanted: Wanted) -> Call:
  """Decides about a loop, whose carry leaves its step as it enters."""
  rules, n, start, last = call.around.rules, len(layout.carry), layout.carry.start, len(layout.bodies) - 1

  def decide(i: int, carry: Sequence[Held]) -> CastPlan:
    body, ins = layout.bodies[i], [*call.ins[:start], *carry, *call.ins[start + n :]]
    return call.around.decide(
      call, body.jaxpr, i, [ins[k] for k in body.operands], [*[None] * n, *wanted[n:]]
    )

  set_at = lambda i: rules.overrides.at(inside(call.path, f"carry_{i}")).loop_carry
  entering = call.ins[start : start + n]
  settings = [None if h.kind is Kind.FIXED else set_at(i) for i, h in enumerate(entering)]
  carry = [_as_set(held, setting, call.half) for held, setting in zip(entering, settings, strict=True)]
  layers = loop_facts(call.equation, rules).layers
  for _ in range(n + 3):  # a kind may move by one carry in each round
    plan = decide(last, carry)
    inputs = zip(plan.jaxpr.invars, layout.bodies[last].operands, strict=True)
    entries = [v for v, k in inputs if k in layout.carry]
    merged = [
      LoopCarry(first, f"an override sets {setting}")
      if setting is not None
      else _merged(first, left, *_flow(plan, v, atom, own, call))
      for setting, first, left, v, atom, own in zip(
        settings, carry, plan.outs[:n], entries, plan.jaxpr.outvars[:n], layers, strict=True
      )
    ]
    if [one.held for one in merged] == carry:
      break
    carry = [one.held for one in merged]
  else:
    carry = [c if c.kind is Kind.FIXED else Held(Kind.PINNED, FLOAT32) for c in carry]
    merged = [LoopCarry(c, "no other dtype is the same at each step") for c in carry]
    plan = decide(last, carry)
  return dataclasses.replace(
    call,
    ins=(*call.ins[:start], *carry, *call.ins[start + n :]),
    plans=(*(decide(i, carry) for i in range(last)), plan),
    outs=_after_loop([*carry, *plan.outs[n:]]),
    carry=tuple(merged),
  )


def _after_loop(outs: Sequence[Held]) -> tuple[Held, ...]:
  """Returns how the final carry is held outside the loop: a memory exists only inside."""
  return tuple(h._replace(kind=Kind.ISLAND) if h.kind is Kind.RUNNING else h for h in outs)


def _merged(first: Held, last: Held, half: np.dtype | None, why: str) -> LoopCarry:
  """Returns the one way to hold a carry, from how it enters and how it leaves the body; see `_flow`."""
  both = _after_loop([first, last])  # this round decides itself whether a carry is a memory
  wide = any(held.wide for held in both)
  kind = strongest(both)
  if kind not in (Kind.RUNNING, Kind.HALF, Kind.ISLAND):
    return LoopCarry(joined(both, kind), Code[kind.name].sentence())
  held = joined(both, Kind.RUNNING if half is None or wide else Kind.HALF, half)
  return LoopCarry(held, "it may be outside the half-precision range" if half and wide else why)


def _as_set(held: Held, setting: str | None, half: np.dtype | None) -> Held:
  """Returns how a carry is held, by the user's setting if there is one."""
  if setting is None:
    return held
  if setting == "half" and half is not None:
    return Held(Kind.HALF, half)
  return Held(Kind.RUNNING, FLOAT32, held.wide)


class _Way(enum.Flag):
  """What happens to a carry on its way to the next step."""

  NONE = 0  # it is moved
  ADDED = enum.auto()
  SCALED = enum.auto()
  LOGARITHM = enum.auto()  # of a value from products with it


def _way(equation: JaxprEqn) -> _Way:
  if bodies_of(equation):
    inner = (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns if is_float(e.outvars[0].aval))
    return functools.reduce(operator.or_, map(_way, inner), _Way.NONE)
  if has(equation, Trait.SCALES):
    return _Way.SCALED
  moves = has(equation, Trait.MOVES | Trait.PASSES_ON) or equation.primitive is jax.lax.select_n_p
  return _Way.NONE if moves else _Way.ADDED


def _flow(plan: CastPlan, before: Var, after: Atom, layers: bool, call: Call) -> tuple[np.dtype | None, str]:
  """Returns the half dtype that may hold a carry on its path through the body of its loop, and the reason.

  A carry that reaches a matrix product in the body is an activation that passes through layers, or a cache
  that is updated. A carry that is only added to is a sum. A carry that is multiplied on its way to the next
  step decays. A carry to which the same network adds at each step belongs to a simulation or a sampler. The
  last three remember many steps.

  Args:
    plan: the plan of the body.
    before: the carry as it enters the body.
    after: the carry as it leaves.
    layers: whether a product of the carry and weights of the step's own makes the next one.
    call: the loop.
  """
  reached, ways = {before}, {before: _Way.NONE}
  product, half = False, call.half
  for node in plan.nodes:
    equation = node.equation
    if half is not None and node.half is None and after in equation.outvars:
      return None, "it is computed in a region in float32"
    variables = variables_of(equation.invars)
    if any(a in reached for a in variables):
      reached.update(equation.outvars)
      product = product or (node.multiplies and node.mode is not Mode.FULL)
    past = [ways[a] for a in variables if a in ways]
    exact = node.mode is Mode.FULL and has(equation, Trait.PRODUCT)
    if past and (node.listed == "infer" or exact):
      way = _Way.SCALED if exact else _way(equation)
      ways.update(dict.fromkeys(equation.outvars, functools.reduce(operator.or_, past, way)))
    elif equation.primitive in _LOGARITHMS and any(a in reached for a in variables):
      ways.update(dict.fromkeys(equation.outvars, _Way.LOGARITHM))
  if half is None:
    return None, (call.solver or Code.MODULE).sentence()
  if not product:
    return None, "no matrix product in the loop reads it: a sum or a state over many steps"
  if not is_variable(after) or after not in ways:
    return half, "each step makes it anew by matrix products: activations that pass through layers"
  if _Way.LOGARITHM in ways[after]:
    return None, "each step goes on from a logarithm: a log-probability of many steps"
  if _Way.SCALED in ways[after]:
    return None, "it is multiplied on its way to the next step: a memory that decays"
  if not ways[after]:
    return half, "each step moves it or writes to it: a cache"
  if not layers:
    return None, "each step adds a result of the same weights: a memory of many steps"
  if plan.held[after].kind in (Kind.ISLAND, Kind.RUNNING) and any(
    after in node.equation.invars for node in plan.nodes
  ):
    return None, "each step adds to float32 data, which more than layers read"
  return half, "each step adds a layer with weights of its own: activations that pass through layers"
