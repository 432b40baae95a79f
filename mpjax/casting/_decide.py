"""The plan of a program: the dtype that each equation runs in, the dtype each value is held in, and why.

Planning reads a jaxpr and changes nothing; `_emit.py` carries a plan out and `_explain.py` prints one.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax import _compat
from mpjax.casting import _fp8_products, _higher_order
from mpjax.casting._casting_rules import Rules, live
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, initial, is_float, meet, size
from mpjax.casting._overrides import OUTPUT, join
from mpjax.casting._product_roles import Layers
from mpjax.casting._questions import contracts_all, gives, of_its_own, pinned_precision
from mpjax.jaxpr import UNKNOWN, CallKind, Trait, call_kind, facts, has

NOT_FP8 = "not FP8: "  # how the reason of such a product begins


class Mode(enum.Enum):
  """How an equation is carried out."""

  HALF = "half"  # in the compute dtype
  FULL = "full"  # in float32
  KEEP = "keep"  # in the dtypes of the user's program
  EACH = "each"  # every operand as it is held
  CAST = "cast"  # the user's own cast
  ENTER = "enter"  # its body is planned


@dataclasses.dataclass
class Node:
  """One equation with its decision."""

  equation: Any
  path: str
  listed: str
  mode: Mode
  half: Any
  why: str
  outs: list[Held]
  call: Any = None
  fp8: Any = None
  site: str | None = None
  watched: dict[int, int] = dataclasses.field(default_factory=dict)  # result to probe, by `_probes.py`

  def has_product(self) -> bool:
    """Whether a matrix product is in its body, at any depth."""
    nodes = (node for plan in (self.call.plans if self.call else ()) for node in plan.all_nodes())
    return any(node.listed == "allow" for node in nodes)


class Plan:
  """A jaxpr with a decision on each of its equations.

  Attributes:
    jaxpr: the open jaxpr.
    inputs: its `constvars` and `invars`.
    nodes: the decisions, for those equations whose results are used.
    held: how each variable is held.
    outs: how each output is held.
  """

  def __init__(
    self,
    jaxpr: Any,
    held: Sequence[Held],
    rules: Rules,
    prefix: str = "",
    wanted: Sequence[Any] = (),
    full_outputs: bool = False,
    tangents: int = 0,
    layers: Layers | None = None,
  ):
    self.jaxpr = _compat.open_jaxpr(jaxpr)
    self.inputs = [*self.jaxpr.constvars, *self.jaxpr.invars]
    self.rules = rules
    self.prefix = prefix
    self.layers = layers
    self.held: dict[Any, Held] = dict(zip(self.inputs, held, strict=True))
    self._feeding = rules.feeding(jaxpr)
    self._full_outputs = full_outputs
    self._depth: dict[Any, int] = {}
    self._linear = set(self.inputs[len(self.inputs) - tangents :])
    self._outputs = {v for v in self.jaxpr.outvars if _compat.is_variable(v)}
    self.nodes = [self._decide(equation) for equation in live(self.jaxpr)]
    self._pull_in()
    self.outs = [self._output(i, atom, wanted) for i, atom in enumerate(self.jaxpr.outvars)]

  def all_nodes(self) -> Iterator[Node]:
    """The decisions, those in bodies too."""
    for node in self.nodes:
      yield node
      for plan in node.call.plans if node.call else ():
        yield from plan.all_nodes()

  def how(self, atom: Any, half: Any = None) -> Held:
    """How a variable or literal is held."""
    return self.held[atom] if _compat.is_variable(atom) else initial(atom.aval, atom.val, half)

  def feeds_product(self, atom: Any) -> bool:
    """Whether a matrix product reads this variable."""
    return _compat.is_variable(atom) and atom in self._feeding

  def met(self, atom: Any, half: Any, equation: Any) -> Held:
    """How a variable meets others in an equation.

    An island's result that is rounded for a product anyway is half to all. A gradient that leaves the
    backward pass is float32, as it is where parameters are cast by hand: an optimiser's sums would stall.
    """
    held = self.how(atom, half)
    depth = self._depth.get(atom, 0) if _compat.is_variable(atom) else 0
    if held.kind in (Kind.HALF, Kind.ISLAND) and depth > _compat.backward_depth(equation):
      return Held(Kind.PINNED, FLOAT32)
    if held.kind is Kind.ISLAND and half is not None and not held.wide and self.feeds_product(atom):
      return Held(Kind.HALF, half)
    return held

  def _output(self, i: int, atom: Any, wanted: Sequence[Any]) -> Held:
    held = self.how(atom)
    narrow = wanted[i] if i < len(wanted) else None
    computed = held.kind is Kind.ISLAND or (held.kind is Kind.FLEXIBLE and atom not in self.inputs)
    return Held(Kind.HALF, narrow) if narrow is not None and computed and not held.wide else held

  def _decide(self, equation: Any) -> Node:
    path = join(self.prefix, _compat.module_path(equation))
    half = self.rules.overrides.half_at(path)
    kind = self.rules.list_of(equation.primitive.name, half)
    if kind == "call":
      node = self._decide_call(equation, path, half)
    elif equation.primitive is jax.lax.convert_element_type_p:
      node = self._decide_cast(equation, path, half)
    else:
      node = self._decide_plain(equation, path, half, kind)
    if any(_compat.is_variable(a) and a in self._linear for a in equation.invars):
      self._linear.update(equation.outvars)  # to clip what is wide would not be linear
      node.outs = [held._replace(wide=False) for held in node.outs]
    self.held.update(zip(equation.outvars, node.outs, strict=True))
    self._depth.update(zip(equation.outvars, self._depths(node), strict=True))
    return node

  def _depths(self, node: Node) -> list[int]:
    """How deep in backward passes each result of an equation was made, in its body too."""
    depths = [_compat.backward_depth(node.equation)] * len(node.outs)
    for plan in node.call.plans if node.call else ():
      if len(plan.jaxpr.outvars) == len(depths):
        inner = [plan._depth.get(v, 0) if _compat.is_variable(v) else 0 for v in plan.jaxpr.outvars]
        depths = list(map(max, depths, inner))
    return depths

  def _decide_plain(self, equation: Any, path: str, half: Any, kind: str) -> Node:
    node = lambda mode, why, outs, name=kind: Node(equation, path, name, mode, half, why, outs)
    operands = [a for a in equation.invars if castable(a.aval)]
    results = [v for v in equation.outvars if castable(v.aval)]
    # A product that gives half precision from float32 asks for no more than autocast does.
    asked = (
      equation.invars if kind == "allow" and gives(equation, half) else [*equation.invars, *equation.outvars]
    )
    if any(of_its_own(a.aval) for a in asked):
      kept = node(Mode.KEEP, "it has operands in a dtype of the user's own", self._kept(equation))
      by_hand = kind == "allow" and half is not None and all(a.aval.dtype == half for a in asked)
      return self._quantised(kept) if by_hand and not pinned_precision(equation) else kept
    if kind == "opaque" or not operands:
      why = _reason(equation, UNKNOWN.reason) if kind == "opaque" else "nothing in it is half precision"
      return node(Mode.KEEP, why, self._kept(equation))
    if kind == "allow" and contracts_all(equation):
      why = "a sum of products, on no matrix unit: it overflows like a sum"
      return node(Mode.FULL, why, self._computed(equation), "deny")
    if kind == "allow":
      if half is None:
        return node(Mode.FULL, "its module's policy computes in float32", self._computed(equation))
      if pinned_precision(equation):
        return node(Mode.FULL, "the user asks for this precision", self._computed(equation))
      return self._quantised(
        node(Mode.HALF, _reason(equation, ""), self._outs(equation, Held(Kind.HALF, half)))
      )
    if kind == "deny":
      return node(Mode.FULL, _reason(equation, "it is denied half precision"), self._computed(equation))
    if has(equation, Trait.EACH) and len(equation.invars) == len(equation.outvars):
      return node(Mode.EACH, "each operand as it comes", [self.how(a) for a in equation.invars])
    met = [self.met(a, half, equation) for a in operands]
    if not results:  # comparisons, argmax: exact in float32 whatever the operands
      return node(Mode.FULL, "its result is no floating number", self._outs(equation, Held(Kind.FIXED, None)))
    if half is None:
      met = [h._replace(kind=Kind.ISLAND, dtype=FLOAT32) if h.kind is Kind.HALF else h for h in met]
    largest = max(
      (size(a) for a, h in zip(operands, met, strict=True) if h.kind is Kind.STATISTIC), default=0
    )
    out = meet(met, max(map(size, results)) <= largest)
    if out.kind is Kind.HALF and has(equation, Trait.SCALES):
      # The half value may be what brings an island's result back into half precision's range.
      out = Held(Kind.ISLAND, FLOAT32) if any(h.kind is Kind.ISLAND for h in met) else out
    if out.kind is Kind.HALF:
      return node(
        Mode.HALF, "its operands are half precision", self._outs(equation, out._replace(dtype=half))
      )
    return node(Mode.FULL, _follows(out, met), self._outs(equation, out))

  def _quantised(self, node: Node) -> Node:
    """A product in half precision as an FP8 one, if it may be."""
    recipe = self.rules.overrides.recipe_at(node.path)
    if recipe is None:
      return node
    self.rules.products.add(node.path)
    product = self.layers.products.get(id(node.equation)) if self.layers else None
    why_not = _fp8_products.barred(node.equation, node.path, recipe, product)
    if why_not is not None or product is None:
      node.why = f"{NOT_FP8}{why_not}"
      return node
    # Nothing remembers the gradients of a backward pass inside the program: they have their own scale.
    if recipe.recipe == "delayed" and not any(product.gradients):
      side = int(not product.active[1])  # which operand the weight is
      weight = id(node.equation) if all(product.active) else (product.roots[side], side)
      # Also where the sizes are unfit: those of another batch may not be.
      node.site = self.rules.sites.name(node.path, weight, recipe)
    decided = _fp8_products.decide(node.equation, recipe, product)
    if isinstance(decided, str):
      node.why = f"{NOT_FP8}{decided}"
      return node
    decided.site = node.site
    node.fp8 = decided
    node.why = f"an FP8 product ({recipe.recipe} scaling)"
    return node

  def _decide_cast(self, equation: Any, path: str, half: Any) -> Node:
    (source,), (result,) = equation.invars, equation.outvars
    node = lambda mode, why, out: Node(equation, path, "infer", mode, half, why, [out])
    if castable(source.aval) and castable(result.aval):  # a change of weak type or sharding
      held = self.how(source, half)
      return node(Mode.EACH, "it changes no dtype", held)
    if not castable(result.aval):
      return node(Mode.CAST, "the user's own cast", Held(Kind.FIXED, result.aval.dtype))
    if OUTPUT in path.split("/"):
      return node(Mode.CAST, "the end of an inner autocast", Held(Kind.ISLAND, FLOAT32))
    if is_float(source.aval):
      pinned = source.aval.dtype.itemsize < 4
      return node(Mode.CAST, "the user's own cast", Held(Kind.PINNED if pinned else Kind.ISLAND, FLOAT32))
    # Counts and token numbers have more digits than float16 has.
    wide = half is not None and half == np.float16 and source.aval.dtype.itemsize > 1
    return node(Mode.CAST, "from integers", Held(Kind.FLEXIBLE, FLOAT32, wide))

  def _decide_call(self, equation: Any, path: str, half: Any) -> Node:
    node = lambda kind, mode, why, outs, call=None: Node(equation, path, kind, mode, half, why, outs, call)
    inside = self.rules.inside(equation, half)
    operands = [a for a in equation.invars if castable(a.aval)]
    product = "allow" in inside
    if not product and not operands:
      return node("call", Mode.KEEP, "no matrix product inside", self._kept(equation))
    whole = half is None and not self.rules.enter_all and self.rules.overrides.uniform_below(path)
    met = [self.met(a, half, equation) for a in operands]
    halves = any(h.kind is Kind.HALF for h in met)
    called = call_kind(equation)
    denied = "deny" in inside
    loops = called in _higher_order.LOOPS
    enters = product or (halves and (loops or (called is CallKind.JIT and not denied)))
    if whole or not enters or called not in _higher_order.RULES:
      if called in _higher_order.RULES and not denied and not whole and halves and not loops:
        # relu and its like, with the rule they came with: exact in float32, so their result may be rounded.
        return node(
          "infer", Mode.HALF, "its operands are half precision", self._outs(equation, Held(Kind.HALF, half))
        )
      why = "its module's policy computes in float32" if whole else f"{_named(equation)} runs as one"
      return node("deny" if denied else "infer", Mode.FULL, why, self._computed(equation))
    wanted = [half if self.feeds_product(v) else None for v in equation.outvars]

    def plan_body(
      jaxpr: Any, held: Sequence[Held], wanted: Sequence[Any] = (), islands: bool = True, tangents: int = 0
    ) -> Plan:
      rules = self.rules
      if rules.islands and not islands:
        rules = dataclasses.replace(rules, islands=False)
      # FP8 products are looked for in plain calls alone: a derivative rule is a program of its own.
      inner = self.layers.inner.get(id(equation), {}) if self.layers and called and called.is_plain else {}
      layers = inner.get(id(_compat.open_jaxpr(jaxpr)))
      return Plan(jaxpr, held, rules, path, wanted, tangents=tangents, layers=layers)

    call = _higher_order.RULES[called].plan(
      equation, [self.met(a, half, equation) for a in equation.invars], wanted, plan_body
    )
    return node("call", Mode.ENTER, "its body is entered", call.outs, call)

  def _kept(self, equation: Any) -> list[Held]:
    """Results of an equation that keeps its dtypes."""
    operands = [a.aval for a in equation.invars]
    kind = Kind.ISLAND if any(map(castable, operands)) else Kind.FLEXIBLE
    if any(is_float(a) and not castable(a) and a.dtype.itemsize < 4 for a in operands):
      kind = Kind.PINNED
    return self._outs(equation, Held(kind, FLOAT32))

  def _computed(self, equation: Any) -> list[Held]:
    """Results of an equation that runs in float32 whatever its operands."""
    held = [(self.met(a, None, equation), size(a)) for a in equation.invars if castable(a.aval)]
    kinds = {h.kind for h, _ in held}
    half = self.rules.overrides.half_at(join(self.prefix, _compat.module_path(equation)))
    wide = half == np.float16 and self._expands(equation)
    outs = []
    for v in equation.outvars:
      kind = Kind.PINNED if Kind.PINNED in kinds else Kind.ISLAND
      if kinds <= {Kind.FLEXIBLE}:
        kind = Kind.FLEXIBLE
      elif size(v) < max(n for _, n in held) or kinds <= {Kind.STATISTIC, Kind.FLEXIBLE}:
        kind = Kind.STATISTIC
      outs.append(
        Held(kind, FLOAT32, wide) if castable(v.aval) else Held(Kind.FIXED, getattr(v.aval, "dtype", None))
      )
    return outs

  def _expands(self, equation: Any) -> bool:
    """Whether a result may be far larger than the operands, and so outside float16's range."""
    if equation.primitive not in (jax.lax.div_p, jax.lax.rsqrt_p):
      return has(equation, Trait.EXPANDS)
    divisor = equation.invars[-1]
    if _compat.is_variable(divisor):  # a softmax divides by its sum, a norm by its deviation
      return self.how(divisor).kind is not Kind.STATISTIC
    return bool(abs(divisor.val) < 1)

  def _outs(self, equation: Any, held: Held) -> list[Held]:
    fixed = lambda v: Held(Kind.FIXED, getattr(v.aval, "dtype", None))
    return [held if castable(v.aval) else fixed(v) for v in equation.outvars]

  def _pull_in(self) -> None:
    """Moves into float32 what only float32 reads: the scale and the mask before a softmax, say.

    The island then takes what comes before it. Not so for a sum of two values of full size: the sum is the
    smaller thing to save.
    """
    users: dict[Any, list[Node]] = {}
    self._makers = {v: node for node in self.nodes for v in node.equation.outvars}
    for node in reversed(self.nodes):
      readers = [users.get(v, []) for v in node.equation.outvars]
      for atom in node.equation.invars:
        if _compat.is_variable(atom):
          users.setdefault(atom, []).append(node)
      if node.mode not in (Mode.HALF, Mode.ENTER) or node.listed not in ("infer", "call"):
        continue
      if node.mode is Mode.ENTER and (call_kind(node.equation) is not CallKind.JIT or node.has_product()):
        continue
      results = [v for v in node.equation.outvars if v in self._outputs]
      if (results and not self._full_outputs) or not (results or any(readers)):
        continue
      if not all(r.mode is Mode.FULL and r.listed in ("deny", "infer") for rs in readers for r in rs):
        continue
      if has(node.equation, Trait.MOVES) or self._sums(node) or self._shrinks(node):
        continue
      node.mode, node.listed, node.why = Mode.FULL, "infer", "only float32 reads it"
      node.outs = self._outs(node.equation, Held(Kind.ISLAND, FLOAT32))
      self.held.update(zip(node.equation.outvars, node.outs, strict=True))

  def _shrinks(self, node: Node) -> bool:
    """Whether less comes out than goes in, so that its result is the smaller thing to save."""
    halves = [a for a in node.equation.invars if self.how(a).kind is Kind.HALF]
    return max(map(size, halves), default=0) > max(map(size, node.equation.outvars))

  def _sums(self, node: Node) -> bool:
    if not has(node.equation, Trait.CHOICE):
      return False
    halves = [a for a in node.equation.invars if _compat.is_variable(a) and self.how(a).kind is Kind.HALF]
    largest = max(map(size, node.equation.invars))
    return len({self._source(a) for a in halves if size(a) == largest}) > 1

  def _source(self, variable: Any) -> Any:
    """The half value that this one is made of, element by element; itself, if it is made of several."""
    node = self._makers.get(variable)
    if node is None or node.mode is not Mode.HALF or node.listed != "infer" or node.call is not None:
      return variable
    if has(node.equation, Trait.MOVES):
      return variable
    before = {a for a in node.equation.invars if _compat.is_variable(a) and self.how(a).kind is Kind.HALF}
    sources = {self._source(a) for a in before}
    return sources.pop() if len(sources) == 1 else variable


def _named(equation: Any) -> str:
  return _compat.operation(equation)


def _reason(equation: Any, otherwise: str) -> str:
  row = facts(equation)
  return otherwise if row is UNKNOWN else row.reason


def _follows(out: Held, met: list[Held]) -> str:
  if out.kind is Kind.PINNED:
    return "an operand was cast to float32 by the user, or is a gradient"
  if out.wide:
    return "an operand has values that half precision has not"
  if any(h.kind is Kind.STATISTIC for h in met):
    return "an operand is a reduction's result"
  return "it is part of an island" if out.kind is Kind.ISLAND else "its operands come before any product"
