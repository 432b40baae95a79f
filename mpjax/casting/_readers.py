"""Who reads a value: half-precision products, float32, an order, integers, linear algebra, the caller.

A value is rounded to half precision for those of its readers that compute in it, and for no others. So a
product whose result nothing reads in half precision has a float32 result, and one that only selects and adds
for such readers has float32 operands.
"""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.casting import _kernels
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import castable, is_float, size
from mpjax.casting._loop_facts import is_recurrent, is_solver
from mpjax.casting._product_roles import Lineage, ProductRoles, is_layer, is_outer, states_precision
from mpjax.jaxpr import (
  Backward,
  Calls,
  Facts,
  Trait,
  at_region_edge,
  backward_depth,
  dtype_of,
  facts,
  has,
  inside,
  marked_path,
  open_jaxpr,
)


class Reads(enum.Flag):
  """Who reads a value, or what is computed of it element by element."""

  NONE = 0
  VIEW = enum.auto()  # a half-precision product, as it is or by views
  HALF = enum.auto()  # an operation in half precision
  FLOAT32 = enum.auto()  # an operation in float32
  ALGEBRA = enum.auto()  # linear algebra
  ORDER = enum.auto()  # a sort, an arg-max or a comparison, which rounds nothing
  INTEGER = enum.auto()  # a cast to integers
  RETURNED = enum.auto()  # the caller, in float32


_IN_HALF = Reads.VIEW | Reads.HALF


def in_half_alone(reads: Reads) -> bool:
  """Returns whether a product reads a value, and no reader takes it in anything but half precision."""
  return bool(reads & Reads.VIEW) and not reads & ~_IN_HALF


def in_order_alone(reads: Reads) -> bool:
  """Returns whether nothing but its place among others, or an integer, is made of a value."""
  return reads != Reads.NONE and not reads & ~(Reads.ORDER | Reads.INTEGER)


def why_float32(
  equation: JaxprEqn,
  half: np.dtype | None,
  real: Sequence[bool],
  reads: Reads,
  rules: CastingRules,
  calls: Calls,
) -> str:
  """Returns why a product that is on the list `allow` keeps float32 operands; empty if it need not.

  Args:
    equation: the product.
    half: the compute dtype of its module.
    real: which of its two operands come from a float input or a parameter.
    reads: who reads its result.
    rules: what decides.
    calls: those that it is in.
  """
  if equation.primitive is not jax.lax.dot_general_p:
    return ""
  backward = max(map(backward_depth, (equation, *(call for call, _ in calls)))) > 0
  if is_outer(equation) and not backward:  # a backward pass of one row has such a product for each weight
    return "an outer product, on no matrix unit: it contracts nothing"
  if not any(real):
    return "its operands are positions, counts or constants: from no float input and no parameter"
  if half is not None and any(is_recurrent(equation, call, half, rules) for call, _ in calls):
    return "a linear recurrence: each step multiplies the state by the same matrix, and roundings grow"
  if not all(real) and reads != Reads.NONE and not reads & _IN_HALF and not backward:
    return "it selects or adds, by positions or constants, what nothing reads in half precision"
  return ""


def why_float32_result(equation: JaxprEqn, reads: Reads, roles: ProductRoles) -> str:
  """Returns why a product in half precision has a float32 result; empty if that is in half precision too.

  A result of which further products are made is an activation: half precision holds what those read. Nor is
  it worth its memory where it is large, such as the logits of a vocabulary: in half precision it is kept for
  the backward pass in half the bytes.
  """
  if reads == Reads.NONE or reads & _IN_HALF or backward_depth(equation):
    return ""
  result = equation.outvars[0]
  if roles.lineage(result).gradient:
    return ""
  if reads & Reads.ALGEBRA:
    return "linear algebra reads its result"
  operands = equation.invars[:2]
  activations = [a for a in operands if not roles.lineage(a).argument] or operands
  if roles.reaches_product(result) or 4 * size(result) > max(map(size, activations)):
    return ""
  return "nothing reads its result in half precision, and it is small"


