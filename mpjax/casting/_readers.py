"""Who reads a value: half-precision products, float32, linear algebra, or nothing but its order.

A value is rounded to half precision for those of its readers that compute in it, and for no others. So a
product whose result nothing reads in half precision has a float32 result, and one that only selects and adds
for such readers has float32 operands.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence

import jax

from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting import _kernels
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import castable, is_float, size
from mpjax.casting._loop_facts import is_recurrent, why_in_solver
from mpjax.casting._product_roles import (
  Ends,
  Lineage,
  ProductRoles,
  Root,
  by_calls,
  is_layer,
  is_outer,
  is_product,
  states_precision,
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
)


class Reads(enum.Flag):
  """Who reads a value, or what is computed of it element by element."""

  NONE = 0
  VIEW = enum.auto()  # a half-precision product, as it is or by views
  LATER = enum.auto()  # such a product in the backward pass, of a value of the forward pass
  HALF = enum.auto()  # an operation in half precision
  FLOAT32 = enum.auto()  # an operation in float32, or the caller
  ALGEBRA = enum.auto()  # linear algebra, directly or of what is computed of it in float32
  ORDER = enum.auto()  # a sort, an arg-max, a comparison or a cast to integers


_IN_HALF = Reads.VIEW | Reads.HALF
_VIEWS = Reads.VIEW | Reads.LATER


def _only_float32(reads: Reads) -> bool:
  """Returns whether the forward pass reads a value, and not in half precision."""
  return bool(reads & ~Reads.LATER) and not reads & _IN_HALF


def in_half_alone(reads: Reads) -> bool:
  """Returns whether a product reads a value, and no reader takes it in anything but half precision."""
  return bool(reads & _VIEWS) and not reads & ~(_IN_HALF | Reads.LATER)


def in_order_alone(reads: Reads) -> bool:
  """Returns whether nothing but its place among others, or an integer, is made of a value."""
  return reads & ~Reads.LATER == Reads.ORDER


def in_backward(equation: JaxprEqn, calls: Calls) -> bool:
  """Returns whether an equation, or a call that it is in, is in a backward pass."""
  return any(map(backward_depth, (equation, *(call for call, _ in calls))))


def is_outer_product(equation: JaxprEqn, calls: Calls) -> bool:
  """Returns whether an equation is an outer product, other than of a backward pass.

  A backward pass of a single row has one for each weight.
  """
  return is_outer(equation) and not in_backward(equation, calls)


def why_float32(
  equation: JaxprEqn,
  operands: Sequence[Lineage],
  followed: bool,
  reads: Reads,
  rules: CastingRules,
  calls: Calls,
) -> str:
  """Returns why a product that is on the list `allow` keeps float32 operands; empty if it need not.

  Args:
    equation: the product.
    operands: where its two operands come from; empty where that is not known.
    followed: whether a further product is made of its result.
    reads: who reads its result.
    rules: what decides.
    calls: those that it is in.
  """
  if equation.primitive not in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
    return ""
  backward = in_backward(equation, calls)
  real = [fact.real for fact in operands] or [True]
  if not any(real):
    return "its operands are positions, counts or constants: from no float input and no parameter"
  if any(is_recurrent(equation, call, rules) for call, _ in calls):
    return "a linear recurrence: each step multiplies the state by the same matrix, and roundings grow"
  if backward or not _only_float32(reads):
    return ""
  if operands and all(fact.pure or not fact.real for fact in operands):
    return "it is of gradients that have left their backward pass, and float32 alone reads it"
  # A lookup in a table that layers read is a layer; so is what constants make of activations on the way.
  alone = not (followed and reads & Reads.FLOAT32)
  prepares = not any(fact.active or fact.argument for fact in operands)
  if not all(real) and (alone or prepares):
    return "it selects or adds, by positions or constants, what nothing reads in half precision"
  algebra = bool(reads & Reads.ALGEBRA)
  if any(fact.solved and fact.active for fact in operands) and (alone or algebra):
    return "linear algebra made an operand, and float32 alone reads it"
  if algebra and (len({fact.root for fact in operands}) == 1 or all(fact.active for fact in operands)):
    return "linear algebra reads it, and no weight is in it"
  return ""


def why_float32_result(equation: JaxprEqn, reads: Reads, roles: ProductRoles) -> str:
  """Returns why a product in half precision has a float32 result; empty if that is in half precision too.

  A result of which further products are made is an activation: half precision holds what those read. Nor is
  it worth its memory where it is large, such as the logits of a vocabulary: in half precision it is kept for
  the backward pass in half the bytes.
  """
  if backward_depth(equation) or not _only_float32(reads):
    return ""
  result = equation.outvars[0]
  if roles.lineage(result).gradient:
    return ""
  if reads & Reads.ALGEBRA:
    return "linear algebra reads its result"
  operands = equation.invars[:2]
  activations = [a for a in operands if roles.lineage(a).active] or operands
  if roles.reaches_product(result) or 4 * size(result) > max(map(size, activations)):
    return ""
  return "nothing reads its result in half precision, and it is small"


class _Products:
  """What is known of the products of a program before it is decided about.

  Args:
    rules: what decides.
    lineages: where the program's values come from; `None` where that is not known.
    ends: what is made of its values; `None` where that is not known.
  """

  def __init__(self, rules: CastingRules, lineages: Facts[Lineage] | None, ends: Facts[Ends] | None):
    self._rules = rules
    self._lineages = by_calls(lineages) if lineages else {}
    self._ends = by_calls(ends) if ends else {}

  def operands(self, equation: JaxprEqn, calls: Calls) -> list[Lineage]:
    """Returns where the operands of an equation come from; empty where that is not known."""
    known = self._lineages.get(calls)
    return [known[a] for a in equation.invars] if known else []

  def keeps_float32(self, equation: JaxprEqn, reads: Reads, calls: Calls) -> bool:
    """Returns whether a product keeps float32 operands if its result is read so."""
    if not is_layer(equation, self._rules) or states_precision(equation) or is_outer_product(equation, calls):
      return True
    ends = self._ends.get(calls)
    followed = ends is not None and any(ends[v] & Ends.PRODUCT for v in equation.outvars)
    operands = self.operands(equation, calls)[:2]
    return bool(why_float32(equation, operands, followed, reads, self._rules, calls))


class Readers(Backward[Reads]):
  """Who reads each value of a program.

  Args:
    rules: what decides.
    path: the module path that the program is in.
    lineages: where its values come from; `None` where that is not known.
    ends: what is made of its values; `None` where that is not known.
  """

  nothing = Reads.NONE

  def __init__(
    self,
    rules: CastingRules,
    path: str = "",
    lineages: Facts[Lineage] | None = None,
    ends: Facts[Ends] | None = None,
  ):
    self._rules = rules
    self._path = path
    self._products = _Products(rules, lineages, ends)

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, roles: ProductRoles, full_outputs: bool) -> Facts[Reads]:
    """Returns who reads each value of a whole program, which returns its results in float32 or does not."""
    returned = Reads.FLOAT32 if full_outputs else Reads.HALF
    outputs = [returned if castable(v.aval) else Reads.NONE for v in open_jaxpr(jaxpr).outvars]
    return cls(rules, lineages=roles.lineages, ends=roles.ends).solve(jaxpr, outputs)

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not at_region_edge(marked_path(equation))

  def transfer(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> list[Reads]:
    reads = self._reads(equation, functools.reduce(operator.or_, results, Reads.NONE), calls)
    later = reads
    if reads & _IN_HALF and in_backward(equation, calls):
      later = reads & ~_IN_HALF | (Reads.LATER if reads & Reads.VIEW else Reads.NONE)
    known = self._products.operands(equation, calls)
    found = [reads if fact.gradient else later for fact in known] or [reads] * len(equation.invars)
    return [r if castable(a.aval) else Reads.NONE for a, r in zip(equation.invars, found, strict=True)]

  def _reads(self, equation: JaxprEqn, results: Reads, calls: Calls) -> Reads:
    if at_region_edge(marked_path(equation)) or _kernels.has_registered(equation):
      return _IN_HALF
    path = functools.reduce(inside, [marked_path(call) for call, _ in calls], self._path)
    half = self._rules.overrides.half_at(inside(path, marked_path(equation)))
    listed = self._rules.list_of(equation.primitive, half)
    if half is None or why_in_solver(calls, self._rules, self._path):
      return Reads.FLOAT32
    if listed == "allow":
      if not self._products.keeps_float32(equation, results, calls):
        return _IN_HALF
      solved = any(fact.solved for fact in self._products.operands(equation, calls))
      return Reads.FLOAT32 | (Reads.ALGEBRA if solved else results & Reads.ALGEBRA)
    if listed == "deny" and has(equation, Trait.ORDERS):
      return Reads.ORDER
    if listed in ("deny", "opaque", "call"):
      algebra = Reads.ALGEBRA if has(equation, Trait.ALGEBRA) else results & Reads.ALGEBRA
      return Reads.FLOAT32 | algebra
    return self._followed(equation, results)

  def _followed(self, equation: JaxprEqn, results: Reads) -> Reads:
    """Returns how an equation reads that follows its operands."""
    outs = equation.outvars
    if equation.primitive is jax.lax.convert_element_type_p and is_float(outs[0].aval):
      if castable(outs[0].aval):
        return results
      return Reads.HALF if dtype_of(outs[0]).itemsize < 4 else Reads.FLOAT32
    if not any(is_float(v.aval) for v in outs):
      return Reads.ORDER
    return results if has(equation, Trait.PASSES_ON) else results & ~_VIEWS


def backward_of_exact(roles: ProductRoles, readers: Facts[Reads], rules: CastingRules) -> frozenset[Calls]:
  """Returns the products of backward passes in a program whose forward products all keep float32 operands.

  A product of a backward pass comes from the forward ones that share an operand with it. So does one in a
  `while_loop`: the derivative of a solver may be a loop that takes its steps again. Such loops are in the
  result, too.
  """
  products, read = _Products(rules, roles.lineages, roles.ends), by_calls(readers)
  forward: dict[Root, list[bool]] = {}
  backward: dict[Calls, list[Root]] = {}
  for facts in roles.lineages.everywhere():
    calls = facts.calls
    solver = bool(why_in_solver(calls, rules))
    in_loop = any(call_kind(call) is CallKind.WHILE for call, _ in calls)
    for equation in facts.equations:
      if not is_product(equation, rules):
        continue
      operands = products.operands(equation, calls)[:2]
      roots = [fact.root for fact in operands if fact.root is not None and not fact.gradient]
      if in_backward(equation, calls) or (in_loop and not solver):
        backward[(*calls, (equation, 0))] = roots
        continue
      reads = read[calls][equation.outvars[0]] if calls in read else Reads.HALF
      exact = solver or products.keeps_float32(equation, reads, calls)
      for root in roots:
        forward.setdefault(root, []).append(exact)
  sources = {place: [e for root in roots for e in forward.get(root, ())] for place, roots in backward.items()}
  known = {place: all(found) for place, found in sources.items() if found}
  # A loop of such products alone takes the steps of a solver again.
  loops: dict[Calls, bool] = {}
  for place, is_exact in known.items():
    for i, (call, _) in enumerate(place[:-1]):
      if call_kind(call) is CallKind.WHILE:
        loop = (*place[:i], (call, 0))
        loops[loop] = loops.get(loop, True) and is_exact
  return frozenset(place for place, is_exact in (known | loops).items() if is_exact)
