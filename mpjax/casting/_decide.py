"""Decides about a program: the dtype that each equation runs in, the dtype each value is held in, and why.

`decide` reads a jaxpr and returns a frozen `CastPlan`. Only custom derivative and batching rules
are decided after it: they are no programs before JAX differentiates or batches (`Call.decide_rule`).
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Atom, Jaxpr, JaxprEqn, Var
from mpjax.casting import _fp8_products
from mpjax.casting._cast_plan import Call, CastPlan, Mode, Node
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._elementwise_losses import with_stored_gradients
from mpjax.casting._higher_order import LOOPS, RULES
from mpjax.casting._islands import in_units, pull_in
from mpjax.casting._kinds import (
  FLOAT32,
  Condition,
  Held,
  Kind,
  Where,
  castable,
  followed,
  initial,
  is_float,
  meet,
  of_its_own,
  rule_of,
  size,
  small,
)
from mpjax.casting._product_roles import ProductRoles, is_layer, states_precision
from mpjax.casting._reads import with_reads
from mpjax.casting._weight_gradients import WeightGradients
from mpjax.jaxpr import (
  OUTPUT,
  UNKNOWN,
  CallKind,
  Trait,
  at_region_edge,
  backward_depth,
  call_kind,
  dtype_of,
  facts,
  has,
  in_region,
  inside,
  is_variable,
  live,
  marked_path,
  open_jaxpr,
  operation_name,
  values_read,
  variables_of,
)

IN_REGION = "it is in a half_precision region"
_WHOLE = "its module's policy computes in float32"


def decide(
  jaxpr: AnyJaxpr,
  held: Sequence[Held],
  rules: CastingRules,
  *,
  path: str = "",
  wanted: Sequence[np.dtype | None] = (),
  full_outputs: bool = False,
  tangents: int = 0,
  roles: ProductRoles | None = None,
  gradients: WeightGradients | None = None,
  sites: _fp8_products.Sites | None = None,
) -> CastPlan:
  """Returns what autocast does to a program.

  Args:
    jaxpr: the program.
    held: how its constants and inputs are held.
    rules: what decides.
    path: the module path that it is in.
    wanted: for each output, the half dtype that its only readers want, or `None`.
    full_outputs: whether what it returns is read in float32.
    tangents: how many of its last inputs are tangents, in which it has to stay linear.
    roles: of its products; `None` where they are not known.
    gradients: of parameters, in it; `None` for a whole program: all that leaves its backward passes.
    sites: the names that products outside it have taken, if it is a body.
  """
  sites = sites or _fp8_products.Sites()
  gradients = gradients or WeightGradients(jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))
  body = _Body(open_jaxpr(jaxpr), held, rules, path, full_outputs, tangents, roles, gradients, sites)
  return body.plan(wanted)


class _Body:
  """One jaxpr while it is decided about."""

  def __init__(
    self,
    jaxpr: Jaxpr,
    held: Sequence[Held],
    rules: CastingRules,
    path: str,
    full_outputs: bool,
    tangents: int,
    roles: ProductRoles | None,
    gradients: WeightGradients,
    sites: _fp8_products.Sites,
  ):
    self.jaxpr = jaxpr
    self.inputs = (*jaxpr.constvars, *jaxpr.invars)
    self.rules = rules
    self.path = path
    self.full_outputs = full_outputs
    self.roles = roles
    self.gradients = gradients
    self.sites = sites
    self.held: dict[Var, Held] = dict(zip(self.inputs, held, strict=True))
    self._feeding = rules.feeding(jaxpr)
    self._depth: dict[Var, int] = {}
    self._linear = set(self.inputs[len(self.inputs) - tangents :])
    self._float16: set[Var] = set()  # that the user's program widens

  def plan(self, wanted: Sequence[np.dtype | None]) -> CastPlan:
    """Decides about every equation in order, then about islands, and freezes it all."""
    nodes = [self._decide(equation) for equation in live(self.jaxpr).equations]
    results = set(variables_of(self.jaxpr.outvars))
    nodes = pull_in(nodes, self.held, results, self.full_outputs)
    nodes = [with_reads(node, self.held, self.rules, self.roles) for node in nodes]
    nodes = with_stored_gradients(nodes, self.jaxpr, self.held, self.rules, self.roles)
    outs = tuple(self._output(i, atom, wanted) for i, atom in enumerate(self.jaxpr.outvars))
    return CastPlan(
      jaxpr=self.jaxpr,
      path=self.path,
      inputs=self.inputs,
      nodes=tuple(nodes),
      units=in_units(nodes, self.jaxpr, self.held, outs, self.rules, self.roles),
      held=types.MappingProxyType(dict(self.held)),
      outs=outs,
      depths=tuple(self._depth.get(v, 0) if is_variable(v) else 0 for v in self.jaxpr.outvars),
      has_product=any(node.multiplies for node in nodes),
    )

  def how(self, atom: Atom, half: np.dtype | None = None) -> Held:
    """Returns how a variable or literal is held."""
    return self.held[atom] if is_variable(atom) else initial(atom.aval, atom.val, half)

  def feeds_product(self, atom: Atom) -> bool:
    """Returns whether a matrix product reads this variable."""
    return is_variable(atom) and atom in self._feeding

  def met(self, atom: Atom, half: np.dtype | None, equation: JaxprEqn) -> Held:
    """Returns how a variable meets others in an equation.

    An island's result that is rounded for a product anyway is half to all. A gradient that leaves the
    backward pass is float32, as it is where parameters are cast by hand: an optimiser's sums would stall.
    """
    held = self.how(atom, half)
    depth = self._depth.get(atom, 0) if is_variable(atom) else 0
    if held.kind in (Kind.HALF, Kind.ISLAND) and depth > backward_depth(equation):
      return Held(Kind.PINNED, FLOAT32)
    if held.kind is Kind.ISLAND and half is not None and not held.wide and self.feeds_product(atom):
      return Held(Kind.HALF, half)
    return held

  def _output(self, i: int, atom: Atom, wanted: Sequence[np.dtype | None]) -> Held:
    held = self.how(atom)
    narrow = wanted[i] if i < len(wanted) else None
    computed = held.kind is Kind.ISLAND or (held.kind is Kind.FLEXIBLE and atom not in self.inputs)
    return Held(Kind.HALF, narrow) if narrow is not None and computed and not held.wide else held

  def _decide(self, equation: JaxprEqn) -> Node:
    path = inside(self.path, marked_path(equation))
    half = self.rules.overrides.half_at(path)
    listed = self.rules.list_of(equation.primitive, half)
    is_cast = equation.primitive is jax.lax.convert_element_type_p
    if in_region(path) and (is_cast or not at_region_edge(path)):  # else a sum of gradients
      node = self._decide_in_region(equation, path, half)
    elif listed == "call":
      node = self._decide_call(equation, path, half)
    elif is_cast:
      node = self._decide_cast(equation, path, half)
    else:
      node = self._decide_plain(equation, path, half, listed)
    linear = any(is_variable(a) and a in self._linear for a in equation.invars)
    if linear or (self.roles is not None and any(map(self.roles.is_gradient, equation.outvars))):
      # To clip what is wide would not be linear, and would hide the overflow of a gradient.
      self._linear.update(equation.outvars if linear else ())
      node = dataclasses.replace(node, outs=tuple(held._replace(wide=False) for held in node.outs))
    self.held.update(zip(equation.outvars, node.outs, strict=True))
    self._depth.update(zip(equation.outvars, node.depths(), strict=True))
    return node

  def _decide_plain(self, equation: JaxprEqn, path: str, half: np.dtype | None, listed: str) -> Node:
    def node(mode: Mode, why: str, outs: tuple[Held, ...], listed: str = listed) -> Node:
      return Node(equation, path, listed, mode, half, why, outs)

    operands = [a for a in equation.invars if castable(a.aval)]
    results = [v for v in equation.outvars if castable(v.aval)]
    # A product that gives half precision from float32 asks for no more than autocast does.
    gives_half = half is not None and all(dtype_of(v) == half for v in equation.outvars)
    given = values_read(equation)
    asked = given if listed == "allow" and gives_half else [*given, *equation.outvars]
    if any(of_its_own(a.aval) for a in asked):
      kept = node(Mode.KEEP, "it has operands in a dtype of the user's own", self._kept(equation))
      by_hand = listed == "allow" and half is not None and all(dtype_of(a) == half for a in asked)
      return self._quantised(kept) if by_hand and not states_precision(equation) else kept
    if listed == "opaque":
      return node(Mode.KEEP, _reason(equation, half, UNKNOWN.reason), self._kept(equation))
    if not operands:
      return node(Mode.KEEP, "nothing in it is half precision", self._kept(equation))
    if listed == "allow":
      return self._decide_product(equation, path, half)
    if listed == "deny":
      why = _reason(equation, half, "it is denied half precision") if half is not None else _WHOLE
      return node(Mode.FULL, why, self._computed(equation))
    if has(equation, Trait.EACH) and len(equation.invars) == len(equation.outvars):
      return node(Mode.EACH, "each operand as it comes", tuple(self.how(a) for a in equation.invars))
    if not results:  # comparisons, argmax: exact in float32 whatever the operands
      outs = _outs(equation, Held(Kind.FIXED, FLOAT32))
      return node(Mode.FULL, "its result is no floating number", outs)
    if self.rules.wide_gradients and self.gradients.has_sum(equation):
      return node(Mode.FULL, "it adds gradients of a parameter", _outs(equation, Held(Kind.PINNED, FLOAT32)))
    met = [self.met(a, half, equation) for a in operands]
    if half is None:
      met = [h._replace(kind=Kind.ISLAND, dtype=FLOAT32) if h.kind is Kind.HALF else h for h in met]
    out = followed(equation, operands, results, met, half)
    if out.kind is Kind.HALF:
      return node(Mode.HALF, "its operands are half precision", _outs(equation, out))
    strongest = rule_of({out.kind, *(h.kind for h in met if h.kind is not Kind.HALF)})
    why = "an operand has values that half precision has not" if out.wide else strongest.why
    return node(Mode.FULL, why, _outs(equation, out))

  def _decide_product(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Node:
    def full(why: str, listed: str = "allow") -> Node:
      return Node(equation, path, listed, Mode.FULL, half, why, self._computed(equation))

    if not is_layer(equation, self.rules):
      return full("a sum of products, on no matrix unit: it accumulates as one", "deny")
    if half is None:
      return full(_WHOLE)
    if states_precision(equation):
      return full("the user asks for this precision")
    wide = self.rules.wide_gradients and "preferred_element_type" in equation.params
    of_weight = wide and self.gradients.has_product(equation)
    outs = _outs(equation, Held(Kind.PINNED, FLOAT32) if of_weight else Held(Kind.HALF, half))
    return self._quantised(Node(equation, path, "allow", Mode.HALF, half, _reason(equation, half, ""), outs))

  def _quantised(self, node: Node) -> Node:
    """Returns a product in half precision as an FP8 one, if it may be."""
    recipe = self.rules.overrides.recipe_at(node.path)
    if recipe is None:
      return node
    role = self.roles.products.get(id(node.equation)) if self.roles else None
    decision = _fp8_products.decide(node.equation, node.path, recipe, role, self.sites)
    return dataclasses.replace(node, **decision._asdict())

  def _decide_cast(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Node:
    (source,), (result,) = equation.invars, equation.outvars

    def node(mode: Mode, why: str, out: Held) -> Node:
      return Node(equation, path, "infer", mode, half, why, (out,))

    if castable(source.aval) and castable(result.aval):  # a change of weak type or sharding
      return node(Mode.EACH, "it changes no dtype", self.how(source, half))
    if not castable(result.aval):
      return node(Mode.CAST, "the user's own cast", Held(Kind.FIXED, dtype_of(result)))
    if OUTPUT in path.split("/"):
      return node(Mode.CAST, "the end of an inner autocast", Held(Kind.ISLAND, FLOAT32))
    if is_float(source.aval):
      if dtype_of(source) == np.float16:
        self._float16.add(result)
      pinned = dtype_of(source).itemsize < 4
      return node(Mode.CAST, "the user's own cast", Held(Kind.PINNED if pinned else Kind.ISLAND, FLOAT32))
    # Counts and token numbers have more digits than float16 has.
    wide = half is not None and half == np.float16 and dtype_of(source).itemsize > 1
    return node(Mode.CAST, "from integers", Held(Kind.FLEXIBLE, FLOAT32, wide))

  def _decide_in_region(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Node:
    """Leaves what `half_precision` runs as it is; what enters and leaves it is half precision."""

    def node(mode: Mode, why: str, outs: tuple[Held, ...]) -> Node:
      return Node(equation, path, "opaque", mode, half, why, outs)

    if half is not None and at_region_edge(path):
      (source,), (result,) = equation.invars, equation.outvars
      if castable(source.aval) and dtype_of(result) == half:
        fits = half != np.float16 or (is_variable(source) and source in self._float16)
        mode = Mode.HALF if fits else Mode.EDGE
        return node(mode, "it enters a half_precision region", _outs(equation, Held(Kind.FIXED, half)))
      if castable(result.aval) and dtype_of(source) == half:
        return node(Mode.EACH, "it leaves a half_precision region", _outs(equation, Held(Kind.HALF, half)))
    return node(Mode.KEEP, IN_REGION, self._kept(equation))

  def _decide_call(self, equation: JaxprEqn, path: str, half: np.dtype | None) -> Node:
    def node(listed: str, mode: Mode, why: str, outs: tuple[Held, ...], call: Call | None = None) -> Node:
      return Node(equation, path, listed, mode, half, why, outs, call)

    lists = self.rules.inside(equation, half)
    operands = [a for a in equation.invars if castable(a.aval)]
    product, denied = "allow" in lists or self.rules.has_region(equation), "deny" in lists
    if not product and not operands:
      return node("call", Mode.KEEP, "no matrix product inside", self._kept(equation))
    whole = half is None and not self.rules.enter_all and self.rules.overrides.uniform_below(path)
    halves = any(self.met(a, half, equation).kind is Kind.HALF for a in operands)
    kind = call_kind(equation)
    rule, loop = RULES.get(kind), kind in LOOPS
    enters = product or (halves and (loop or (kind is CallKind.JIT and not denied)))
    if rule is not None and enters and not whole:
      wanted = [half if self.feeds_product(v) else None for v in equation.outvars]
      ins = [self.met(a, half, equation) for a in equation.invars]
      call = rule.decide(equation, ins, wanted, _Bodies(self, equation, path, half))
      return node("call", Mode.ENTER, "its body is entered", call.outs, call)
    if rule is not None and halves and half is not None and not (denied or whole or loop):
      # relu and its like, with the rule they came with: exact in float32, so their result may be rounded.
      outs = _outs(equation, Held(Kind.HALF, half))
      return node("infer", Mode.HALF, "its operands are half precision", outs)
    why = _WHOLE if whole else f"{operation_name(equation)} runs as one"
    return node("deny" if denied else "infer", Mode.FULL, why, self._computed(equation))

  def _kept(self, equation: JaxprEqn) -> tuple[Held, ...]:
    """Returns how the results of an equation are held that keeps its dtypes."""
    kind = Kind.ISLAND if any(castable(a.aval) for a in equation.invars) else Kind.FLEXIBLE
    if any(is_float(a.aval) and dtype_of(a).itemsize < 4 for a in equation.invars):
      kind = Kind.PINNED
    return _outs(equation, Held(kind, FLOAT32))

  def _computed(self, equation: JaxprEqn) -> tuple[Held, ...]:
    """Returns how the results of an equation are held that runs in float32 whatever its operands."""
    operands = [a for a in equation.invars if castable(a.aval)]
    held = [self.met(a, None, equation) for a in operands] or [Held(Kind.FLEXIBLE, FLOAT32)]
    largest = max(map(size, operands), default=0)
    half = self.rules.overrides.half_at(inside(self.path, marked_path(equation)))
    wide = half == np.float16 and self._expands(equation)
    outs = []
    for v in equation.outvars:
      shrinks = size(v) < largest or small(held)
      out = meet(held, Where.FULL, [Condition.SHRINKS] if shrinks else [])
      outs.append(out._replace(wide=wide) if castable(v.aval) else initial(v.aval))
    return tuple(outs)

  def _expands(self, equation: JaxprEqn) -> bool:
    """Returns whether a result may be far larger than the operands, and so outside float16's range."""
    if equation.primitive not in (jax.lax.div_p, jax.lax.rsqrt_p):
      return has(equation, Trait.EXPANDS)
    divisor = equation.invars[-1]
    if is_variable(divisor):  # a softmax divides by its sum, a norm by its deviation
      return self.how(divisor).kind is not Kind.STATISTIC
    return bool(abs(divisor.val) < 1)


