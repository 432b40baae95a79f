"""Higher-order primitives under autocast: the decisions about their bodies, and their emission.

A rule keeps the primitive's promises: the name, shardings and donation of a `jit`, the policy of a
`checkpoint`, one stable dtype for a loop's carry, the user's derivative rule of a `custom_vjp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import numpy as np

from mpjax import _compat
from mpjax._types import AnyJaxpr, Array, Jaxpr, JaxprEqn, PyTree
from mpjax.casting import _derivative_rules, _loop_carry
from mpjax.casting._cast_plan import Call
from mpjax.casting._gradient_sums import MANY, use, widened
from mpjax.casting._kinds import Held, Kind, Where, as_held, initial, meet
from mpjax.jaxpr import CallKind, as_traced, bodies_of, joined_branches, open_jaxpr, scan_parts, while_loop
from mpjax.products import as_product, spread

if TYPE_CHECKING:
  from mpjax.casting._decide import Bodies
  from mpjax.casting._emit import Emitter

# Entered if their operands are half precision, even without a product inside.
LOOPS = frozenset((CallKind.SCAN, CallKind.WHILE, CallKind.COND, CallKind.SHARD_MAP))
_ScanRow = tuple[Sequence[Array], dict[int, Array], dict[int, PyTree]]  # xs, probes of amaxes and of taps
Wanted = Sequence[np.dtype | None]  # for each result, the half dtype that all its readers want, or None


class Rule(NamedTuple):
  """The rule for a kind of call: its decision and its emission.

  Attributes:
    decide: (equation, how its operands are held, wanted, decider for its bodies) -> Call.
    emit: (call, operands, emit) -> results, as `call.outs` says.
  """

  decide: Callable[[JaxprEqn, Sequence[Held], Wanted, Bodies], Call]
  emit: Callable[[Call, Sequence[Array], Emitter], list[Array]]


def _constants(jaxpr: AnyJaxpr) -> list[Held]:
  return [initial(v.aval) for v in open_jaxpr(jaxpr).constvars]


def _decide_simple(equation: JaxprEqn, held: Sequence[Held], wanted: Wanted, bodies: Bodies) -> Call:
  (body,) = bodies_of(equation)[:1]
  plan = bodies(body, [*_constants(body), *held], wanted)
  return Call(equation, tuple(held), (plan,), plan.outs, bodies)


def _emit_jit(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  side, n = emit.within(call.plans), len(operands)
  within = emit.replace(side)

  def inside(*xs: Array) -> list[Array]:
    return call.body(within.replace(side.with_arrays(xs[n:])))(*xs[:n])

  closed = jax.make_jaxpr(within.once(call, inside))(*operands, *side.arrays)
  with as_traced(call.equation):
    return _compat.bind_jit(call.equation, list(operands), side.arrays, closed)


def _emit_inline(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  with as_traced(call.equation):
    return call.body(emit)(*operands)


def _decide_remat(equation: JaxprEqn, held: Sequence[Held], wanted: Wanted, bodies: Bodies) -> Call:
  (body,) = bodies_of(equation)[:1]
  # Islands would be recomputed twice: by this checkpoint and by their own.
  plan = bodies(body, [*_constants(body), *held], wanted, islands=False)
  return Call(equation, tuple(held), (plan,), plan.outs, bodies)


def _emit_remat(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  jaxpr, constants = _compat.trace_open(call.body(emit), list(operands))
  policy = call.equation.params["policy"]
  if policy is not None:
    policy = as_product(policy)
  with as_traced(call.equation):
    return _compat.bind(call.equation, [*constants, *operands], jaxpr=jaxpr, policy=policy)


def _decide_scan(equation: JaxprEqn, held: Sequence[Held], wanted: Wanted, bodies: Bodies) -> Call:
  body = equation.params["jaxpr"]
  k, n, _ = scan_parts(equation)
  outs_wanted = [None] * n + list(wanted[n:])
  before, entering, rows = [*_constants(body), *held[:k]], held[k : k + n], held[k + n :]
  plan, carry = _loop_carry.settle(bodies, body, before, entering, rows, outs_wanted)
  kept = [one.held for one in carry]
  outs = _loop_carry.after_loop([*kept, *plan.outs[n:]])
  return Call(equation, (*held[:k], *kept, *held[k + n :]), (plan,), outs, bodies, carry)


def _emit_scan(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  k, n, options = scan_parts(call.equation)
  side = emit.within(call.plans)
  captured = list(zip(operands[:k], call.ins[:k], strict=True))
  wide = {
    i: widened(x) for i, (x, h) in enumerate(captured) if h.kind is Kind.HALF and options["length"] > MANY
  }
  # A probe for each step: their cotangents are merged by the largest; a constant's would be added.
  probes = {number: spread(probe, options["length"]) for number, probe in side.amax_probes.items()}

  def step(carry: Sequence[Array], row: _ScanRow) -> tuple[list[Array], list[Array]]:
    xs, amax_probes, tap_probes = row
    own = side._replace(amax_probes=amax_probes, tap_probes=tap_probes)
    read = [use(x, wide[i]) if i in wide else x for i, (x, _) in enumerate(captured)]
    out = call.body(emit.replace(own))(*read, *carry, *xs)
    return _as_carry(call, out[:n]), out[n:]

  with as_traced(call.equation):
    carry, ys = jax.lax.scan(
      step, list(operands[k : k + n]), (operands[k + n :], probes, side.tap_probes), **options
    )
  return [*carry, *ys]


def _as_carry(call: Call, out: Sequence[Array]) -> list[Array]:
  return [as_held(x, one.held) for x, one in zip(out, call.carry, strict=True)]


def _decide_while(equation: JaxprEqn, held: Sequence[Held], wanted: Wanted, bodies: Bodies) -> Call:
  p = equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  in_condition, in_body, entering = held[:first], held[first : first + second], held[first + second :]
  body = p["body_jaxpr"]
  plan, carry = _loop_carry.settle(bodies, body, [*_constants(body), *in_body], entering)
  kept = [one.held for one in carry]
  condition = bodies(p["cond_jaxpr"], [*_constants(p["cond_jaxpr"]), *in_condition, *kept])
  # In the order of the bodies in the parameters.
  order = {"cond_jaxpr": condition, "body_jaxpr": plan}
  plans = tuple(order[key] for key in p if key in order)
  ins = (*in_condition, *in_body, *kept)
  return Call(equation, ins, plans, _loop_carry.after_loop(kept), bodies, carry)


def _emit_while(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  p = call.equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  keys = [key for key in p if key in ("cond_jaxpr", "body_jaxpr")]
  condition = call.body(emit, keys.index("cond_jaxpr"))
  body = call.body(emit, keys.index("body_jaxpr"))

  def step(carry: Sequence[Array]) -> list[Array]:
    return _as_carry(call, body(*operands[first : first + second], *carry))

  with as_traced(call.equation):
    go_on = lambda carry: condition(*operands[:first], *carry)[0]
    return while_loop(call.equation, go_on, step, list(operands[first + second :]))


def _decide_cond(equation: JaxprEqn, held: Sequence[Held], wanted: Wanted, bodies: Bodies) -> Call:
  branches = equation.params["branches"]
  plans = tuple(bodies(branch, [*_constants(branch), *held[1:]], wanted) for branch in branches)
  outs = tuple(meet(column, Where.BRANCHES) for column in zip(*(plan.outs for plan in plans), strict=True))
  return Call(equation, tuple(held), plans, outs, bodies)


def _emit_cond(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  def branch(i: int) -> tuple[Jaxpr, list[Array]]:
    body = call.body(emit, i)

    def same(*xs: Array) -> list[Array]:
      return [as_held(x, h) for x, h in zip(body(*xs), call.outs, strict=True)]

    return _compat.trace_open(same, list(operands[1:]))

  traced = [branch(i) for i in range(len(call.plans))]
  consts = [c for _, own in traced for c in own]
  branches = joined_branches(traced, list(operands[1:]))
  with as_traced(call.equation):
    return _compat.bind(call.equation, [operands[0], *consts, *operands[1:]], branches=branches)


def _emit_shard_map(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  side, n = emit.within(call.plans), len(operands)
  scales, probes = jax.tree.leaves(side.scales), jax.tree.leaves(side.amax_probes)

  def inside(*xs: Array) -> tuple[Array, ...]:
    own = [*xs[n : n + len(scales)], *(probe[0] for probe in xs[n + len(scales) :])]
    return tuple(call.body(emit.replace(side.with_arrays(own)))(*xs[:n]))

  with as_traced(call.equation):
    mapped, devices = _compat.shard_map_like(call.equation, inside, len(scales), len(probes))
    # A probe for each device: their cotangents are merged by the largest.
    return list(mapped(*operands, *scales, *(spread(probe, devices) for probe in probes)))


RULES: dict[CallKind | None, Rule] = {
  CallKind.JIT: Rule(_decide_simple, _emit_jit),
  CallKind.INLINE: Rule(_decide_simple, _emit_inline),
  CallKind.REMAT: Rule(_decide_remat, _emit_remat),
  CallKind.SCAN: Rule(_decide_scan, _emit_scan),
  CallKind.WHILE: Rule(_decide_while, _emit_while),
  CallKind.COND: Rule(_decide_cond, _emit_cond),
  CallKind.SHARD_MAP: Rule(_decide_simple, _emit_shard_map),
  CallKind.CUSTOM_JVP: Rule(_decide_simple, _derivative_rules.emit_custom_jvp),
  CallKind.CUSTOM_VJP: Rule(_decide_simple, _derivative_rules.emit_custom_vjp),
  CallKind.CUSTOM_VMAP: Rule(_decide_simple, _derivative_rules.emit_custom_vmap),
}
