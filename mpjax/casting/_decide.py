"""Decides about a program: the dtype of each operation and of each value, with the reason.

A `Body` decides about the operations of one jaxpr in order, each by the first of `_RULES` that applies.
`pull_in` may then move operations from half precision to float32; a frozen `CastPlan` is the result. Only
custom derivative and batching rules are decided later: they are not programs until JAX differentiates or
batches (`Call.decide`).

Where a new rule goes:

- about a primitive, whatever its operands: a row of `mpjax/jaxpr/_primitive_table.py`;
- about where an operand comes from: a field of `Source`, which holds across calls and loops;
- about an operation that follows its operands: `_of_follower`, and `_of_call` for a function with a rule of
  its own, such as `relu`, which runs as one operation;
- if float32 is read where half precision was: `Readers` in `_program.py`, which estimates that before any
  decision, says so, too.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import primitives

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import LOOPS, Call, CastPlan, Mode, Node
from mpjax.casting._gradient_sums import adds_many
from mpjax.casting._islands import Segments, pull_in
from mpjax.casting._kinds import (
  FLOAT32,
  Held,
  Kind,
  Wide,
  castable,
  computed_from,
  initial,
  is_float,
  is_half,
  joined,
  of_its_own,
  size,
  small,
  strongest,
)
from mpjax.casting._loops import decide_bodies
from mpjax.casting._program import (
  NOWHERE,
  BodyFacts,
  OtherUses,
  Program,
  Reads,
  in_half_alone,
  in_one_pass,
  in_order_alone,
  only_float32,
)
from mpjax.casting._reasons import Code
from mpjax.casting._sources import states_precision, why_in_solver
from mpjax.jaxpr import (
  OUTPUT,
  CallKind,
  Calls,
  Facts,
  Trait,
  at_region_edge,
  backward_depth,
  bodies_of,
  call_kind,
  call_layout,
  dtype_of,
  facts,
  has,
  has_region,
  in_region,
  inside,
  is_variable,
  live_equations,
  marked_path,
  open_jaxpr,
  operation_name,
  shape_of,
  values_read,
  variables_of,
)


@dataclasses.dataclass(eq=False)
class Body:
  """One jaxpr during the decisions: its place in the program, and what is decided about its values.

  Attributes:
    program: the program around it, or the derivative rule.
    closed: the jaxpr.
    inputs_held: how its constants and inputs are held.
    calls: the calls around it, outermost first.
    parent: the body around it, if it is the body of a call.
    path: its module path.
    solver: why it is in float32 under every policy, such as the body of a solver; otherwise `None`.
    islands: whether to make islands: not inside a checkpoint of the user's.
    in_loop: whether it is a step of a `scan`, whose backward pass is another loop.
    tangents: how many of its last inputs are tangents, in which it must stay linear.
    gradients: for a backward rule, which outputs are gradients of parameters.
    wanted: for each output, the half dtype that all its readers outside want, or `None`.
  """

  program: Program
  closed: AnyJaxpr
  inputs_held: Sequence[Held]
  calls: Calls = ()
  parent: Body | None = None
  path: str = ""
  solver: Code | None = None
  islands: bool = True
  in_loop: bool = False
  tangents: int = 0
  gradients: Sequence[bool] | None = None
  wanted: Sequence[np.dtype | None] = ()

  def __post_init__(self) -> None:
    self.rules = self.program.rules
    self.facts = BodyFacts(self.program, self.calls)
    self.jaxpr = open_jaxpr(self.closed)
    self.inputs = (*self.jaxpr.constvars, *self.jaxpr.invars)
    self.held: dict[Var, Held] = dict(zip(self.inputs, self.inputs_held, strict=True))
    self.widened: set[Var] = set()  # values that the user's program widens from float16
    self._depths: dict[Var, int] = {}
    self._around = self.parent if self.calls and in_one_pass(self.calls[-1][0]) else None
    self.depth = 0 if self.gradients is None else 1  # the number of backward passes around it
    if self._around is not None:
      self.depth = max(self._around.depth, backward_depth(self.calls[-1][0]))
    self._linear = set(self.inputs[len(self.inputs) - self.tangents :])

  def plan(self, full_outputs: bool = False) -> CastPlan:
    """Decides about every equation in order, then about values that only float32 reads, then islands.

    `full_outputs`: whether its outputs are read in float32.
    """
    jaxpr = self.jaxpr
    decisions = [self._decide(equation) for equation in live_equations(jaxpr)]
    decisions = pull_in(decisions, self.held, set(variables_of(jaxpr.outvars)), full_outputs)
    nodes = tuple(map(self._executed, decisions))
    plan = CastPlan(
      jaxpr=jaxpr,
      inputs=self.inputs,
      nodes=nodes,
      units=nodes,
      held=types.MappingProxyType(dict(self.held)),
      outs=tuple(self._output(i, atom) for i, atom in enumerate(jaxpr.outvars)),
      depths=tuple(self._depths.get(v, 0) if is_variable(v) else 0 for v in jaxpr.outvars),
      has_product=any(node.multiplies for node in nodes),
    )
    if not self.islands:
      return plan
    return dataclasses.replace(plan, units=Segments(plan, self.facts, self.rules, self.in_loop).units())

  def how(self, atom: Atom, half: np.dtype | None = None) -> Held:
    """Returns how a variable or literal is held."""
    return self.held[atom] if is_variable(atom) else initial(atom.aval, atom.val, half)

  def half_at(self, path: str) -> np.dtype | None:
    """Returns the half dtype that a module computes in there; `None` for float32."""
    overrides = self.rules.overrides
    return None if self.solver and not overrides.is_set(path) else overrides.half_at(path)

  def met(self, atom: Atom, half: np.dtype | None, equation: JaxprEqn) -> Held:
    """Returns how a variable is held when it meets others in an equation.

    An island's result that is only read in half precision is half from here on. A gradient that leaves the
    backward pass is float32, as with parameters cast by hand: otherwise an optimiser's sums would stall.
    """
    held = self.how(atom, half)
    depth = self._depths.get(atom, 0) if is_variable(atom) else 0
    if held.kind in (Kind.HALF, Kind.ISLAND) and depth > backward_depth(equation):
      return Held(Kind.PINNED, FLOAT32)
    if (
      held.kind is Kind.ISLAND
      and half is not None
      and not held.wide
      and in_half_alone(self.facts.reads(atom))
    ):
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
    """Returns a call in a module that computes in `half`, with the decisions about its bodies."""
    solver = self.solver or why_in_solver(((equation, 0),), self.rules, self.path)
    if not solver and (*self.calls, (equation, 0)) in self.program.exact:
      solver = Code.REPEATS_SOLVER
    n = len(call_layout(equation).carry)
    wanted = [half if in_half_alone(self.facts.reads(v)) else None for v in equation.outvars[n:]]
    half = None if solver and not self.rules.overrides.is_set(path) else half

    def decide(i: int, closed: AnyJaxpr, held: Sequence[Held], **of_rule: Any) -> CastPlan:
      calls, kind, p = (*self.calls, (equation, i)), call_kind(equation), equation.params
      is_backward = of_rule.get("gradients") is not None
      inner = Body(
        self.program if i >= 0 else self.program.of_rule(closed, calls, is_backward),
        closed,
        [*(initial(v.aval) for v in open_jaxpr(closed).constvars), *held],
        calls,
        self,
        path,
        solver,
        # Islands in a checkpoint of the user's would be recomputed twice: by it and by their own.
        islands=self.islands and kind is not CallKind.REMAT,
        in_loop=self.in_loop or (kind is CallKind.SCAN and p["length"] > p["unroll"]),
        wanted=[*[None] * n, *wanted] if i >= 0 else (),
        **of_rule,
      )
      return inner.plan()

    return decide_bodies(Call(equation, path, half, solver, tuple(held), decide), self.rules)

  def _output(self, i: int, atom: Atom) -> Held:
    held = self.how(atom)
    narrow = self.wanted[i] if i < len(self.wanted) else None
    computed = held.kind is Kind.ISLAND or (held.kind is Kind.FLEXIBLE and atom not in self.inputs)
    return Held(Kind.HALF, narrow) if narrow is not None and computed and not held.wide else held

  def _decide(self, equation: JaxprEqn) -> Node:
    layers = self.facts.layers
    linear = any(is_variable(a) and a in self._linear for a in equation.invars)
    gradient = layers is not None and any(layers[v].gradient for v in equation.outvars)
    # A clip of a wide value would not be linear, and would hide the overflow of a gradient.
    op = Operation(equation, self, clips=not (linear or gradient))
    decision = next(decision for rule in _RULES if (decision := rule(op)) is not None)
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
    known, operands = self.facts.sources, made.equation.invars
    if made.mode is not Mode.HALF or self.how(operands[0]).kind is not Kind.HALF:
      return False
    return adds_many(made.equation, known is not None and not known[operands[-1]].varies)

  def _parameters(self, equation: JaxprEqn) -> frozenset[int]:
    """Returns the operands that are float32 parameters, or computed only from those: no layer came before."""
    layers = self.facts.layers

    def is_parameter(a: Atom) -> bool:
      flexible = is_variable(a) and self.held[a].kind is Kind.FLEXIBLE and not self.held[a].wide
      return flexible and (layers is None or not layers[a].active)

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


class Operation:
  """An operation to decide about: the conditions of the rules, and how its results are held.

  Args:
    equation: the equation.
    body: the jaxpr around it, as far as it is decided.
    clips: whether results outside the half dtype's range may be clipped where they are rounded.
  """

  def __init__(self, equation: JaxprEqn, body: Body, clips: bool):
    self.equation: JaxprEqn = equation
    self.body: Body = body
    self.facts: BodyFacts = body.facts
    self._clips = clips
    self.path: str = inside(body.path, marked_path(equation))
    self.half: np.dtype | None = body.half_at(self.path)
    self.listed: str = body.rules.list_of(equation.primitive, self.half)
    self.is_cast: bool = equation.primitive is jax.lax.convert_element_type_p
    self.at_edge: bool = at_region_edge(self.path)  # anything but a cast there is a sum of gradients
    self.in_region: bool = in_region(self.path) and (self.is_cast or not self.at_edge)
    self.operands: list[Atom] = [a for a in equation.invars if castable(a.aval)]

  def decided(
    self,
    mode: Mode,
    code: Code | None,
    outs: tuple[Held, ...],
    listed: str = "",
    about: str = "",
    **more: Any,
  ) -> Node:
    """Returns a decision about it. Its list decided without `listed`, and gives the reason without `code`."""
    if not self._clips:
      outs = tuple(held._replace(wide=Wide.NO) for held in outs)
    if code is None:
      row = facts(self.equation)
      by_user = row.list_in(self.half) != self.listed
      code, about = (Code.LISTED_BY_USER, "") if by_user else (Code.LISTED, row.reason_in(self.half))
    return Node(self.equation, self.path, listed or self.listed, mode, self.half, code, outs, about, **more)

  @property
  def place(self) -> Calls:
    """The calls around it, and itself."""
    return (*self.body.calls, (self.equation, 0))

  @property
  def why_float32_result(self) -> Code | None:
    """The reason why it has a float32 result as a product in half precision; or `None`.

    A result that another product follows is an activation: half precision holds what that product reads. If
    it is large, such as the logits of a vocabulary, float32 is not worth its memory: in half precision it is
    kept for the backward pass in half the bytes.
    """
    layers, result = self.facts.layers, self.equation.outvars[0]
    reads = self.facts.reads(result)
    if layers is None or not self.body.rules.wide_gradients or not only_float32(reads):
      return None
    if backward_depth(self.equation) or layers[result].gradient:
      return None
    if reads & Reads.ALGEBRA:
      return Code.RESULT_FOR_ALGEBRA
    operands = self.equation.invars[:2]
    activations = [a for a in operands if layers[a].active] or operands
    if self.facts.end(result) & Reads.PRODUCT or 4 * size(result) > max(map(size, activations)):
      return None
    return Code.SMALL_RESULT

  @property
  def meets_data(self) -> bool:
    """Whether half precision meets float32 data in it, and float32 or an order is made of the result.

    What a norm reads is a residual stream. Data differs from row to row; a running mean, which all rows
    share, is as a bias. The program has to return what float32 makes of the result without a layer.
    """
    layers, result = self.facts.layers, self.equation.outvars[0]
    if layers is None or not has(self.equation, Trait.ELEMENTWISE):
      return False
    reads, ends = self.facts.reads(result), self.facts.end(result)
    returned = reads & Reads.FLOAT32 and ends & (Reads.SCALAR | Reads.ARRAY)
    if reads & Reads.NORM or not (reads & Reads.ORDER or returned):
      return False
    met = {a: self.met(a) for a in self.operands if is_variable(a)}
    if not met or strongest(met.values()) is not Kind.HALF:
      return False
    rows = shape_of(result)[:1]
    rounded = [a for a, held in met.items() if held.kind is Kind.HALF]
    data = (a for a in self.equation.invars if a not in rounded and shape_of(a)[:1] == rows)
    return any(layers[a].inputs & ~self.body.program.parameters for a in data)

  def met(self, atom: Atom) -> Held:
    """Returns how a value is held when it meets the others."""
    return self.body.met(atom, self.half, self.equation)

  def all_held(self, held: Held) -> tuple[Held, ...]:
    """Returns how the results are held if all float32 ones are held like `held`."""
    return tuple(held if castable(v.aval) else initial(v.aval) for v in self.equation.outvars)

  def all_in_half(self, kind: Kind) -> tuple[Held, ...]:
    """Returns how the results are held if all float32 ones are in the compute dtype."""
    return self.all_held(Held(kind, cast(np.dtype, self.half)))

  def kept(self) -> tuple[Held, ...]:
    """Returns how the results are held if the equation keeps its dtypes."""
    kind = Kind.ISLAND if self.operands else Kind.FLEXIBLE
    if any(is_float(a.aval) and dtype_of(a).itemsize < 4 for a in self.equation.invars):
      kind = Kind.PINNED
    return self.all_held(Held(kind, FLOAT32))

  def computed(self) -> tuple[Held, ...]:
    """Returns how the results are held if the equation runs in float32 for all operands."""
    held = [self.body.met(a, None, self.equation) for a in self.operands] or [Held(Kind.FLEXIBLE, FLOAT32)]
    largest = max(map(size, self.operands), default=0)
    wide = Wide.OVERFLOWS if self.half == np.float16 and self._expands() else Wide.NO
    outs = []
    for v in self.equation.outvars:
      shrinks = size(v) < largest or small(held)
      out = computed_from(held, shrinks)
      outs.append(out._replace(wide=wide) if castable(v.aval) else initial(v.aval))
    return tuple(outs)

  def _expands(self) -> bool:
    """Returns whether a result may be far larger than the operands, and so outside float16's range."""
    if self.equation.primitive not in (jax.lax.div_p, jax.lax.rsqrt_p):
      return has(self.equation, Trait.EXPANDS)
    divisor = self.equation.invars[-1]
    if is_variable(divisor):  # a softmax divides by its sum, a norm by its deviation
      return self.body.how(divisor).kind is not Kind.STATISTIC
    return bool(abs(divisor.val) < 1)


