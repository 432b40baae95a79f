"""The rules that autocast decides by."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from jax.extend.core import Primitive

from mpjax._gone import instead
from mpjax._types import AnyJaxpr, Jaxpr, JaxprEqn, PolicyLike
from mpjax.casting._op_lists import OpLists, changed
from mpjax.casting._overrides import Overrides
from mpjax.jaxpr import (
  Forward,
  Trait,
  bodies_of,
  call_kind,
  equations_in,
  facts,
  has_region,
  open_jaxpr,
)
from mpjax.policy import Policy, brief

if TYPE_CHECKING:
  from mpjax.casting._loop_facts import LoopFacts

F = TypeVar("F")
RECOMPUTE = ("islands", "nothing")
_DEAR = Trait.COSTLY | Trait.READS_STORED | Trait.STORES_RESULT


@dataclasses.dataclass(frozen=True, eq=False)
class CastingRules:
  """The rules that autocast decides by, and facts about jaxprs that they have found.

  Attributes:
    ops: the user's lists; `None` for the default ones.
    changed: names of primitives that the user has put on another list.
    overrides: the policies by module.
    accum_dtype: dtype that matrix products accumulate in and return, or `None`.
    wide_gradients: whether gradients of float32 values are float32 from their product on.
    recompute: what the backward pass recomputes, one of `RECOMPUTE`.
  """

  ops: OpLists | None
  changed: frozenset[str]
  overrides: Overrides
  accum_dtype: np.dtype | None
  wide_gradients: bool = True
  recompute: str = "islands"
  _contents: dict[Jaxpr, frozenset[Primitive]] = dataclasses.field(default_factory=dict)
  found_in_loops: dict[JaxprEqn, LoopFacts] = dataclasses.field(default_factory=dict)

  def list_of(self, primitive: Primitive, half: np.dtype | None = None) -> str:
    """Returns the list that a primitive is on if `half` is the compute dtype.

    The user's changes apply by name. Otherwise the primitive itself counts: another library's primitive of
    the same name is unknown.
    """
    half = half or self.overrides.any_half
    if self.ops is not None and primitive.name in self.changed:
      return self.ops.of(primitive.name, half)
    return facts(primitive).list_in(half)

  def computes_again(self, path: str) -> bool:
    """Returns whether the backward pass recomputes float32 islands of a module."""
    return (self.overrides.recompute_at(path) or self.recompute) != "nothing"

  def contents(self, jaxpr: AnyJaxpr) -> frozenset[Primitive]:
    """Returns the primitives in a jaxpr, at any depth, without those inside opaque ones."""
    body = open_jaxpr(jaxpr)
    if body not in self._contents:
      is_call = lambda equation: self.list_of(equation.primitive) == "call"
      self._contents[body] = frozenset(e.primitive for e in equations_in(body, is_call))
    return self._contents[body]

  def primitives(self, equations: Iterable[JaxprEqn]) -> set[Primitive]:
    """Returns the primitives of equations, including their bodies."""
    found = set()
    for equation in equations:
      found.add(equation.primitive)
      found.update(*(self.contents(body) for body in bodies_of(equation)))
    return found

  def inside(self, equation: JaxprEqn, half: np.dtype | None) -> set[str]:
    """Returns the lists of the primitives in an equation's bodies."""
    return {self.list_of(p, half) for body in bodies_of(equation) for p in self.contents(body)}

  def may_recompute(self, equation: JaxprEqn) -> bool:
    """Returns whether the backward pass may recompute an equation instead of saving its result."""
    inside = {equation.primitive}
    if self.list_of(equation.primitive) == "call":
      kind = call_kind(equation)
      if kind is None or not kind.runs_once:
        return False
      inside = set().union(*(self.contents(body) for body in bodies_of(equation)))
    plain = (p for p in inside if self.list_of(p) != "call")
    return all(facts(p).recompute for p in plain) and not equation.effects

  def is_cheap(self, equation: JaxprEqn, path: str) -> bool:
    """Returns whether recomputing an equation costs no more than reading its result.

    False for a custom derivative or batching rule: it need not be linear, and would run once for each copy.
    """
    inside = self.primitives([equation])
    dear = any(facts(p).traits & _DEAR or self.list_of(p) == "deny" for p in inside)
    custom = any(row.call is not None and row.call.is_custom_rule for row in map(facts, inside))
    again = self.computes_again(path) and self.may_recompute(equation)
    return again and not dear and not custom

  def has_region(self, equation: JaxprEqn) -> bool:
    """Returns whether an equation's bodies hold a region of `half_precision`."""
    return any(has_region(open_jaxpr(body)) for body in bodies_of(equation))


class ByRules(Forward[F]):
  """A forward analysis that enters the calls that autocast enters, for every policy.

  Args:
    rules: the rules.
  """

  def __init__(self, rules: CastingRules):
    self._rules = rules

  def enters(self, equation: JaxprEqn) -> bool:
    return self._rules.list_of(equation.primitive) == "call"


def require_recompute(recompute: str) -> str:
  """Returns `recompute`.

  Raises:
    ValueError: if `autocast` does not take it.
  """
  if recompute not in RECOMPUTE:
    raise ValueError(
      f"recompute={recompute!r}: expected {' or '.join(RECOMPUTE)}{instead(recompute, 'recompute')}"
    )
  return recompute


def make_rules(
  policy: Policy,
  ops: OpLists | None,
  overrides: Mapping[str, PolicyLike] | None,
  recompute: str = "islands",
) -> CastingRules:
  """Returns the rules for autocast's arguments.

  Raises:
    ValueError: for an invalid argument, for FP8 products that would not run in half precision, and for a
      `grad_dtype` that products cannot return.
  """
  if policy.fp8 and policy.compute_dtype.itemsize != 2:
    raise ValueError(
      f"fp8={brief(policy.fp8)!r} with compute_dtype={policy.compute_dtype.name!r}: FP8 products replace "
      "half-precision products, and return half precision; use compute_dtype bfloat16, as base: fp8 does"
    )
  wide_gradients = policy.grad_dtype is None or policy.grad_dtype.itemsize == 4
  if policy.grad_dtype is not None and not wide_gradients and policy.grad_dtype != policy.compute_dtype:
    raise ValueError(
      f"grad_dtype={policy.grad_dtype.name!r} with compute_dtype={policy.compute_dtype.name!r}: gradients of "
      f"parameters come from matrix products in float32 or in {policy.compute_dtype.name}; choose one"
    )
  by_module = Overrides(policy, overrides)
  if not wide_gradients and by_module.recipes:
    raise ValueError(
      f"grad_dtype={policy.compute_dtype.name!r} with FP8: an FP8 product gives the gradient of a float32 "
      "parameter in float32; leave grad_dtype out"
    )
  return CastingRules(
    ops=ops,
    changed=changed(ops) if ops else frozenset(),
    overrides=by_module,
    accum_dtype=policy.accum_dtype,
    wide_gradients=wide_gradients,
    recompute=require_recompute(recompute),
  )
