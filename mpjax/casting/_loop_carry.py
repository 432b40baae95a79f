"""The carry of a loop: its one dtype for every step, and the reason."""

from __future__ import annotations

import enum
import functools
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import jax
import numpy as np

from mpjax._types import AnyJaxpr, Atom, JaxprEqn, Var
from mpjax.casting._cast_plan import CastPlan, LoopCarry, Mode
from mpjax.casting._kinds import FLOAT32, Held, Kind, Where, is_float, meet
from mpjax.casting._loop_facts import loop_facts
from mpjax.casting._reasons import Code
from mpjax.jaxpr import Trait, bodies_of, has, inside, is_variable, open_jaxpr, variables_of

if TYPE_CHECKING:
  from mpjax.casting._decide import Bodies


def settle(
  bodies: Bodies,
  jaxpr: AnyJaxpr,
  before: Sequence[Held],
  entering: Sequence[Held],
  after: Sequence[Held] = (),
  wanted: Sequence[np.dtype | None] = (),
) -> tuple[CastPlan, tuple[LoopCarry, ...]]:
  """Decides about a loop's body whose carry leaves as it enters.

  Args:
    bodies: decides about the loop's bodies.
    jaxpr: the body.
    before: how the constants and inputs before the carry are held.
    entering: how the carry is held before the loop.
    after: how the inputs after the carry are held.
    wanted: see `Bodies`.

  Returns:
    The body's plan, and how each carry is held.
  """
  n, rules = len(entering), bodies.outside.rules
  set_at = lambda i: rules.overrides.loop_carry_at(inside(bodies.path, f"carry_{i}"))
  settings = [None if h.kind is Kind.FIXED else set_at(i) for i, h in enumerate(entering)]
  carry = [_as_set(held, setting, bodies.half) for held, setting in zip(entering, settings, strict=True)]
  layers = loop_facts(bodies.equation, rules).layers
  for _ in range(n + 3):  # a kind may move by one carry in each round
    plan = bodies(jaxpr, [*before, *carry, *after], wanted)
    entries = plan.inputs[len(before) : len(before) + n]
    merged = [
      LoopCarry(first, f"an override sets {setting}")
      if setting is not None
      else _merged(first, last, *_flow(plan, v, atom, own, bodies))
      for setting, first, last, v, atom, own in zip(
        settings, carry, plan.outs[:n], entries, plan.jaxpr.outvars[:n], layers, strict=True
      )
    ]
    if [one.held for one in merged] == carry:
      return plan, tuple(merged)
    carry = [one.held for one in merged]
  why = "no other dtype is the same at each step"
  carry = [c if c.kind is Kind.FIXED else Held(Kind.PINNED, FLOAT32) for c in carry]
  return bodies(jaxpr, [*before, *carry, *after], wanted), tuple(LoopCarry(c, why) for c in carry)


def after_loop(outs: Sequence[Held]) -> tuple[Held, ...]:
  """Returns how the final carry is held outside the loop: a memory exists only inside."""
  return tuple(h._replace(kind=Kind.ISLAND) if h.kind is Kind.RUNNING else h for h in outs)


def _merged(first: Held, last: Held, half: np.dtype | None, why: str) -> LoopCarry:
  """Returns the one way to hold a carry, from how it enters and how it leaves the body; see `_flow`."""
  both = after_loop([first, last])  # this round decides itself whether a carry is a memory
  wide = any(held.wide for held in both)
  held = meet(both, Where.CARRY, half is None or wide, half)
  if held.kind not in (Kind.HALF, Kind.RUNNING):
    return LoopCarry(held, Code[held.kind.name].sentence())
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


_LOGARITHMS = frozenset({jax.lax.log_p, jax.lax.log1p_p})


def _way(equation: JaxprEqn) -> _Way:
  if bodies_of(equation):
    inner = (e for body in bodies_of(equation) for e in open_jaxpr(body).eqns if is_float(e.outvars[0].aval))
    return functools.reduce(operator.or_, map(_way, inner), _Way.NONE)
  if has(equation, Trait.SCALES):
    return _Way.SCALED
  moves = has(equation, Trait.MOVES | Trait.PASSES_ON) or equation.primitive is jax.lax.select_n_p
  return _Way.NONE if moves else _Way.ADDED


def _flow(
  plan: CastPlan, before: Var, after: Atom, layers: bool, bodies: Bodies
) -> tuple[np.dtype | None, str]:
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
    bodies: decides about the loop's bodies.
  """
  reached, ways = {before}, {before: _Way.NONE}
  product, half = False, bodies.half
  for node in plan.nodes:
    equation = node.equation
    if half is not None and node.half is None and after in equation.outvars:
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
  if half is None:
    return None, (bodies.solver or Code.MODULE).sentence()
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