def _keep(op: Operation, code: Code | None = None, listed: str = "") -> Node:
  """Returns a decision that leaves an equation in the dtypes of the program."""
  return op.decided(Mode.KEEP, code, op.kept(), listed)


def _full(op: Operation, code: Code | None = None, listed: str = "") -> Node:
  """Returns a decision that runs an equation in float32."""
  return op.decided(Mode.FULL, code, op.computed(), listed)


def _of_region(op: Operation) -> Node | None:
  """Decides about what is inside a `half_precision` region, and about the casts at its edges."""
  if not op.in_region:
    return None
  if op.at_edge and op.half is not None:
    source, result = op.equation.invars[0], op.equation.outvars[0]
    if castable(source.aval) and dtype_of(result) == op.half:
      fits = op.half != np.float16 or (is_variable(source) and source in op.body.widened)
      outs = op.all_in_half(Kind.FIXED)
      return op.decided(Mode.HALF if fits else Mode.EDGE, Code.ENTERS_REGION, outs, "opaque")
    if castable(result.aval) and dtype_of(source) == op.half:
      return op.decided(Mode.EACH, Code.LEAVES_REGION, op.all_in_half(Kind.HALF), "opaque")
  return _keep(op, Code.REGION, "opaque")


def _of_call(op: Operation) -> Node | None:
  """Decides about a call: it is entered, follows its operands as relu does, or runs in float32 as one."""
  if op.listed != "call":
    return None
  equation, body, kind = op.equation, op.body, call_kind(op.equation)
  is_entered = kind not in (None, CallKind.UNIT)
  lists = {body.rules.list_of(primitive, op.half) for primitive in body.rules.inside(equation)}
  multiplies = "allow" in lists or any(has_region(open_jaxpr(b)) for b in bodies_of(equation))
  if not op.operands and not multiplies:
    return _keep(op, Code.NO_PRODUCT)
  denied, is_loop = "deny" in lists, kind in LOOPS
  reads_half = any(op.met(a).kind is Kind.HALF for a in op.operands)
  if is_entered and (multiplies or (reads_half and (is_loop or (kind is CallKind.JIT and not denied)))):
    call = body.call(equation, op.path, op.half, [op.met(a) for a in equation.invars])
    return op.decided(Mode.ENTER, Code.ENTERED, call.outs, call=call)
  if is_entered and reads_half and op.half is not None and not (is_loop or denied):
    return op.decided(Mode.HALF, Code.HALF, op.all_in_half(Kind.HALF), "infer")
  outs = op.computed()
  if any(body.how(a, op.half).wide is Wide.SATURATES for a in op.operands):
    outs = tuple(h._replace(wide=max(h.wide, Wide.SATURATES)) for h in outs)  # `where` of a mask
  code, listed = (Code.CALL_DENIED, "deny") if denied else (Code.CALL_AS_ONE, "infer")
  return op.decided(Mode.FULL, code, outs, listed, operation_name(equation))


