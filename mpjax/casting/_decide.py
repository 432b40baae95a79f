"""Decides about a program: the dtype of each equation and of each value, with the reason.

`Decider` reads a jaxpr and returns a frozen `CastPlan`. Only custom derivative and batching rules
are decided later: they are not programs until JAX differentiates or batches (`Call.bodies`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Atom, JaxprEqn
from mpjax.casting._body import Body
from mpjax.casting._cast_plan import Bodies, CastPlan, Decision, Mode, Node
from mpjax.casting._decision_rules import Case, decision_of
from mpjax.casting._gradient_sums import adds_many
from mpjax.casting._islands import Segments, pull_in
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, is_half, size
from mpjax.casting._loops import why_in_solver
from mpjax.casting._product_roles import Lineage, Lineages
from mpjax.casting._readers import Readers, Reads, WeightGradients
from mpjax.casting._reasons import Code
from mpjax.jaxpr import (
  CallKind,
  Facts,
  Trait,
  bodies_of,
  call_kind,
  dtype_of,
  has,
  is_variable,
  live,
  open_jaxpr,
  shape_of,
  variables_of,
)


class Decider(Body):
  """Decides about each equation of a jaxpr."""

  def plan(self, wanted: Sequence[np.dtype | None] = (), full_outputs: bool = False) -> CastPlan:
    """Decides about every equation in order, then about values that only float32 reads, then islands.

    Args:
      wanted: for each output, the half dtype that all its readers want, or `None`.
      full_outputs: whether its outputs are read in float32.
    """
    jaxpr, rules, place = self._jaxpr, self.rules, self.place
    decisions = [self._decide(equation) for equation in live(jaxpr).equations]
    decisions = pull_in(decisions, self.held, set(variables_of(jaxpr.outvars)), full_outputs)
    nodes = tuple(map(self._node, decisions))
    outs = tuple(self._output(i, atom, wanted) for i, atom in enumerate(jaxpr.outvars))
    return CastPlan(
      jaxpr=jaxpr,
      inputs=self._inputs,
      nodes=nodes,
      units=Segments(nodes, jaxpr, self.held, outs, rules, place).units() if place.islands else nodes,
      held=types.MappingProxyType(dict(self.held)),
      outs=outs,
      depths=tuple(self._depth.get(v, 0) if is_variable(v) else 0 for v in jaxpr.outvars),
      has_product=any(node.multiplies for node in nodes),
    )

  def bodies(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Bodies:
    solver = self.place.solver or why_in_solver(((equation, 0),), self.rules, self.place.path)
    if not solver and (*self.place.calls, (equation, 0)) in self.place.exact:
      solver = Code.REPEATS_SOLVER
    half = None if solver and not self.rules.overrides.is_set(path) else half
    decide = functools.partial(self._decide_body, equation, path, solver)
    return Bodies(equation, path, half, solver, self.rules, decide)

  def _output(self, i: int, atom: Atom, wanted: Sequence[np.dtype | None]) -> Held:
    held = self.how(atom)
    narrow = wanted[i] if i < len(wanted) else None
    computed = held.kind is Kind.ISLAND or (held.kind is Kind.FLEXIBLE and atom not in self._inputs)
    return Held(Kind.HALF, narrow) if narrow is not None and computed and not held.wide else held

  def _decide(self, equation: JaxprEqn) -> Decision:
    linear = any(is_variable(a) and a in self._linear for a in equation.invars)
    roles = self.place.roles
    gradient = roles is not None and any(roles.lineages[v].gradient for v in equation.outvars)
    # A clip of a wide value would not be linear, and would hide the overflow of a gradient.
    decision = decision_of(Case(equation, self, clips=not (linear or gradient)))
    self._linear.update(equation.outvars if linear else ())
    if decision.code is Code.OWN_WIDENING and dtype_of(equation.invars[0]) == np.float16:
      self.widened.update(equation.outvars)
    self.held.update(zip(equation.outvars, decision.outs, strict=True))
    self._depth.update(zip(equation.outvars, decision.depths(), strict=True))
    return decision

  def _node(self, made: Decision) -> Node:
    """Returns how to execute an equation, once it is known how all variables are held."""
    equation = made.equation
    reads = tuple(_read_dtype(made, i, self.how(atom)) for i, atom in enumerate(equation.invars))
    widened: frozenset[int] = frozenset()
    own_casts: frozenset[int] = frozenset()
    result = None
    if made.fp8 is not None:
      own = made.outs[0].dtype if made.mode is Mode.HALF else dtype_of(equation.outvars[0])
      result = self.rules.accum_dtype or own
    elif made.mode is Mode.HALF and not bodies_of(equation):
      widened = _widened(equation)
      if self.rules.wide_gradients:
        own_casts = self._parameters(made) - widened
      asks = "preferred_element_type" in equation.params
      if asks and (equation.params["preferred_element_type"] is not None or made.outs[0].dtype != made.half):
        result = made.outs[0].dtype
      if asks and made.listed == "allow":
        result = self.rules.accum_dtype or result
    return Node(
      **vars(made),
      reads=reads,
      widened=widened,
      own_casts=own_casts,
      result_dtype=result,
      adds_many=self._adds_many(made),
    )

  def _adds_many(self, made: Decision) -> bool:
    known, operands = self.place.lineages, made.equation.invars
    if made.mode is not Mode.HALF or self.how(operands[0]).kind is not Kind.HALF:
      return False
    return adds_many(made.equation, known is not None and known[operands[-1]].is_constant)

  def _parameters(self, made: Decision) -> frozenset[int]:
    """Returns the operands that are float32 parameters, or computed only from those: no layer came before."""
    roles = self.place.roles

    def is_parameter(a: Atom) -> bool:
      flexible = is_variable(a) and self.held[a].kind is Kind.FLEXIBLE and not self.held[a].wide
      return flexible and (roles is None or not roles.lineages[a].active)

    return frozenset(i for i, a in enumerate(made.equation.invars) if is_parameter(a))

  def _decide_body(
    self,
    equation: JaxprEqn,
    path: str,
    solver: Code | None,
    jaxpr: AnyJaxpr,
    held: Sequence[Held],
    wanted: Sequence[np.dtype | None] = (),
    *,
    islands: bool = True,
    tangents: int = 0,
    gradients: Sequence[bool] | None = None,
  ) -> CastPlan:
    """Returns the plan of a body of a call.

    Args:
      equation: the call.
      path: its module path.
      solver: why its bodies are in float32, if they are of a solver.
      jaxpr: the body, or a derivative rule of the call.
      held: how its inputs are held.
      wanted: see `plan`.
      islands: whether to make islands.
      tangents: how many of its last inputs are tangents.
      gradients: for a backward rule, which outputs are gradients of parameters.
    """
    place, kind = self.place, call_kind(equation)
    roles, i = None, _number(jaxpr, equation)
    if place.roles is not None and kind is not None and kind.is_plain:  # a derivative rule is its own program
      roles = place.roles.inside(equation, i)
    lineages = place.lineages.inside(equation, i) if place.lineages else None
    readers = place.readers.inside(equation, i) if place.readers else None
    if i < 0 and gradients is None and place.lineages and place.readers:
      lineages, readers = self._of_rule(equation, jaxpr, place.lineages, place.readers)
    if gradients is None:
      flow = place.gradients.inside(equation, i) or WeightGradients.leaving(jaxpr)
    else:
      flow = WeightGradients.of(jaxpr, gradients, depth=1)
    p = equation.params
    inner = dataclasses.replace(
      place,
      path=path,
      roles=roles,
      lineages=lineages,
      readers=readers,
      calls=(*place.calls, (equation, i)),
      solver=solver,
      gradients=flow,
      islands=place.islands and islands,
      in_loop=place.in_loop or (kind is CallKind.SCAN and p["length"] > p["unroll"]),
    )
    constants = [initial(v.aval) for v in open_jaxpr(jaxpr).constvars]
    return Decider(jaxpr, [*constants, *held], self.rules, inner, tangents).plan(wanted)

  def _of_rule(
    self, equation: JaxprEqn, jaxpr: AnyJaxpr, outside: Facts[Lineage], readers: Facts[Reads]
  ) -> tuple[Facts[Lineage], Facts[Reads]]:
    """Returns the sources and the readers of the values of a rule, which first returns the call's results."""
    rules, body = self.rules, open_jaxpr(jaxpr)
    calls = (*self.place.calls, (equation, -1))
    operands = [outside[a] for a in equation.invars][: len(body.invars)]
    tangents = [Lineage(False, True, None, real=True)] * (len(body.invars) - len(operands))
    lineages = Lineages(rules).solve(jaxpr, [*operands, *tangents], calls)
    results = [readers[v] for v in equation.outvars][: len(body.outvars)]
    others = [Reads.NONE] * (len(body.outvars) - len(results))
    return lineages, Readers(rules, lineages=lineages).solve(jaxpr, [*results, *others], calls)


