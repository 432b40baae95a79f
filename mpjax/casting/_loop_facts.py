"""How a loop uses its carry: whether products decide its end, and which products are a recurrence."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple, cast

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn
from mpjax.casting._casting_rules import ByRules, CastingRules
from mpjax.casting._kinds import is_float, size
from mpjax.casting._product_roles import is_layer, is_outer, states_precision
from mpjax.casting._reasons import Code
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


def why_solver(equation: JaxprEqn, rules: CastingRules) -> Code | None:
  """Returns why the bodies of a call run in float32 under every policy; `None` for others.

  A fixed point or an adaptive step ends where an error is small, which a rounding error never is. A value
  that passes through an arg-max or another integer, such as the next token, does not count. A filter solves a
  linear system for its state at each step, as exactly as it knows the state. A solver's derivative rule is
  one.
  """
  kind, found = call_kind(equation), rules.found_in_loops
  if kind is None:
    return None
  if (equation, "solver") not in found:
    why: Code | None = None
    if ends_by_products(equation, rules):
      why = Code.SOLVER
    elif kind.is_control_flow and _solves_for_its_state(equation, rules):
      why = Code.STATE_FILTER
    elif kind.is_custom_rule:
      why = _of_one_solver(equation, rules)
    found[equation, "solver"] = why
  return cast(Code | None, found[equation, "solver"])


def why_in_solver(calls: Calls, rules: CastingRules, path: str = "") -> Code | None:
  """Returns why equations inside some calls run in float32 under every policy; `None` if they do not.

  Args:
    calls: the calls, outermost first.
    rules: the rules; an override of the carry of a loop has the last word.
    path: the module path of the outermost.
  """
  for call, _ in calls:
    path = inside(path, marked_path(call))
    why = why_solver(call, rules)
    carries = range(len(call_layout(call).carry)) if why else ()
    if why and "half" not in [rules.overrides.loop_carry_at(inside(path, f"carry_{i}")) for i in carries]:
      return why
  return None


def _of_one_solver(equation: JaxprEqn, rules: CastingRules) -> Code | None:
  """Returns why the bodies of a call are in float32, if all their products are in such loops."""
  why = None
  for body in bodies_of(equation):
    for inner in open_jaxpr(body).eqns:
      if _is_half_product(inner, rules):
        return None
      own = why_solver(inner, rules) or _of_one_solver(inner, rules)
      if not own and any(_is_half_product(e, rules) for b in bodies_of(inner) for e in equations_in(b)):
        return None
      why = why or own
  return why


def ends_by_products(equation: JaxprEqn, rules: CastingRules) -> bool:
  """Returns whether an equation is a loop whose end depends on a float that its products make."""
  if call_kind(equation) is not CallKind.WHILE:
    return False
  layout = call_layout(equation)
  bodies, _ = _MadeByProducts(rules).enter(equation, layout, [False] * len(equation.invars))
  return any(facts.outputs[0] for facts, body in zip(bodies, layout.bodies, strict=True) if body.decides)


def _solves_for_its_state(equation: JaxprEqn, rules: CastingRules) -> bool:
  layout = call_layout(equation)
  if not layout.bodies or not any(has(p, Trait.ALGEBRA) for p in rules.primitives([equation])):
    return False
  states = [_Through.STATE if k in layout.carry else _Through.NONE for k in range(len(equation.invars))]
  analysis = _ThroughAlgebra(rules)
  bodies, _ = analysis.enter(equation, layout, states)
  leaving = (facts.outputs for facts, body in zip(bodies, layout.bodies, strict=True) if not body.decides)
  solves = any(_Through.ALGEBRA in fact for facts in leaving for fact in facts[: len(layout.carry)])
  return solves and not analysis.has_layers


class _Through(enum.Flag):
  """Whether a value depends on the state of a loop, and whether linear algebra lies between."""

  NONE = 0
  STATE = enum.auto()
  ALGEBRA = enum.auto()
  PRODUCT = enum.auto()  # a product, by linear operations


class _ThroughAlgebra(ByRules[_Through]):
  """What the state of a loop goes through; `has_layers` if products reach an activation function."""

  nothing = _Through.NONE

  def __init__(self, rules: CastingRules):
    super().__init__(rules)
    self.has_layers = False

  def transfer(self, equation: JaxprEqn, operands: list[_Through], calls: Calls) -> list[_Through]:
    found = functools.reduce(operator.or_, operands, _Through.NONE)
    if has(equation, Trait.ALGEBRA):
      found = found & ~_Through.PRODUCT | (_Through.ALGEBRA if found else _Through.NONE)
    elif _is_half_product(equation, self._rules):
      found |= _Through.PRODUCT
    elif _bends(equation):
      self.has_layers |= _Through.PRODUCT in found and any(size(a) > 1 for a in equation.invars)
    return [found if is_float(v.aval) else _Through.NONE for v in equation.outvars]


class _MadeByProducts(ByRules[bool]):
  """Whether a float, or the result of comparing it, comes from products in half precision."""

  nothing = False

  def transfer(self, equation: JaxprEqn, operands: list[bool], calls: Calls) -> list[bool]:
    made = any(operands) or _is_half_product(equation, self._rules)
    return [made and not _is_index(equation, v) for v in equation.outvars]


def _bends(equation: JaxprEqn) -> bool:
  """Returns whether an equation is an activation function, or part of one."""
  return has(equation, Trait.EXPONENTIAL) or equation.primitive in _ACTIVATIONS


_ACTIVATIONS = frozenset(
  {jax.lax.tanh_p, jax.lax.logistic_p, jax.lax.erf_p, jax.lax.max_p, jax.lax.min_p, jax.lax.reduce_max_p}
)


def _is_half_product(equation: JaxprEqn, rules: CastingRules) -> bool:
  layer = is_layer(equation, rules) and not states_precision(equation)
  return layer and not is_outer(equation) and FULL_PRECISION not in marked_path(equation).split("/")


def _is_index(equation: JaxprEqn, result: Atom) -> bool:
  """Returns whether a result is an index, a count, or a number that was rounded to an integer."""
  if not np.issubdtype(dtype_of(result), np.integer):
    return False
  return any(is_float(a.aval) or dtype_of(a) == np.dtype(bool) for a in equation.invars)


def is_recurrent(product: JaxprEqn, loop: JaxprEqn, rules: CastingRules) -> bool:
  """Returns whether a product is part of a long linear recurrence of a `scan`.

  The state of the loop reaches the product and the next step only by linear operations, and the matrix that
  multiplies it is the same at each step. After n steps the state is multiplied by the n-th power of the
  matrix, with n times the relative error of a rounding.
  """
  if call_kind(loop) is not CallKind.SCAN or loop.params["length"] < _LONG:
    return False
  found = rules.found_in_loops
  if (loop, "recurrent") not in found:
    found[loop, "recurrent"] = _recurrent_products(loop, rules)
  return product in found[loop, "recurrent"]


def layers_of_steps(loop: JaxprEqn, rules: CastingRules) -> Sequence[bool]:
  """Returns, for each carry of a loop, whether its product with weights of the step's own makes a later one.

  Weights of the step's own are those of stacked layers, which a `scan` reads row by row, and those that are
  taken from an array by the number of the step.
  """
  found = rules.found_in_loops
  if (loop, "layers") not in found:
    layout = call_layout(loop)
    steps = _Steps(rules)
    entering = [_Step(frozenset(), False)] * len(loop.invars)
    for k in layout.rows or ():
      entering[k] = _Step(frozenset(), True)
    for k in layout.carry:
      is_state = is_float(loop.invars[k].aval)
      entering[k] = _Step(frozenset([k]) if is_state else frozenset(), not is_state)
    bodies, _ = steps.enter(loop, layout, entering)
    inner = next(facts for facts, body in zip(bodies, layout.bodies, strict=True) if not body.decides)
    leaving = dict(zip(layout.carry, inner.outputs, strict=False))
    follows = {k: set(fact.states) for k, fact in leaving.items()}
    found[loop, "layers"] = [
      any(k in fact.layered and j in _closure(k, follows) for j, fact in leaving.items())
      for k in layout.carry
    ]
  return cast(Sequence[bool], found[loop, "layers"])


class _Step(NamedTuple):
  """What a value in a loop is computed from.

  Attributes:
    states: the states, by their operands.
    own: whether it also depends on other values that differ from step to step.
    layered: the states that a product with weights of the step's own multiplied on the way.
  """

  states: frozenset[int]
  own: bool
  layered: frozenset[int] = frozenset()


class _Steps(ByRules[_Step]):
  """What values in a loop are computed from."""

  nothing = _Step(frozenset(), False)

  def join(self, a: _Step, b: _Step) -> _Step:
    return _Step(a.states | b.states, a.own or b.own, a.layered | b.layered)

  def transfer(self, equation: JaxprEqn, operands: list[_Step], calls: Calls) -> list[_Step]:
    pairs = zip(operands, equation.invars, strict=True)
    floats = [fact for fact, a in pairs if is_float(a.aval) and size(a) > 1]
    listed = self._rules.list_of(equation.primitive)
    multiplies = listed == "allow" or at_region_edge(marked_path(equation)) or has(equation, Trait.KERNEL)
    result = functools.reduce(self.join, operands, self.nothing)
    if multiplies and any(fact.own and not fact.states for fact in floats):
      result = result._replace(layered=result.layered.union(*(fact.states for fact in floats)))
    index = _Step(frozenset(), result.own or bool(result.states))
    return [result if is_float(v.aval) else index for v in equation.outvars]


def _recurrent_products(loop: JaxprEqn, rules: CastingRules) -> frozenset[JaxprEqn]:
  layout = call_layout(loop)
  states = [k for k in layout.carry if is_float(loop.invars[k].aval)]
  rows = layout.rows or ()
  entering = [
    _Linear(frozenset({(k, None)}) if k in states else frozenset(), k not in rows and k not in layout.carry)
    for k in range(len(loop.invars))
  ]
  body = next(body for body in layout.bodies if not body.decides)
  facts = _LinearIn(rules).solve(body.jaxpr, [entering[k] for k in body.operands])
  leaving = dict(zip(layout.carry, facts.outputs, strict=False))
  follows = {k: {i for i, _ in leaving[k].paths} for k in layout.carry}  # the states behind each state
  found = set()
  for k, fact in leaving.items():
    found |= {product for i, product in fact.paths if product is not None and k in _closure(i, follows)}
  return frozenset(found)


def _closure(state: int, follows: dict[int, set[int]]) -> set[int]:
  """Returns the states that a state depends on, over any number of steps, and itself."""
  found, waiting = {state}, [state]
  while waiting:
    new = follows.get(waiting.pop(), set()) - found
    found |= new
    waiting += new
  return found


class _Linear(NamedTuple):
  """How a value depends on the state of a loop.

  Attributes:
    paths: each state that it is linear in, with each product by a constant on the way.
    constant: whether it is the same at each step.
    depends: whether it depends on a state in any way.
  """

  paths: frozenset[tuple[int, JaxprEqn | None]]
  constant: bool
  depends: bool = False


class _LinearIn(ByRules[_Linear]):
  def start(self, atom: Atom) -> _Linear:
    return _Linear(frozenset(), True)

  def join(self, a: _Linear, b: _Linear) -> _Linear:
    return _Linear(a.paths | b.paths, a.constant and b.constant, a.depends or b.depends)

  def transfer(self, equation: JaxprEqn, operands: list[_Linear], calls: Calls) -> list[_Linear]:
    constant = all(fact.constant for fact in operands)
    depends = any(fact.depends or fact.paths for fact in operands)
    paths: frozenset[tuple[int, JaxprEqn | None]] = frozenset()
    moving = [fact for fact in operands if fact.depends or fact.paths]
    if has(equation, _SUMS) or equation.primitive in _CHOOSES:
      paths = frozenset().union(*(fact.paths for fact in operands))
    elif _scales(equation, operands, moving):
      paths = moving[0].paths
      if _is_half_product(equation, self._rules):
        paths |= {(state, equation) for state, _ in paths}
    is_linear = [paths if is_float(v.aval) else frozenset() for v in equation.outvars]
    return [_Linear(own, constant, depends) for own in is_linear]


def _scales(equation: JaxprEqn, operands: list[_Linear], moving: list[_Linear]) -> bool:
  """Returns whether an equation is linear in its one moving operand, and scales it by a constant."""
  if len(moving) != 1 or not has(equation, _BILINEAR):
    return False
  divides = equation.primitive in (jax.lax.div_p, jax.lax.rem_p) and operands[1] is moving[0]
  return not divides and all(fact.constant for fact in operands if fact is not moving[0])


_SUMS = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.ADDS
_BILINEAR = Trait.PRODUCT | Trait.SCALES | Trait.ACCUMULATES
_CHOOSES = frozenset({jax.lax.select_n_p, jax.lax.dynamic_update_slice_p})
