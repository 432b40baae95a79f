"""The readers of a value: half-precision products, float32, linear algebra, or only its order.

A value is rounded to half precision for those readers that compute in it, and for no others. So a
product whose result nothing reads in half precision has a float32 result, and one that only selects and adds
for such readers has float32 operands.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.extend.core import primitives

from mpjax._compat import newer
from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import castable, is_float, size
from mpjax.casting._loops import loop_facts, why_in_solver
from mpjax.casting._product_roles import (
  Ends,
  Lineage,
  ProductRoles,
  Root,
  by_calls,
  is_filter,
  is_layer,
  is_outer,
  is_product,
  states_precision,
)
from mpjax.casting._reasons import Code
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

_PASSES = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.MARKS_AXES | Trait.ADDS
_MOVES = frozenset({jax.lax.dynamic_update_slice_p, jax.lax.select_n_p, newer("stack_p"), newer("unstack_p")})
_NOWHERE = -1
_SCALES = frozenset({jax.lax.mul_p, jax.lax.div_p})


class Reads(enum.Flag):
  """The readers of a value, or of an elementwise function of it."""

  NONE = 0
  VIEW = enum.auto()  # a half-precision product, directly or through views
  LATER = enum.auto()  # such a product in the backward pass, for a value of the forward pass
  HALF = enum.auto()  # an operation in half precision
  FLOAT32 = enum.auto()  # an operation in float32, or the caller
  ALGEBRA = enum.auto()  # linear algebra, directly or through float32 operations
  ORDER = enum.auto()  # a sort, an arg-max, a comparison or a cast to integers
  NORM = enum.auto()  # a reduction that only layers read, as in a norm


_IN_HALF = Reads.VIEW | Reads.HALF
_VIEWS = Reads.VIEW | Reads.LATER


def _only_float32(reads: Reads) -> bool:
  """Returns whether the forward pass reads a value, and not in half precision."""
  return bool(reads & ~Reads.LATER) and not reads & _IN_HALF


def in_half_alone(reads: Reads) -> bool:
  """Returns whether a product reads a value, and every reader takes it in half precision."""
  return bool(reads & _VIEWS) and not reads & ~(_IN_HALF | Reads.LATER)


def in_order_alone(reads: Reads) -> bool:
  """Returns whether only a value's place among others, or an integer, is computed from it."""
  return reads & ~(Reads.LATER | Reads.NORM) == Reads.ORDER


def in_backward(equation: JaxprEqn, calls: Calls) -> bool:
  """Returns whether an equation, or a call around it, is in a backward pass."""
  return any(map(backward_depth, (equation, *(call for call, _ in calls))))


def is_outer_product(equation: JaxprEqn, calls: Calls) -> bool:
  """Returns whether an equation is an outer product outside a backward pass.

  The backward pass of a single row has an outer product for each weight.
  """
  return is_outer(equation) and not in_backward(equation, calls)


def why_float32(
  equation: JaxprEqn,
  operands: Sequence[Lineage],
  followed: bool,
  reads: Reads,
  rules: CastingRules,
  calls: Calls,
) -> Code | None:
  """Returns why a product on the list `allow` keeps float32 operands; `None` if it need not.

  Args:
    equation: the product.
    operands: the sources of its two operands; empty if unknown.
    followed: whether another product follows its result.
    reads: the readers of its result.
    rules: the rules.
    calls: the calls around it.
  """
  if equation.primitive not in (jax.lax.dot_general_p, jax.lax.conv_general_dilated_p):
    return None
  backward = in_backward(equation, calls)
  real = [fact.real for fact in operands] or [True]
  constant = [fact.is_constant for fact in operands] or [False]
  if not any(real) or all(constant):
    return Code.POSITIONS
  if not backward and is_filter(operands):
    return Code.FILTER
  if any(equation in loop_facts(call, rules).recurrent for call, _ in calls):
    return Code.RECURRENCE
  if backward or not _only_float32(reads):
    return None
  # A lookup in a table that layers read is a layer; so is a product of constants and activations on the way.
  alone = not (followed and reads & Reads.FLOAT32)
  active = any(fact.active for fact in operands)
  prepares = not active and not any(fact.argument for fact in operands)
  if (not all(real) or (constant[-1] and active)) and (alone or prepares):
    return Code.SELECTION
  algebra = bool(reads & Reads.ALGEBRA)
  if any(fact.solved and fact.active for fact in operands) and (alone or algebra):
    return Code.FROM_ALGEBRA
  if algebra and (len({fact.root for fact in operands}) == 1 or all(fact.active for fact in operands)):
    return Code.FOR_ALGEBRA
  return None