def _of_cast(op: Operation) -> Node | None:
  """Decides about a cast of the program."""
  if not op.is_cast:
    return None
  source, result = op.equation.invars[0], op.equation.outvars[0]
  if castable(source.aval) and castable(result.aval):  # for a weak type or a sharding
    return op.decided(Mode.EACH, Code.SAME_DTYPE, (op.body.how(source, op.half),), "infer")
  if not castable(result.aval):
    return op.decided(Mode.CAST, Code.OWN_CAST, (Held(Kind.FIXED, dtype_of(result)),), "infer")
  if OUTPUT in op.path.split("/"):
    code, held = Code.AUTOCAST_ENDS, Held(Kind.ISLAND, FLOAT32)
  elif is_float(source.aval):
    code, held = (
      Code.OWN_WIDENING,
      Held(Kind.PINNED if dtype_of(source).itemsize < 4 else Kind.ISLAND, FLOAT32),
    )
  else:
    # Counts and token numbers have more digits than float16.
    fits = op.half != np.float16 or dtype_of(source).itemsize == 1
    code, held = Code.FROM_INTEGERS, Held(Kind.FLEXIBLE, FLOAT32, Wide.NO if fits else Wide.OVERFLOWS)
  return op.decided(Mode.CAST, code, (held,), "infer")


