"""The decisions about the bodies of calls, and about the values that a loop carries."""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
from collections.abc import Sequence

import jax
import numpy as np

from mpjax._types import Atom, JaxprEqn, Var
from mpjax.casting._cast_plan import Call, CastPlan, LoopCarry, Mode
from mpjax.casting._casting_rules import CastingRules
from mpjax.casting._kinds import FLOAT32, Held, Kind, is_float, joined, strongest
from mpjax.casting._reasons import Code
from mpjax.casting._sources import loop_facts
from mpjax.jaxpr import (
  CallKind,
  CallLayout,
  Trait,
  bodies_of,
  call_kind,
  call_layout,
  has,
  inside,
  is_variable,
  open_jaxpr,
  variables_of,
)

_LOGARITHMS = frozenset({jax.lax.log_p, jax.lax.log1p_p})


def decide_bodies(call: Call, rules: CastingRules) -> Call:
  """Returns a call with the decisions about its bodies."""
  layout = call_layout(call.equation)
  if call_kind(call.equation) in (CallKind.SCAN, CallKind.WHILE):
    return _decide_loop(call, layout, rules)
  bodies = enumerate(layout.bodies)
  plans = tuple(call.decide(i, jaxpr, [call.ins[k] for k in ins]) for i, (jaxpr, ins, _) in bodies)
  outs = plans[0].outs
  if len(plans) > 1:
    outs = tuple(_of_branches(column) for column in zip(*(plan.outs for plan in plans), strict=True))
  return dataclasses.replace(call, plans=plans, outs=outs)


def _of_branches(held: Sequence[Held]) -> Held:
  """Returns how a result of several branches is held."""
  kind = strongest(held)
  return joined(held, Kind.ISLAND if kind is Kind.HALF and any(h.wide for h in held) else kind)


def _decide_loop(call: Call, layout: CallLayout, rules: CastingRules) -> Call:
  """Decides about a loop, whose carry leaves its step as it enters."""
  n, start, last = len(layout.carry), layout.carry.start, len(layout.bodies) - 1

  def decide(i: int, carry: Sequence[Held]) -> CastPlan:
    body, ins = layout.bodies[i], [*call.ins[:start], *carry, *call.ins[start + n :]]
    return call.decide(i, body.jaxpr, [ins[k] for k in body.operands])

  set_at = lambda i: rules.overrides.at(inside(call.path, f"carry_{i}")).loop_carry
  entering = call.ins[start : start + n]
  settings = [None if h.kind is Kind.FIXED else set_at(i) for i, h in enumerate(entering)]
  carry = [_as_set(held, setting, call.half) for held, setting in zip(entering, settings, strict=True)]
  layers = loop_facts(call.equation, rules).layers
  for _ in range(n + 3):  # a kind may move by one carry in each round
    plan = decide(last, carry)
    inputs = zip(plan.jaxpr.invars, layout.bodies[last].operands, strict=True)
    entries = [v for v, k in inputs if k in layout.carry]
    merged = [
      LoopCarry(first, f"an override sets {setting}")
      if setting is not None
      else _merged(first, left, *_flow(plan, v, atom, own, call))
      for setting, first, left, v, atom, own in zip(
        settings, carry, plan.outs[:n], entries, plan.jaxpr.outvars[:n], layers, strict=True
      )
    ]
    if [one.held for one in merged] == carry:
      break
    carry = [one.held for one in merged]
  else:
    carry = [c if c.kind is Kind.FIXED else Held(Kind.PINNED, FLOAT32) for c in carry]
    merged = [LoopCarry(c, "no other dtype is the same at each step") for c in carry]
    plan = decide(last, carry)
  return dataclasses.replace(
    call,
    ins=(*call.ins[:start], *carry, *call.ins[start + n :]),
    plans=(*(decide(i, carry) for i in range(last)), plan),
    outs=_after_loop([*carry, *plan.outs[n:]]),
    carry=tuple(merged),
  )


def _after_loop(outs: Sequence[Held]) -> tuple[Held, ...]:
  """Returns how the final carry is held outside the loop: a memory exists only inside."""
  return tuple(h._replace(kind=Kind.ISLAND) if h.kind is Kind.RUNNING else h for h in outs)