def why_float32_result(equation: JaxprEqn, reads: Reads, roles: ProductRoles) -> Code | None:
  """Returns why a product in half precision has a float32 result; `None` if the result is half precision.

  A result that another product follows is an activation: half precision holds what that product reads. If it
  is large, such as the logits of a vocabulary, float32 is not worth its memory: in half precision it is kept
  for the backward pass in half the bytes.
  """
  if backward_depth(equation) or not _only_float32(reads):
    return None
  result = equation.outvars[0]
  if roles.lineages[result].gradient:
    return None
  if reads & Reads.ALGEBRA:
    return Code.RESULT_FOR_ALGEBRA
  operands = equation.invars[:2]
  activations = [a for a in operands if roles.lineages[a].active] or operands
  if roles.reaches_product(result) or 4 * size(result) > max(map(size, activations)):
    return None
  return Code.SMALL_RESULT


class Readers(Backward[Reads]):
  """The readers of each value of a program.

  Args:
    rules: the rules.
    path: the module path of the program.
    lineages: the sources of its values; `None` if unknown.
    ends: what follows its values; `None` if unknown.
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
    self._lineages = by_calls(lineages) if lineages else {}
    self._ends = by_calls(ends) if ends else {}

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, roles: ProductRoles, full_outputs: bool) -> Facts[Reads]:
    """Returns the readers of each value of a whole program, which returns its results in float32 or not."""
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
    known = self.operands(equation, calls)
    found = [reads if fact.gradient else later for fact in known] or [reads] * len(equation.invars)
    return [r if castable(a.aval) else Reads.NONE for a, r in zip(equation.invars, found, strict=True)]

  def operands(self, equation: JaxprEqn, calls: Calls) -> list[Lineage]:
    """Returns the sources of an equation's operands; empty if unknown."""
    known = self._lineages.get(calls)
    return [known[a] for a in equation.invars] if known else []

  def keeps_float32(self, equation: JaxprEqn, reads: Reads, calls: Calls) -> bool:
    """Returns whether a product keeps float32 operands if its result is read so."""
    if not is_layer(equation, self._rules) or states_precision(equation) or is_outer_product(equation, calls):
      return True
    ends = self._ends.get(calls)
    followed = ends is not None and any(ends[v] & Ends.PRODUCT for v in equation.outvars)
    operands = self.operands(equation, calls)[:2]
    return why_float32(equation, operands, followed, reads, self._rules, calls) is not None

  def _is_norm(self, equation: JaxprEqn, calls: Calls) -> bool:
    """Returns whether an equation is a reduction that only layers read."""
    ends = self._ends.get(calls)
    if ends is None or not has(equation, Trait.STORES_RESULT):
      return False
    return ends[equation.outvars[0]] == Ends.PRODUCT

  def _reads(self, equation: JaxprEqn, results: Reads, calls: Calls) -> Reads:
    if at_region_edge(marked_path(equation)):
      return _IN_HALF
    path = functools.reduce(inside, [marked_path(call) for call, _ in calls], self._path)
    half = self._rules.overrides.half_at(inside(path, marked_path(equation)))
    listed = self._rules.list_of(equation.primitive, half)
    if half is None or why_in_solver(calls, self._rules, self._path):
      return Reads.FLOAT32
    if listed == "allow":
      if not self.keeps_float32(equation, results, calls):
        return _IN_HALF
      solved = any(fact.solved for fact in self.operands(equation, calls))
      return Reads.FLOAT32 | (Reads.ALGEBRA if solved else results & Reads.ALGEBRA)
    if listed == "deny" and has(equation, Trait.ORDERS):
      return Reads.ORDER
    if listed in ("deny", "opaque", "call"):
      algebra = Reads.ALGEBRA if has(equation, Trait.ALGEBRA) else results & Reads.ALGEBRA
      norm = Reads.NORM if self._is_norm(equation, calls) else results & Reads.NORM
      return Reads.FLOAT32 | algebra | norm
    return self._followed(equation, results)

  def _followed(self, equation: JaxprEqn, results: Reads) -> Reads:
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