@dataclasses.dataclass(frozen=True)
class _Bodies:
  """Decides about the bodies of one call (`_cast_plan.DecideBody`)."""

  outside: _Body
  equation: JaxprEqn
  path: str
  half: np.dtype | None

  def __call__(
    self,
    jaxpr: AnyJaxpr,
    held: Sequence[Held],
    wanted: Sequence[np.dtype | None] = (),
    *,
    islands: bool = True,
    tangents: int = 0,
    gradients: Sequence[bool] | None = None,
  ) -> CastPlan:
    rules, roles, sites = self.outside.rules, self.outside.roles, self.outside.sites
    if rules.islands and not islands:
      rules = dataclasses.replace(rules, islands=False)
    inner = None
    kind = call_kind(self.equation)
    if kind is CallKind.SCAN and self.equation.params["length"] > self.equation.params["unroll"]:
      rules = dataclasses.replace(rules, in_loop=True)
    if roles is not None and kind is not None and kind.is_plain:  # a derivative rule is a program of its own
      inner = roles.inner.get(id(self.equation), {}).get(id(open_jaxpr(jaxpr)))
    if gradients is None:
      flow = self.outside.gradients.inside(self.equation, jaxpr)
    else:
      flow = WeightGradients(jaxpr, gradients, depth=1)
    return decide(
      jaxpr,
      held,
      rules,
      path=self.path,
      wanted=wanted,
      tangents=tangents,
      roles=inner,
      gradients=flow,
      sites=sites,
    )

  def carry_setting(self, i: int) -> str | None:
    """Returns how the user wants the i-th carry of a loop held: `float32`, `half`, or `None`."""
    return self.outside.rules.overrides.loop_carry_at(inside(self.path, f"carry_{i}"))


def _outs(equation: JaxprEqn, held: Held) -> tuple[Held, ...]:
  return tuple(held if castable(v.aval) else initial(v.aval) for v in equation.outvars)


def _reason(equation: JaxprEqn, half: np.dtype | None, otherwise: str) -> str:
  """Returns why autocast decides so about an equation where `half` is the compute dtype."""
  row = facts(equation)
  return otherwise if row is UNKNOWN else row.reason_in(half)