class Readers(Backward[Reads]):
  """Who reads each value of a program.

  Args:
    rules: what decides.
    path: the module path that the program is in.
    lineages: where values come from; `None` where that is not known.
  """

  nothing = Reads.NONE

  def __init__(self, rules: CastingRules, path: str = "", lineages: Facts[Lineage] | None = None):
    self._rules = rules
    self._path = path
    everywhere = lineages.everywhere() if lineages else ()
    self._lineages: Mapping[Calls, Facts[Lineage]] = {facts.calls: facts for facts in everywhere}

  @classmethod
  def of(cls, jaxpr: AnyJaxpr, rules: CastingRules, roles: ProductRoles, full_outputs: bool) -> Facts[Reads]:
    """Returns who reads each value of a whole program, which returns its results in float32 or does not."""
    returned = Reads.RETURNED if full_outputs else Reads.HALF
    outputs = [returned if castable(v.aval) else Reads.NONE for v in open_jaxpr(jaxpr).outvars]
    return cls(rules, lineages=roles.lineages).solve(jaxpr, outputs)

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call" and not at_region_edge(marked_path(equation))

  def transfer(self, equation: JaxprEqn, results: list[Reads], calls: Calls) -> list[Reads]:
    reads = self._reads(equation, functools.reduce(operator.or_, results, Reads.NONE), calls)
    return [reads if castable(atom.aval) else Reads.NONE for atom in equation.invars]

  def _reads(self, equation: JaxprEqn, results: Reads, calls: Calls) -> Reads:
    if at_region_edge(marked_path(equation)) or _kernels.has_registered(equation):
      return _IN_HALF
    path = functools.reduce(inside, [marked_path(call) for call, _ in calls], self._path)
    half = self._rules.overrides.half_at(inside(path, marked_path(equation)))
    listed = self._rules.list_of(equation.primitive, half)
    if half is None or any(is_solver(call, self._rules) for call, _ in calls):
      return Reads.FLOAT32
    if listed == "allow":
      return Reads.FLOAT32 if self._keeps_float32(equation, half, results, calls) else _IN_HALF
    if listed == "deny" and has(equation, Trait.ORDERS):
      return Reads.ORDER
    if listed in ("deny", "opaque", "call"):
      algebra = facts(equation).traits & Trait.ALGEBRA
      return Reads.FLOAT32 | Reads.ALGEBRA if algebra else Reads.FLOAT32
    return self._followed(equation, results, calls)

  def _keeps_float32(self, equation: JaxprEqn, half: np.dtype, results: Reads, calls: Calls) -> bool:
    if not is_layer(equation, self._rules) or states_precision(equation):
      return True
    known = self._lineages.get(calls)
    real = [known[a].real if known else True for a in equation.invars[:2]]
    return bool(why_float32(equation, half, real, results, self._rules, calls))

  def _followed(self, equation: JaxprEqn, results: Reads, calls: Calls) -> Reads:
    """Returns how an equation reads that follows its operands."""
    outs = equation.outvars
    if is_cast(equation):
      if not castable(outs[0].aval):
        return _of_cast(equation)
      return results
    if not any(is_float(v.aval) for v in outs):
      return Reads.ORDER
    largest = max((size(a) for a in equation.invars), default=0)
    if max(map(size, outs)) < largest and results & Reads.RETURNED:
      results = results & ~Reads.RETURNED | Reads.FLOAT32
    if has(equation, Trait.PASSES_ON):
      return results
    results &= ~Reads.VIEW
    if has(equation, Trait.CHOICE) and results:
      known = self._lineages.get(calls)
      full = [a for a in equation.invars if castable(a.aval) and size(a) == largest]
      results |= Reads.HALF if sum(known is None or known[a].active for a in full) > 1 else Reads.NONE
    return results


def is_cast(equation: JaxprEqn) -> bool:
  """Returns whether an equation is a cast."""
  return equation.primitive is jax.lax.convert_element_type_p


def _of_cast(equation: JaxprEqn) -> Reads:
  dtype = dtype_of(equation.outvars[0])
  if jnp.issubdtype(dtype, jnp.inexact):
    return Reads.HALF if dtype.itemsize < 4 else Reads.FLOAT32
  return Reads.INTEGER if jnp.issubdtype(dtype, jnp.integer) else Reads.ORDER
