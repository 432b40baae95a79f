"""The carry of a loop: one way in which it is held, from step to step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mpjax import _compat
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable
from mpjax.jaxpr import Trait, has


def settle(entering: list[Held], plan_with: Callable[[list[Held]], Any], offset: int, n: int) -> Any:
  """The plan of a loop's body whose carry leaves as it enters."""
  carry = entering
  for _ in range(len(entering) + 3):  # a kind may move by one carry in each round
    plan = plan_with(carry)
    pairs = zip(plan.inputs[offset : offset + n], plan.jaxpr.outvars[:n], strict=True)
    halves = [_half_of_carry(plan, before, after, plan.inputs[:offset]) for before, after in pairs]
    merged = [_carried(c, out, half) for c, out, half in zip(carry, plan.outs[:n], halves, strict=True)]
    if merged == carry:
      return plan, carry
    carry = merged
  pinned = [c if c.kind is Kind.FIXED else Held(Kind.PINNED, FLOAT32) for c in carry]
  return plan_with(pinned), pinned


def after_loop(outs: list[Held]) -> list[Held]:
  """What a loop leaves, seen from outside."""
  return [h._replace(kind=Kind.ISLAND) if h.kind is Kind.RUNNING else h for h in outs]


def _half_of_carry(plan: Any, before: Any, after: Any, constants: Sequence[Any]) -> Any:
  """The half dtype that a loop's carry may be held in when `plan` is that of the loop's body, or `None`.

  One that comes to a matrix product in the body is an activation that passes through layers. One that is
  only added to is a sum; one that is multiplied on its way to the next step decays; one to which the same
  network adds at each step is a simulation's or a sampler's. All of these remember many steps.

  Args:
    before: the carry as it enters the body.
    after: the carry as it leaves.
    constants: inputs of the body that are the same at each step.
  """
  constant = set(constants)
  reached, multiplied = {before}, {before: False}
  product = layers = False
  for node in plan.nodes:
    equation = node.equation
    if node.half is None and after in equation.outvars:  # a region in full precision
      return None
    variables = [a for a in equation.invars if _compat.is_variable(a)]
    if all(a in constant for a in variables):
      constant.update(equation.outvars)
    if any(a in reached for a in variables):
      reached.update(equation.outvars)
      if node.listed == "allow" or node.has_product():
        product = True
        layers |= any(a not in reached and a not in constant and castable(a.aval) for a in variables)
    past = [multiplied[a] for a in variables if a in multiplied]
    if past and node.listed == "infer":
      scales = any(past) or has(equation, Trait.SCALES)
      multiplied.update(dict.fromkeys(equation.outvars, scales))
  remembers = after in multiplied and (multiplied[after] or not layers)
  return plan.rules.overrides.half_at(plan.prefix) if product and not remembers else None


def _carried(first: Held, last: Held, half: Any) -> Held:
  """The one way in which a loop's carry is held, from how it enters and how it leaves the body.

  Args:
    first: how it enters.
    last: how it leaves.
    half: the half dtype that it may be held in, or `None` if it must not: what is only added to, or decays,
      is a memory of many steps, and would stall in half precision.
  """
  kinds = {first.kind, last.kind}
  wide = first.wide or last.wide
  if Kind.FIXED in kinds or kinds == {Kind.FLEXIBLE}:
    return first._replace(wide=wide)
  for kind in (Kind.PINNED, Kind.STATISTIC):
    if kind in kinds:
      return Held(kind, FLOAT32, wide)
  return Held(Kind.RUNNING, FLOAT32, wide) if half is None or wide else Held(Kind.HALF, half)