def _of_other_dtypes(op: Operation) -> Node | None:
  """Decides about what the user chose a dtype for, what is opaque, and what has no float32 operand."""
  equation, half, results = op.equation, op.half, op.equation.outvars
  multiplies = op.listed == "allow" and half is not None
  given = values_read(equation)
  # Of a product that returns half precision only the operands' dtypes matter.
  asked = given if multiplies and all(dtype_of(v) == half for v in results) else [*given, *results]
  others = [a for a in equation.invars if not castable(a.aval)]
  # A product of a float32 value and one in half precision by the user's choice is as any other.
  is_mixed = multiplies and len(op.operands) == 1 and all(is_half(a.aval) for a in others)
  if any(of_its_own(a.aval) for a in asked) and not (is_mixed and all(castable(v.aval) for v in results)):
    if multiplies and all(dtype_of(a) == half for a in asked) and not states_precision(equation):
      return _quantised(op, Mode.KEEP, op.kept(), Code.OWN_DTYPE)
    return _keep(op, Code.OWN_DTYPE)
  if op.listed == "opaque":
    return _keep(op)
  return None if op.operands else _keep(op, Code.NO_FLOAT32)


def _of_product(op: Operation) -> Node | None:
  """Decides about what is on the list `allow`: a product in half precision, or why it keeps float32."""
  if op.listed != "allow":
    return None
  program, rules = op.body.program, op.body.rules
  exact = program.readers.float32.get(op.place)
  if exact in (Code.SUM_OF_PRODUCTS, Code.OUTER_PRODUCT):
    return _full(op, exact, "deny")
  if op.half is None:
    return _full(op, op.body.solver or Code.MODULE)
  if op.place in program.exact and exact is not Code.STATES_PRECISION:
    exact = Code.OF_EXACT
  if exact is not None:
    return _full(op, exact)
  wide = rules.wide_gradients and "preferred_element_type" in op.equation.params
  of_weight = wide and op.body.leaves_backward(op.equation)
  why = None if of_weight else op.why_float32_result
  outs = op.all_in_half(Kind.HALF)
  if of_weight or why:
    outs = op.all_held(Held(Kind.PINNED if of_weight else Kind.ISLAND, FLOAT32))
  return _quantised(op, Mode.HALF, outs, why)


