"""What is known of a program before the decisions: readers of its values, and products that keep float32.

A value is rounded to half precision for those readers that compute in it, and for no others. So a
product whose result nothing reads in half precision has a float32 result, and one that only selects and adds
for such readers has float32 operands.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import jax

from mpjax._compat import newer
from mpjax._types import AnyJaxpr, Atom, JaxprEqn
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._fp8_products import ProductRole, Sites, product_roles
from mpjax.casting._kinds import castable, is_float, size
from mpjax.casting._reasons import Code
from mpjax.casting._sources import (
  Product,
  Root,
  Source,
  Sources,
  in_backward,
  is_filter,
  is_layer,
  is_outer,
  is_product,
  loop_facts,
  products,
  sources_of,
  states_precision,
  why_in_solver,
)
from mpjax.jaxpr import (
  Backward,
  CallKind,
  Calls,
  Facts,
  Trait,
  at_region_edge,
  backward_depth,
  call_kind,
  dtype_of,
  has,
  inside,
  marked_path,
  open_jaxpr,
  shape_of,
)

F = TypeVar("F")

_PASSES = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.MARKS_AXES | Trait.ADDS
_MOVES = frozenset({jax.lax.dynamic_update_slice_p, jax.lax.select_n_p, newer("stack_p"), newer("unstack_p")})
_SCALES = frozenset({jax.lax.mul_p, jax.lax.div_p})
NOWHERE = -1


class Reads(enum.IntFlag):
  """The readers of a value, or of an elementwise function of it; and what follows it in the forward pass."""

  if not TYPE_CHECKING:  # as `Trait`
    __and__, __or__, __invert__ = int.__and__, int.__or__, int.__invert__

  NONE = 0
  VIEW = enum.auto()  # a half-precision product, directly or through views
  LATER = enum.auto()  # such a product in the backward pass, for a value of the forward pass
  HALF = enum.auto()  # an operation in half precision
  FLOAT32 = enum.auto()  # an operation in float32, or the caller
  ALGEBRA = enum.auto()  # linear algebra, directly or through float32 operations
  ORDER = enum.auto()  # a sort, an arg-max, a comparison or a cast to integers
  NORM = enum.auto()  # a reduction that only layers read, as in a norm
  # Up to the next product. Nothing is assumed to follow a scalar output; after an array it is unknown.
  PRODUCT = enum.auto()
  SCALAR = enum.auto()  # a scalar that the program returns
  ARRAY = enum.auto()


ENDS = Reads.PRODUCT | Reads.SCALAR | Reads.ARRAY
READERS = ~ENDS

_IN_HALF = Reads.VIEW | Reads.HALF
_VIEWS = Reads.VIEW | Reads.LATER


def only_float32(reads: Reads) -> bool:
  """Returns whether the forward pass reads a value, and not in half precision."""
  return bool(reads & ~Reads.LATER) and not reads & _IN_HALF


def in_half_alone(reads: Reads) -> bool:
  """Returns whether a product reads a value, and every reader takes it in half precision."""
  return bool(reads & _VIEWS) and not reads & ~(_IN_HALF | Reads.LATER)


def in_order_alone(reads: Reads) -> bool:
  """Returns whether only a value's place among others, or an integer, is computed from it."""
  return reads & ~(Reads.LATER | Reads.NORM) == Reads.ORDER