def _merged(first: Held, last: Held, half: np.dtype | None, why: str) -> LoopCarry:
  """Returns the one way to hold a carry, from how it enters and how it leaves the body; see `_flow`."""
  both = _after_loop([first, last])  # this round decides itself whether a carry is a memory
  wide = any(held.wide for held in both)
  kind = strongest(both)
  if kind not in (Kind.RUNNING, Kind.HALF, Kind.ISLAND):
    return LoopCarry(joined(both, kind), Code[kind.name].sentence())
  held = joined(both, Kind.RUNNING if half is None or wide else Kind.HALF, half)
  return LoopCarry(held, "it may be outside the half-precision range" if half and wide else why)


def _as_set(held: Held, setting: str | None, half: np.dtype | None) -> Held:
  """Returns how a carry is held, by the user's setting if there is one."""
  if setting is None:
    return held
  if setting == "half" and half is not None:
    return Held(Kind.HALF, half)
  return Held(Kind.RUNNING, FLOAT32, held.wide)


class _Way(enum.Flag):
  """What happens to a carry on its way to the next step."""

  NONE = 0  # it is moved
  ADDED = enum.auto()
  SCALED = enum.auto()
  LOGARITHM = enum.auto()  # of a value from products with it


def _way(equation: JaxprEqn) -> _Way:
  if bodies_of(equation):
    inner = (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns if is_float(e.outvars[0].aval))
    return functools.reduce(operator.or_, map(_way, inner), _Way.NONE)
  if has(equation, Trait.SCALES):
    return _Way.SCALED
  moves = has(equation, Trait.MOVES | Trait.PASSES_ON) or equation.primitive is jax.lax.select_n_p
  return _Way.NONE if moves else _Way.ADDED


def _flow(plan: CastPlan, before: Var, after: Atom, layers: bool, call: Call) -> tuple[np.dtype | None, str]:
  """Returns the half dtype that may hold a carry on its path through the body of its loop, and the reason.

  A carry that reaches a matrix product in the body is an activation that passes through layers, or a cache
  that is updated. A carry that is only added to is a sum. A carry that is multiplied on its way to the next
  step decays. A carry to which the same network adds at each step belongs to a simulation or a sampler. The
  last three remember many steps.

  Args:
    plan: the plan of the body.
    before: the carry as it enters the body.
    after: the carry as it leaves.
    layers: whether a product of the carry and weights of the step's own makes the next one.
    call: the loop.
  """
  reached, ways = {before}, {before: _Way.NONE}
  product, half = False, call.half
  if half is None:
    return None, (call.solver or Code.MODULE).sentence()
  for node in plan.nodes:
    equation = node.equation
    if node.half is None and after in equation.outvars:
      return None, "it is computed in a region in float32"
    variables = variables_of(equation.invars)
    if any(a in reached for a in variables):
      reached.update(equation.outvars)
      product = product or (node.multiplies and node.mode is not Mode.FULL)
    past = [ways[a] for a in variables if a in ways]
    exact = node.mode is Mode.FULL and has(equation, Trait.PRODUCT)
    if past and (node.listed == "infer" or exact):
      way = _Way.SCALED if exact else _way(equation)
      ways.update(dict.fromkeys(equation.outvars, functools.reduce(operator.or_, past, way)))
    elif equation.primitive in _LOGARITHMS and any(a in reached for a in variables):
      ways.update(dict.fromkeys(equation.outvars, _Way.LOGARITHM))
  if not product:
    return None, "no matrix product in the loop reads it: a sum or a state over many steps"
  if not is_variable(after) or after not in ways:
    return half, "each step makes it anew by matrix products: activations that pass through layers"
  if _Way.LOGARITHM in ways[after]:
    return None, "each step goes on from a logarithm: a log-probability of many steps"
  if _Way.SCALED in ways[after]:
    return None, "it is multiplied on its way to the next step: a memory that decays"
  if not ways[after]:
    return half, "each step moves it or writes to it: a cache"
  if not layers:
    return None, "each step adds a result of the same weights: a memory of many steps"
  if plan.held[after].kind in (Kind.ISLAND, Kind.RUNNING) and any(
    after in node.equation.invars for node in plan.nodes
  ):
    return None, "each step adds to float32 data, which more than layers read"
  return half, "each step adds a layer with weights of its own: activations that pass through layers"