def _quantised(op: Operation, mode: Mode, outs: tuple[Held, ...], code: Code | None) -> Node:
  """Returns the decision about a product in half precision, which may be an FP8 product."""
  recipe = op.body.rules.overrides.recipe_at(op.path)
  if recipe is None:
    return op.decided(mode, code, outs)
  program = op.body.program
  role = program.roles.get(op.place) if op.facts.layers is not None else None
  found = _fp8_products.decide(op.equation, op.path, recipe, role, program.sites)
  return op.decided(mode, outs=outs, **found)


def _of_denied(op: Operation) -> Node | None:
  """Decides about what is on the list `deny`; what only puts values in order changes none of them."""
  if op.listed != "deny":
    return None
  if has(op.equation, Trait.ORDERS):
    met = [op.body.met(a, None, op.equation) for a in op.operands]
    return op.decided(Mode.FULL, None, op.all_held(computed_from(met)))
  return _full(op, None if op.half is not None else op.body.solver or Code.MODULE)


def _of_follower(op: Operation) -> Node | None:
  """Decides about anything else, by the kinds of its operands."""
  equation, body = op.equation, op.body
  if has(equation, Trait.EACH) and len(equation.invars) == len(equation.outvars):
    return op.decided(Mode.EACH, Code.EACH_ALONE, tuple(body.how(a, op.half) for a in equation.invars))
  results = [v for v in equation.outvars if castable(v.aval)]
  if not results:  # a comparison is exact whatever the operands
    return op.decided(Mode.FULL, Code.NOT_FLOATING, op.all_held(Held(Kind.FIXED, FLOAT32)))
  is_sum = body.rules.wide_gradients and equation.primitive is primitives.add_jaxvals_p
  if is_sum and body.leaves_backward(equation):
    return op.decided(Mode.FULL, Code.GRADIENT_SUM, op.all_held(Held(Kind.PINNED, FLOAT32)))
  met = [op.met(a) for a in op.operands]
  if op.meets_data:
    wide = max(h.wide for h in met)
    return op.decided(Mode.FULL, Code.MEETS_DATA, op.all_held(Held(Kind.ISLAND, FLOAT32, wide)))
  if op.half is None:
    met = [h._replace(kind=Kind.ISLAND, dtype=FLOAT32) if h.kind is Kind.HALF else h for h in met]
  out = _followed(op, met, max(map(size, results)))
  if out.kind is Kind.HALF and all(in_order_alone(op.facts.reads(v)) for v in results):
    return op.decided(Mode.FULL, Code.ORDER_ALONE, op.all_held(Held(Kind.ISLAND, FLOAT32)))
  if out.kind is Kind.HALF:
    return op.decided(Mode.HALF, Code.HALF, op.all_held(out))
  kind = strongest([out, *(h for h in met if h.kind is not Kind.HALF)])
  return op.decided(Mode.FULL, Code.WIDE if out.wide else Code[kind.name], op.all_held(out))