class Readers(Backward[Reads]):
  """The readers of each value of a program.

  Args:
    rules: the rules.
    sources: by the calls around a body, the sources of its values, where they are known.

  Attributes:
    float32: for each product, by its place, why it keeps float32 operands; `None` if it need not.
  """

  nothing = Reads.NONE

  def __init__(self, rules: CastingRules, sources: Mapping[Calls, Facts[Source]]):
    self._rules = rules
    self._sources = sources
    self.float32: dict[Calls, Code | None] = {}

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not at_region_edge(marked_path(equation))

  def transfer(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> list[Reads]:
    known = self._sources.get(calls)
    operands = [known[a] for a in equation.invars] if known else []
    reads = self._reads(equation, functools.reduce(operator.or_, results or [Reads.NONE]), calls, operands)
    later, ends = reads, Reads.NONE
    if not in_backward(equation, calls):
      ends = self._ends(equation, results)
    elif reads & _IN_HALF:
      later = reads & ~_IN_HALF | (Reads.LATER if reads & Reads.VIEW else Reads.NONE)
    now, later = reads | ends, later | ends
    found = [now if fact.gradient else later for fact in operands] or [now] * len(equation.invars)
    return [r if castable(a.aval) else ends for a, r in zip(equation.invars, found, strict=True)]

  def choice(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> Reads:
    return functools.reduce(operator.or_, results, Reads.NONE) & ENDS

  def _ends(self, equation: JaxprEqn, results: list[Reads]) -> Reads:
    """Returns what follows the operands of an equation."""
    if is_product(equation, self._rules) and is_layer(equation, self._rules, of_matrices=True):
      return Reads.PRODUCT
    # A value that becomes an integer (argmax) is not carried on.
    carried = [end for end, v in zip(results, equation.outvars, strict=True) if is_float(v.aval)]
    return functools.reduce(operator.or_, carried or [Reads.NONE]) & ENDS

  def _reads(self, equation: JaxprEqn, found: Reads, calls: Calls, operands: list[Source]) -> Reads:
    """Returns how an equation reads its operands, given the readers of its results."""
    results = found & READERS
    if at_region_edge(marked_path(equation)):
      return _IN_HALF
    path = functools.reduce(inside, [marked_path(call) for call, _ in calls], "")
    half = self._rules.overrides.half_at(inside(path, marked_path(equation)))
    listed = self._rules.list_of(equation.primitive, half)
    if listed == "allow":
      why = self.float32[*calls, (equation, 0)] = self._why_float32(equation, found, calls, operands[:2])
    if half is None or why_in_solver(calls, self._rules):
      return Reads.FLOAT32
    if listed == "allow":
      if why is None:
        return _IN_HALF
      return Reads.FLOAT32 | (Reads.ALGEBRA if any(f.solved for f in operands) else results & Reads.ALGEBRA)
    if listed == "deny" and has(equation, Trait.ORDERS):
      return Reads.ORDER
    if listed in ("deny", "opaque", "call"):
      algebra = Reads.ALGEBRA if has(equation, Trait.ALGEBRA) else results & Reads.ALGEBRA
      is_norm = has(equation, Trait.STORES_RESULT) and found & ENDS == Reads.PRODUCT
      is_norm = is_norm and not below_backward(calls)
      return Reads.FLOAT32 | algebra | (Reads.NORM if is_norm else results & Reads.NORM)
    return _followed(equation, results)

  def _why_float32(
    self, equation: JaxprEqn, reads: Reads, calls: Calls, operands: list[Source]
  ) -> Code | None:
    """Returns why a product on the list `allow` keeps float32 operands; `None` if it need not.

    Args:
      equation: the product.
      reads: the readers of its result.
      calls: the calls around it.
      operands: the sources of its two operands; empty if unknown, as in a backward rule: then nothing is
        known about readers outside.
    """
    backward = in_backward(equation, calls)
    if not is_layer(equation, self._rules):
      return Code.SUM_OF_PRODUCTS
    if is_outer(equation) and not backward:  # that of a single row has an outer product for each weight
      return Code.OUTER_PRODUCT
    if states_precision(equation):
      return Code.STATES_PRECISION
    if equation.primitive not in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
      return None
    if operands and not (any(fact.real for fact in operands) and any(fact.varies for fact in operands)):
      return Code.POSITIONS
    if not backward and is_filter(operands):
      return Code.FILTER
    if any(equation in loop_facts(call, self._rules).recurrent for call, _ in calls):
      return Code.RECURRENCE
    if backward or not operands or not only_float32(reads & READERS):
      return None
    # A lookup in a table that layers read is a layer; a product of constants and activations on the way, too.
    # In a rule of the user's, what follows is unknown.
    alone = not (reads & Reads.FLOAT32 and (reads & Reads.PRODUCT or not is_whole(calls)))
    active = any(fact.active for fact in operands)
    prepares = not active and not any(fact.argument for fact in operands)
    weighs = all(fact.real for fact in operands) and (operands[1].varies or not active)
    if not weighs and (alone or prepares):
      return Code.SELECTION
    algebra = bool(reads & Reads.ALGEBRA)
    if any(fact.solved and fact.active for fact in operands) and (alone or algebra):
      return Code.FROM_ALGEBRA
    if algebra and (len({fact.root for fact in operands}) == 1 or all(fact.active for fact in operands)):
      return Code.FOR_ALGEBRA
    return None


def is_whole(calls: Calls) -> bool:
  """Returns whether no call around a body has a rule of its own."""
  kinds = (call_kind(call) for call, _ in calls)
  return all(kind is not None and kind.is_plain for kind in kinds)


def below_backward(calls: Calls) -> bool:
  """Returns whether a call around a body is in a backward pass: nothing is known to follow its values."""
  return any(backward_depth(call) for call, _ in calls)


def _followed(equation: JaxprEqn, results: Reads) -> Reads:
  """Returns how an equation that follows its operands reads them."""
  outs = equation.outvars
  if equation.primitive is jax.lax.convert_element_type_p and is_float(outs[0].aval):
    if castable(outs[0].aval):
      return results
    return Reads.HALF if dtype_of(outs[0]).itemsize < 4 else Reads.FLOAT32
  if not any(is_float(v.aval) for v in outs):
    return Reads.ORDER
  if has(equation, Trait.PASSES_ON):
    return results
  alone = len({id(atom) for atom in equation.invars}) == 1  # as in a square: the norm is of the operand
  return results & ~(_VIEWS if alone else _VIEWS | Reads.NORM)


def in_one_pass(equation: JaxprEqn) -> bool:
  """Returns whether gradients go through the bodies of a call."""
  kind = call_kind(equation)
  return kind is not None and kind is not CallKind.WHILE and kind.is_plain


class OtherUses(Backward[int]):
  """How deep in backward passes a value has another use than as a gradient on its way out of them.

  `autocast(jax.grad(f))` sees the products of the backward pass as equations. A product is the gradient of a
  parameter, and has a float32 result, if its result is only reshaped, scaled by a number and added to others
  on its way out of the backward pass. Another use does not matter for a value that is made deeper: it has
  left its backward pass.

  Args:
    depth: the number of backward passes around the program.
  """

  nothing = NOWHERE

  def __init__(self, depth: int):
    self._depth = depth

  def join(self, a: int, b: int) -> int:
    return max(a, b)

  def enters(self, equation: JaxprEqn) -> bool:
    return in_one_pass(equation)

  def transfer(self, equation: JaxprEqn, results: list[int], calls: Calls) -> list[int]:
    depth = self._depth_of(equation, calls)
    goes_on = max(results, default=NOWHERE) < depth and _passes(equation)
    return [NOWHERE if goes_on else depth] * len(equation.invars)

  def choice(self, equation: JaxprEqn, results: list[int], calls: Calls) -> int:
    return self._depth_of(equation, calls)

  def _depth_of(self, equation: JaxprEqn, calls: Calls) -> int:
    return max(self._depth, backward_depth(equation), *(backward_depth(call) for call, _ in calls))


def _passes(equation: JaxprEqn) -> bool:
  """Returns whether an equation turns gradients into a gradient, with only another shape and scale."""
  primitive, operands = equation.primitive, [a for a in equation.invars if castable(a.aval)]
  if not all(castable(v.aval) for v in equation.outvars):
    return False
  if primitive in _SCALES:
    return sum(size(a) > 1 for a in operands) <= 1 and size(equation.invars[-1]) == 1
  if primitive is jax.lax.reduce_sum_p:  # over dimensions of size 1
    return size(equation.invars[0]) == size(equation.outvars[0])
  return primitive is not jax.lax.gather_p and (has(primitive, _PASSES) or primitive in _MOVES)


class BodyFacts:
  """What is known of one body of a program.

  Attributes:
    sources: where its values come from; `None` if that is unknown.
    layers: the same, if no derivative or batching rule is around it: then the layers around its values are
      known, too.
  """

  def __init__(self, program: Program, calls: Calls):
    self.sources = program.sources.get(calls)
    self.layers = self.sources if is_whole(calls) else None
    self._reads = program.reads[calls]
    self._ends = self.layers is not None and not below_backward(calls)

  def reads(self, atom: Atom) -> Reads:
    """Returns the readers of a variable."""
    return self._reads[atom] & READERS

  def end(self, atom: Atom) -> Reads:
    """Returns what follows a value, as far as it is known."""
    return self._reads[atom] & ENDS if self._ends else Reads.NONE


class Program:
  """Facts about a program and the bodies of its calls, by the calls around each; what is missing is unknown.

  Attributes:
    rules: the rules.
    sources: where its values come from.
    reads: their readers.
    readers: finds those of a body whose readers outside are unknown; and why products keep float32 operands.
    exact: the products of backward passes whose forward products all keep float32 operands, and `while` loops
      of them, which repeat the steps of a solver.
    parameters: the bits of `Source.inputs` that are parameters.
    sites: the names of products under delayed FP8 scaling so far.
  """

  def __init__(self, rules: CastingRules, sites: Sites):
    self.rules = rules
    self.sources: dict[Calls, Facts[Source]] = {}
    self.reads: dict[Calls, Facts[Reads]] = {}
    self.readers = Readers(rules, self.sources)
    self.exact: frozenset[Calls] = frozenset()
    self.parameters = 0
    self.sites = sites
    self._products: list[Product] = []

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, arguments: Sequence[int], full_outputs: bool) -> Program:
    """Returns a whole program.

    Args:
      jaxpr: the program.
      rules: the rules.
      arguments: for each of its inputs, the number of the argument that it is a leaf of.
      full_outputs: whether its outputs are read in float32.
    """
    program, outputs = cls(rules, Sites()), open_jaxpr(jaxpr).outvars
    sources, program.parameters = sources_of(jaxpr, rules, arguments)
    _add(sources, program.sources)
    returned = Reads.FLOAT32 if full_outputs else Reads.HALF
    reads = [returned if castable(v.aval) else Reads.NONE for v in outputs]
    ends = [
      (Reads.ARRAY if shape_of(v) else Reads.SCALAR) if is_float(v.aval) else Reads.NONE for v in outputs
    ]
    reads = list(map(operator.or_, reads, ends))
    _add(program.readers.solve(jaxpr, reads), program.reads)
    program._products = list(products(sources, rules))
    program.exact = program._backward_of_exact()
    return program

  def of_rule(self, jaxpr: AnyJaxpr, calls: Calls, is_backward: bool) -> Program:
    """Returns a derivative rule of a call as a program: it first returns the call's results.

    Args:
      jaxpr: the rule.
      calls: the calls around it; the last is its own.
      is_backward: whether it is a backward rule: nothing is known around it.
    """
    rule, outer, body = Program(self.rules, self.sites), calls[:-1], open_jaxpr(jaxpr)
    reads = [Reads.NONE] * len(body.outvars)
    if not is_backward and outer in self.sources and outer in self.reads:
      call = calls[-1][0]
      operands = [self.sources[outer][a] for a in call.invars][: len(body.invars)]
      tangents = [Source(False, True, None, real=True)] * (len(body.invars) - len(operands))
      _add(Sources(self.rules).solve(jaxpr, [*operands, *tangents], calls), rule.sources)
      results = [self.reads[outer][v] & READERS for v in call.outvars]
      reads = [*results, *reads[len(results) :]][: len(reads)]
    _add(rule.readers.solve(jaxpr, reads, calls), rule.reads)
    return rule

  @functools.cached_property
  def roles(self) -> dict[Calls, ProductRole]:
    """The roles of its products, by their place."""

    def is_followed(product: Product) -> bool:
      known = self.reads.get(product.place[:-1])
      return known is None or any(known[v] & Reads.PRODUCT for v in product.equation.outvars)

    return product_roles(self._products, is_followed)

  def _backward_of_exact(self) -> frozenset[Calls]:
    """Returns `exact`.

    The forward products of a backward product are those that share an operand with it. A product in a
    `while_loop` has them, too: the derivative of a solver may be a loop that repeats its steps.
    """
    forward: dict[Root, list[bool]] = {}
    backward: dict[Calls, list[Root]] = {}
    for place, operands in self._products:
      *calls, (equation, _) = place
      solver = why_in_solver(place[:-1], self.rules) is not None
      roots = [fact.root for fact in operands if fact.root is not None and not fact.gradient]
      in_loop = any(call_kind(call) is CallKind.WHILE for call, _ in calls)
      if in_backward(equation, place[:-1]) or (in_loop and not solver):
        backward[place] = roots
        continue
      exact = solver or self.readers.float32.get(place) is not None
      for root in roots:
        forward.setdefault(root, []).append(exact)
    alike = {place: [e for root in roots for e in forward.get(root, ())] for place, roots in backward.items()}
    known = {place: all(found) for place, found in alike.items() if found}
    loops: dict[Calls, bool] = {}
    for place, is_exact in known.items():
      for i, (call, _) in enumerate(place[:-1]):
        if call_kind(call) is CallKind.WHILE:
          loop = (*place[:i], (call, 0))
          loops[loop] = loops.get(loop, True) and is_exact
    return frozenset(place for place, is_exact in (known | loops).items() if is_exact)


def _add(found: Facts[F], known: dict[Calls, Facts[F]]) -> None:
  known.update((facts.calls, facts) for facts in found.everywhere())
