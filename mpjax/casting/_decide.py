"""Decides about a program: the dtype of each equation and of each value, with the reason.

`Body` reads a jaxpr and returns a frozen `CastPlan`. Only custom derivative and batching rules
are decided later: they are not programs until JAX differentiates or batches (`Call.decide`).
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._cast_plan import Call, CastPlan, Mode, Node
from mpjax.casting._decision_rules import Case, decision_of
from mpjax.casting._gradient_sums import adds_many
from mpjax.casting._islands import Segments, pull_in
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, is_half, size
from mpjax.casting._loops import Wanted, why_in_solver
from mpjax.casting._program import (
  ENDS,
  NOWHERE,
  READERS,
  OtherUses,
  Program,
  Reads,
  below_backward,
  in_half_alone,
  in_one_pass,
  is_whole,
)
from mpjax.casting._reasons import Code
from mpjax.casting._sources import Lineage
from mpjax.jaxpr import (
  CallKind,
  Calls,
  Facts,
  Trait,
  backward_depth,
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


@dataclasses.dataclass(eq=False)
class Body:
  """One jaxpr during the decisions: its place in the program, and what is decided about its values.

  Attributes:
    program: the program around it, or the derivative rule.
    closed: the jaxpr.
    inputs_held: how its constants and inputs are held.
    parent: the body around it, if it is the body of a call.
    calls: the calls around it, outermost first.
    path: its module path.
    solver: why it is in float32 under every policy, such as the body of a solver; otherwise `None`.
    islands: whether to make islands: not inside a checkpoint of the user's.
    in_loop: whether it is a step of a `scan`, whose backward pass is another loop.
    tangents: how many of its last inputs are tangents, in which it must stay linear.
    gradients: for a backward rule, which outputs are gradients of parameters.
  """

  program: Program
  closed: AnyJaxpr
  inputs_held: Sequence[Held]
  parent: Body | None = None
  calls: Calls = ()
  path: str = ""
  solver: Code | None = None
  islands: bool = True
  in_loop: bool = False
  tangents: int = 0
  gradients: Sequence[bool] | None = None

  def __post_init__(self) -> None:
    self.rules = self.program.rules
    self.jaxpr = open_jaxpr(self.closed)
    self.inputs = (*self.jaxpr.constvars, *self.jaxpr.invars)
    self.held: dict[Var, Held] = dict(zip(self.inputs, self.inputs_held, strict=True))
    self.widened: set[Var] = set()  # values that the user's program widens from float16
    self.lineages: Facts[Lineage] | None = self.program.lineages.get(self.calls)
    # If no derivative or batching rule is around it, the layers around its values are known, too.
    self.layers = self.lineages if is_whole(self.calls) else None
    unknown = [Reads.NONE] * len(self.jaxpr.outvars)
    known = self.program.reads.get(self.calls)
    self._reads = known or self.program.readers.solve(self.closed, unknown, self.calls)
    self._depths: dict[Var, int] = {}
    self._around = self.parent if self.calls and in_one_pass(self.calls[-1][0]) else None
    self.depth = 0 if self.gradients is None else 1  # the number of backward passes around it
    if self._around is not None:
      self.depth = max(self._around.depth, backward_depth(self.calls[-1][0]))
    self._linear = set(self.inputs[len(self.inputs) - self.tangents :])

  def plan(self, wanted: Wanted = (), full_outputs: bool = False) -> CastPlan:
    """Decides about every equation in order, then about values that only float32 reads, then islands.

    Args:
      wanted: for each output, the half dtype that all its readers want, or `None`.
      full_outputs: whether its outputs are read in float32.
    """
    jaxpr = self.jaxpr
    decisions = [self._decide(equation) for equation in live(jaxpr).equations]
    decisions = pull_in(decisions, self.held, set(variables_of(jaxpr.outvars)), full_outputs)
    nodes = tuple(map(self._executed, decisions))
    outs = tuple(self._output(i, atom, wanted) for i, atom in enumerate(jaxpr.outvars))
    return CastPlan(
      jaxpr=jaxpr,
      inputs=self.inputs,
      nodes=nodes,
      units=Segments(self, nodes, outs).units() if self.islands else nodes,
      held=types.MappingProxyType(dict(self.held)),
      outs=outs,
      depths=tuple(self._depths.get(v, 0) if is_variable(v) else 0 for v in jaxpr.outvars),
      has_product=any(node.multiplies for node in nodes),
    )

  def how(self, atom: Atom, half: np.dtype | None = None) -> Held:
    """Returns how a variable or literal is held."""
    return self.held[atom] if is_variable(atom) else initial(atom.aval, atom.val, half)

  def half_at(self, path: str) -> np.dtype | None:
    """Returns the half dtype that a module computes in there; `None` for float32."""
    overrides = self.rules.overrides
    return None if self.solver and not overrides.is_set(path) else overrides.half_at(path)

  def reads(self, atom: Atom) -> Reads:
    """Returns the readers of this variable."""
    return self._reads[atom] & READERS

  def end(self, atom: Atom) -> Reads:
    """Returns what follows a value, as far as it is known."""
    known = self.layers is not None and not below_backward(self.calls)
    return self._reads[atom] & ENDS if known else Reads.NONE

  def met(self, atom: Atom, half: np.dtype | None, equation: JaxprEqn) -> Held:
    """Returns how a variable is held when it meets others in an equation.

    An island's result that is only read in half precision is half from here on. A gradient that leaves the
    backward pass is float32, as with parameters cast by hand: otherwise an optimiser's sums would stall.
    """
    held = self.how(atom, half)
    depth = self._depths.get(atom, 0) if is_variable(atom) else 0
    if held.kind in (Kind.HALF, Kind.ISLAND) and depth > backward_depth(equation):
      return Held(Kind.PINNED, FLOAT32)
    if held.kind is Kind.ISLAND and half is not None and not held.wide and in_half_alone(self.reads(atom)):
      return Held(Kind.HALF, half)
    return held

  def leaves_backward(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation in a backward pass of the program computes the gradient of a parameter."""
    depth = max(self.depth, backward_depth(equation))
    return depth > 0 and all(self._uses[v] < depth for v in equation.outvars)

  @functools.cached_property
  def _uses(self) -> Facts[int]:
    """For each value, how deep in backward passes it has another use than as a gradient."""
    around = self._around._uses.inside(*self.calls[-1]) if self._around else None
    if around is not None:
      return around
    gradients = self.gradients or [True] * len(self.jaxpr.outvars)  # those of a whole program leave it
    outputs = [NOWHERE if is_gradient else self.depth for is_gradient in gradients]
    return OtherUses(self.depth).solve(self.closed, outputs)

  def call(self, equation: JaxprEqn, path: str, half: np.dtype | None, held: Sequence[Held]) -> Call:
    """Returns a call in a module that computes in `half`, its bodies not yet decided about."""
    solver = self.solver or why_in_solver(((equation, 0),), self.rules, self.path)
    if not solver and (*self.calls, (equation, 0)) in self.program.exact:
      solver = Code.REPEATS_SOLVER
    half = None if solver and not self.rules.overrides.is_set(path) else half
    return Call(self, equation, path, half, solver, tuple(held))

  def decide(
    self,
    call: Call,
    closed: AnyJaxpr,
    i: int,
    held: Sequence[Held],
    wanted: Wanted = (),
    *,
    tangents: int = 0,
    gradients: Sequence[bool] | None = None,
  ) -> CastPlan:
    """Returns the plan of a body of a call.

    Args:
      call: the call.
      closed: the body, or a derivative rule of the call.
      i: the number of the body in the layout of the call; -1 for a rule.
      held: how its inputs are held.
      wanted: see `plan`.
      tangents: how many of its last inputs are tangents.
      gradients: for a backward rule, which outputs are gradients of parameters.
    """
    calls, kind, p = (*self.calls, (call.equation, i)), call_kind(call.equation), call.equation.params
    program = self.program if i >= 0 else self.program.of_rule(closed, calls, gradients is not None)
    inner = Body(
      program,
      closed,
      [*(initial(v.aval) for v in open_jaxpr(closed).constvars), *held],
      self,
      calls,
      call.path,
      call.solver,
      # Islands in a checkpoint of the user's would be recomputed twice: by it and by their own.
      islands=self.islands and kind is not CallKind.REMAT,
      in_loop=self.in_loop or (kind is CallKind.SCAN and p["length"] > p["unroll"]),
      tangents=tangents,
      gradients=gradients,
    )
    return inner.plan(wanted)

  def _output(self, i: int, atom: Atom, wanted: Wanted) -> Held:
    held = self.how(atom)
    narrow = wanted[i] if i < len(wanted) else None
    computed = held.kind is Kind.ISLAND or (held.kind is Kind.FLEXIBLE and atom not in self.inputs)
    return Held(Kind.HALF, narrow) if narrow is not None and computed and not held.wide else held

  def _decide(self, equation: JaxprEqn) -> Node:
    linear = any(is_variable(a) and a in self._linear for a in equation.invars)
    gradient = self.layers is not None and any(self.layers[v].gradient for v in equation.outvars)
    # A clip of a wide value would not be linear, and would hide the overflow of a gradient.
    decision = decision_of(Case(equation, self, clips=not (linear or gradient)))
    self._linear.update(equation.outvars if linear else ())
    if decision.code is Code.OWN_WIDENING and dtype_of(equation.invars[0]) == np.float16:
      self.widened.update(equation.outvars)
    self.held.update(zip(equation.outvars, decision.outs, strict=True))
    self._depths.update(zip(equation.outvars, decision.depths(), strict=True))
    return decision

  def _executed(self, made: Node) -> Node:
    """Returns a decision with how to execute it, once it is known how all variables are held."""
    equation = made.equation
    widened: frozenset[int] = frozenset()
    own_casts: frozenset[int] = frozenset()
    result = None
    if made.fp8 is not None:
      own = made.outs[0].dtype if made.mode is Mode.HALF else dtype_of(equation.outvars[0])
      result = self.rules.accum_dtype or own
    elif made.mode is Mode.HALF and not bodies_of(equation):
      widened = _widened(equation)
      if self.rules.wide_gradients:
        own_casts = self._parameters(equation) - widened
      asks = "preferred_element_type" in equation.params
      if asks and (equation.params["preferred_element_type"] is not None or made.outs[0].dtype != made.half):
        result = made.outs[0].dtype
      if asks and made.listed == "allow":
        result = self.rules.accum_dtype or result
    return dataclasses.replace(
      made,
      reads=tuple(_read_dtype(made, i, self.how(atom)) for i, atom in enumerate(equation.invars)),
      widened=widened,
      own_casts=own_casts,
      result_dtype=result,
      adds_many=self._adds_many(made),
    )

  def _adds_many(self, made: Node) -> bool:
    known, operands = self.lineages, made.equation.invars
    if made.mode is not Mode.HALF or self.how(operands[0]).kind is not Kind.HALF:
      return False
    return adds_many(made.equation, known is not None and not known[operands[-1]].varies)

  def _parameters(self, equation: JaxprEqn) -> frozenset[int]:
    """Returns the operands that are float32 parameters, or computed only from those: no layer came before."""

    def is_parameter(a: Atom) -> bool:
      flexible = is_variable(a) and self.held[a].kind is Kind.FLEXIBLE and not self.held[a].wide
      return flexible and (self.layers is None or not self.layers[a].active)

    return frozenset(i for i, a in enumerate(equation.invars) if is_parameter(a))


def _read_dtype(made: Node, i: int, held: Held) -> np.dtype | None:
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