def _number(jaxpr: AnyJaxpr, equation: JaxprEqn) -> int:
  """Returns the index of a jaxpr among the bodies of a call; -1 for the program of a derivative rule."""
  bodies = list(map(open_jaxpr, bodies_of(equation)))
  return bodies.index(open_jaxpr(jaxpr)) if open_jaxpr(jaxpr) in bodies else -1


def _read_dtype(made: Decision, i: int, held: Held) -> np.dtype | None:
  """Returns the dtype in which an operand is read; `None` for one in the user's dtype that keeps it."""
  atom = made.equation.invars[i]
  if not castable(atom.aval):
    multiplies = made.listed == "allow" and made.mode is Mode.HALF and is_half(atom.aval)
    return made.half if multiplies else None
  if made.call is not None:
    return made.call.ins[i].dtype
  if made.fp8 is not None and held.kind is Kind.FLEXIBLE:
    return FLOAT32  # master weights are rounded once
  if made.mode is Mode.HALF and not bodies_of(made.equation):
    return made.half
  return held.dtype if made.mode in (Mode.EACH, Mode.CAST, Mode.EDGE) else FLOAT32


def _widened(equation: JaxprEqn) -> frozenset[int]:
  """Returns the operands that are broadcast in an equation, and cast after that."""
  result = equation.outvars[0]
  if equation.primitive is jax.lax.broadcast_in_dim_p:
    operand = equation.invars[0]
    grows = is_variable(operand) and size(operand) != size(result)
    return frozenset([0] if grows else [])
  if not has(equation, Trait.BROADCASTS):
    return frozenset()
  return frozenset(
    i
    for i, a in enumerate(equation.invars)
    if is_variable(a) and castable(a.aval) and shape_of(a) != shape_of(result)
  )