def _followed(op: Operation, met: Sequence[Held], largest: int) -> Held:
  """Returns how results of a size are held that follow the operands, as they met."""
  equation, sources, pairs = op.equation, op.facts.sources, list(zip(op.operands, met, strict=True))
  statistics = max((size(a) for a, h in pairs if h.kind is Kind.STATISTIC), default=0)
  kind = strongest(met)
  is_large = kind is Kind.STATISTIC and not (small(met) and largest <= statistics)
  if is_large or (kind is Kind.HALF and any(h.wide for h in met)):
    kind = Kind.ISLAND
  out = joined(met, kind, op.half)
  if kind in (Kind.PINNED, Kind.RUNNING):
    out = out._replace(wide=Wide.NO)
  if kind is Kind.HALF and has(equation, Trait.SCALES) and any(h.kind is Kind.ISLAND for h in met):
    out = Held(Kind.ISLAND, FLOAT32)  # the half value may bring its result back into half precision's range
  masks = [a for a, h in pairs if h.wide is Wide.SATURATES]
  if out.wide and masks:
    # A mask of integers times -1e9 is a mask; a value times 1e9, or plus 1e9, is a value.
    values = any(not h.wide and (sources is None or sources[a].real) for a, h in pairs)
    number = all(size(a) == 1 for a in masks) and equation.primitive is not jax.lax.select_n_p
    if has(equation, Trait.SCALES) or number:
      out = out._replace(wide=Wide.OVERFLOWS if values else Wide.SATURATES)
  return out


_RULES = (_of_region, _of_call, _of_cast, _of_other_dtypes, _of_product, _of_denied, _of_follower)