def backward_of_exact(roles: ProductRoles, readers: Facts[Reads], rules: CastingRules) -> frozenset[Calls]:
  """Returns the products of backward passes in a program whose forward products all keep float32 operands.

  The forward products of a backward product are those that share an operand with it. A product in a
  `while_loop` has them, too: the derivative of a solver may be a loop that repeats its steps. Such loops are
  also in the result.
  """
  products, read = Readers(rules, "", roles.lineages, roles.ends), by_calls(readers)
  forward: dict[Root, list[bool]] = {}
  backward: dict[Calls, list[Root]] = {}
  for facts in roles.lineages.everywhere():
    calls = facts.calls
    solver = why_in_solver(calls, rules) is not None
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
  # A loop with only such products repeats the steps of a solver.
  loops: dict[Calls, bool] = {}
  for place, is_exact in known.items():
    for i, (call, _) in enumerate(place[:-1]):
      if call_kind(call) is CallKind.WHILE:
        loop = (*place[:i], (call, 0))
        loops[loop] = loops.get(loop, True) and is_exact
  return frozenset(place for place, is_exact in (known | loops).items() if is_exact)


class WeightGradients(NamedTuple):
  """The values of a program with a backward pass inside that become gradients of parameters and nothing else.

  `autocast(jax.grad(f))` sees the products of the backward pass as equations. A product is the gradient of an
  input of the forward pass, and has a float32 result, if its result is only reshaped, scaled by a number and
  added to others on its way out of the backward pass.

  Attributes:
    others: how deep in backward passes each value has another use.
    depth: the number of backward passes around the program.
  """

  others: Facts[int]
  depth: int

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, outs: Sequence[bool], depth: int = 0) -> WeightGradients:
    """Finds the gradients of a program.

    Args:
      jaxpr: the program.
      outs: for each output, whether it is such a gradient, or leaves the backward pass.
      depth: the number of backward passes around the program.
    """
    outputs = [_NOWHERE if is_gradient else depth for is_gradient in outs]
    return cls(_Others(depth).solve(jaxpr, outputs), depth)

  @classmethod
  def leaving(cls, jaxpr: AnyJaxpr) -> WeightGradients:
    """Finds the gradients of a whole program: all outputs of its backward passes."""
    return cls.of(jaxpr, [True] * len(open_jaxpr(jaxpr).outvars))

  def has_product(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation in a backward pass of the program computes the gradient of a parameter."""
    depth = max(self.depth, backward_depth(equation))
    return depth > 0 and all(self.others[v] < depth for v in equation.outvars)

  def has_sum(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation adds two such gradients."""
    return equation.primitive is primitives.add_jaxvals_p and self.has_product(equation)

  def inside(self, equation: JaxprEqn, i: int = 0) -> WeightGradients | None:
    """Returns the gradients of the i-th body of an equation; `None` if unknown."""
    others = self.others.inside(equation, i)
    return WeightGradients(others, max(self.depth, backward_depth(equation))) if others else None


class _Others(Backward[int]):
  """How deep in backward passes a value has another use than as a gradient on its way out of them.

  Such a use does not matter for a value that is made deeper: it has left its backward pass.
  """

  nothing = _NOWHERE

  def __init__(self, depth: int):
    self._depth = depth

  def join(self, a: int, b: int) -> int:
    return max(a, b)

  def enters(self, equation: JaxprEqn) -> bool:
    kind = call_kind(equation)
    return kind is not None and kind is not CallKind.WHILE and kind.is_plain

  def transfer(self, equation: JaxprEqn, results: list[int], calls: Calls) -> list[int]:
    depth = self._depth_of(equation, calls)
    goes_on = max(results, default=_NOWHERE) < depth and _passes(equation)
    return [_NOWHERE if goes_on else depth] * len(equation.invars)

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
