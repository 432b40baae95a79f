"""What follows a value: half-precision products, float32, linear algebra, only its order, or an optimiser.

A value is rounded to half precision for those readers that compute in it, and for no others. So a
product whose result nothing reads in half precision has a float32 result, and one that only selects and adds
for such readers has float32 operands.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping

import jax

from mpjax._compat import newer
from mpjax._types import JaxprEqn
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import castable, is_float, size
from mpjax.casting._loops import loop_facts, why_in_solver
from mpjax.casting._reasons import Code
from mpjax.casting._sources import (
  Lineage,
  in_backward,
  is_filter,
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
)

_PASSES = Trait.SAME_WEIGHT | Trait.PASSES_ON | Trait.MARKS_AXES | Trait.ADDS
_MOVES = frozenset({jax.lax.dynamic_update_slice_p, jax.lax.select_n_p, newer("stack_p"), newer("unstack_p")})
_SCALES = frozenset({jax.lax.mul_p, jax.lax.div_p})
NOWHERE = -1


class Ends(enum.Flag):
  """What follows a value. Nothing is assumed to follow a scalar output; after an array it is unknown."""

  NONE = 0
  PRODUCT = enum.auto()
  SCALAR = enum.auto()  # a scalar that the program returns
  ARRAY = enum.auto()


class EndsOfValues(Backward[Ends]):
  """What follows values: up to the next product, and not in a backward pass."""

  nothing = Ends.NONE

  def __init__(self, rules: CastingRules):
    self._rules = rules

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not backward_depth(equation)

  def transfer(self, equation: JaxprEqn, results: list[Ends], calls: Calls) -> list[Ends]:
    found = Ends.NONE
    if not backward_depth(equation):
      # A value that becomes an integer (argmax) is not carried on.
      carried = [end for end, v in zip(results, equation.outvars, strict=True) if is_float(v.aval)]
      found = functools.reduce(operator.or_, carried, Ends.NONE)
      if is_product(equation, self._rules) and is_layer(equation, self._rules, of_matrices=True):
        found = Ends.PRODUCT
    return [found] * len(equation.invars)

  def choice(self, equation: JaxprEqn, results: list[Ends], calls: Calls) -> Ends:
    return functools.reduce(operator.or_, results, Ends.NONE)


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
    lineages: by the calls around a body, the sources of its values, where they are known.
    ends: the same for what follows them.

  Attributes:
    float32: for each product, by its place, why it keeps float32 operands; `None` if it need not.
  """

  nothing = Reads.NONE

  def __init__(
    self, rules: CastingRules, lineages: Mapping[Calls, Facts[Lineage]], ends: Mapping[Calls, Facts[Ends]]
  ):
    self._rules = rules
    self._lineages = lineages
    self._ends = ends
    self.float32: dict[Calls, Code | None] = {}

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not at_region_edge(marked_path(equation))

  def transfer(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> list[Reads]:
    known = self._lineages.get(calls)
    operands = [known[a] for a in equation.invars] if known else []
    reads = self._reads(equation, functools.reduce(operator.or_, results, Reads.NONE), calls, operands)
    later = reads
    if reads & _IN_HALF and in_backward(equation, calls):
      later = reads & ~_IN_HALF | (Reads.LATER if reads & Reads.VIEW else Reads.NONE)
    found = [reads if fact.gradient else later for fact in operands] or [reads] * len(equation.invars)
    return [r if castable(a.aval) else Reads.NONE for a, r in zip(equation.invars, found, strict=True)]

  def _reads(self, equation: JaxprEqn, results: Reads, calls: Calls, operands: list[Lineage]) -> Reads:
    if at_region_edge(marked_path(equation)):
      return _IN_HALF
    path = functools.reduce(inside, [marked_path(call) for call, _ in calls], "")
    half = self._rules.overrides.half_at(inside(path, marked_path(equation)))
    listed = self._rules.list_of(equation.primitive, half)
    if listed == "allow":
      why = self.float32[*calls, (equation, 0)] = self._why_float32(equation, results, calls, operands[:2])
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
      norm = Reads.NORM if self._is_norm(equation, calls) else results & Reads.NORM
      return Reads.FLOAT32 | algebra | norm
    return _followed(equation, results)

  def _is_norm(self, equation: JaxprEqn, calls: Calls) -> bool:
    """Returns whether an equation is a reduction that only layers read."""
    stores = calls in self._ends and has(equation, Trait.STORES_RESULT)
    return stores and self._ends[calls][equation.outvars[0]] == Ends.PRODUCT

  def _why_float32(
    self, equation: JaxprEqn, reads: Reads, calls: Calls, operands: list[Lineage]
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
    if backward or not operands or not only_float32(reads):
      return None
    # A lookup in a table that layers read is a layer; a product of constants and activations on the way, too.
    alone = not (self._reaches_product(equation, calls) and reads & Reads.FLOAT32)
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

  def _reaches_product(self, equation: JaxprEqn, calls: Calls) -> bool:
    """Returns whether another product follows an equation's result, or may: a rule of the user's."""
    if not is_whole(calls):
      return True
    return calls in self._ends and bool(self._ends[calls][equation.outvars[0]] & Ends.PRODUCT)


def is_whole(calls: Calls) -> bool:
  """Returns whether no call around a body has a rule of its own."""
  kinds = (call_kind(call) for call, _ in calls)
  return all(kind is not None and kind.is_plain for kind in kinds)


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
    kind = call_kind(equation)
    return kind is not None and kind is not CallKind.WHILE and kind.is_plain

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
