"""Higher-order primitives under autocast: how each one's bodies are planned and carried out again.

A rule keeps what the primitive promises: the name, shardings and donation of a `jit`, the policy of a
`checkpoint`, one stable dtype for a loop's carry, the user's derivative rule of a `custom_vjp`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax.casting import _loop_carry
from mpjax.casting._kinds import FLOAT32, Held, Kind, initial
from mpjax.fp8._amax_probe import spread
from mpjax.fp8._dot_general import as_product
from mpjax.jaxpr import CallKind, call_kind

# Entered when what they are given is half precision, even without a product inside.
LOOPS = frozenset((CallKind.SCAN, CallKind.WHILE, CallKind.COND, CallKind.SHARD_MAP))

PlanBody = Callable[..., Any]  # (jaxpr, held, wanted) -> Plan
Run = Any  # `interpret.Run`: (plan, inputs) -> outputs, as plan.outs says


@dataclasses.dataclass
class Call:
  """A planned higher-order equation: how its operands are held, the plans of its bodies, its results."""

  equation: Any
  ins: list[Held]
  plans: list[Any]
  outs: list[Held]
  plan_body: PlanBody
  carry: list[Held] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Rule:
  """Two functions for a kind of call.

  Attributes:
    plan: (equation, how its operands are held, wanted, plan_body) -> Call.
    emit: (call, operands, run) -> results, as `call.outs` says.
  """

  plan: Callable[..., Call]
  emit: Callable[[Call, list[Any], Run], list[Any]]


def cast(x: Any, held: Held) -> Any:
  """`x` in the dtype that a value is held in."""
  if held.kind is Kind.FIXED or x.dtype == held.dtype:
    return x
  return jax.lax.convert_element_type(x, held.dtype)


def alignment(equation: Any) -> list[tuple[Any, list[int]]]:
  """Each body of a higher-order equation, with the operand that each of its inputs is."""
  kind, parameters = call_kind(equation), equation.params
  n = len(equation.invars)
  if kind is CallKind.WHILE:
    first, second = parameters["cond_nconsts"], parameters["body_nconsts"]
    rest = list(range(first + second, n))
    return [
      (parameters["cond_jaxpr"], [*range(first), *rest]),
      (parameters["body_jaxpr"], [*range(first, first + second), *rest]),
    ]
  if kind is CallKind.COND:
    return [(branch, list(range(1, n))) for branch in parameters["branches"]]
  found = _compat.bodies(equation)[:1]
  return [(body, list(range(n))) for body in found if len(_compat.open_jaxpr(body).invars) == n]


def by_step(probe: Any) -> bool:
  """Whether a probe of a looked-at value, of two axes, has a row for each step of the loop at hand."""
  return probe.ndim > 2


def _constants(jaxpr: Any) -> list[Held]:
  return [initial(v.aval) for v in _compat.open_jaxpr(jaxpr).constvars]


def _plan_simple(equation: Any, held: list[Held], wanted: Any, plan_body: PlanBody) -> Call:
  (body,) = _compat.bodies(equation)[:1]
  plan = plan_body(body, [*_constants(body), *held], wanted)
  return Call(equation, held, [plan], plan.outs, plan_body)


def _body(call: Call, run: Run, i: int = 0) -> Callable[..., list[Any]]:
  """The i-th body as a function of its inputs, constants put in."""
  bodies = _compat.bodies(call.equation)
  return lambda *operands: run(call.plans[i], [*_compat.constants(bodies[i]), *operands])


def _emit_jit(call: Call, operands: list[Any], run: Run) -> list[Any]:
  histories, n = run.within(call.plans), len(operands)
  inside = lambda *xs: _body(call, run.replace(histories.with_arrays(xs[n:])))(*xs[:n])
  closed = _compat.trace(inside, [*operands, *histories.arrays])
  with _compat.at(call.equation):
    return _compat.bind_jit(call.equation, operands, histories.arrays, closed)


def _emit_inline(call: Call, operands: list[Any], run: Run) -> list[Any]:
  with _compat.at(call.equation):
    return _body(call, run)(*operands)


def _plan_remat(equation: Any, held: list[Held], wanted: Any, plan_body: PlanBody) -> Call:
  # Islands would be recomputed twice: once by this checkpoint and once by their own.
  bare = lambda *args: plan_body(*args, islands=False)
  return _plan_simple(equation, held, wanted, bare)


def _emit_remat(call: Call, operands: list[Any], run: Run) -> list[Any]:
  jaxpr, constants = _compat.trace_open(_body(call, run), operands)
  policy = call.equation.params["policy"]
  if policy is not None and any(node.fp8 for plan in call.plans for node in plan.all_nodes()):
    policy = as_product(policy)
  with _compat.at(call.equation):
    return _compat.bind(call.equation, [*constants, *operands], jaxpr=jaxpr, policy=policy)


def _plan_scan(equation: Any, held: list[Held], wanted: Any, plan_body: PlanBody) -> Call:
  body = equation.params["jaxpr"]
  k, n, _ = _compat.scan_parts(equation)
  consts = _constants(body)
  outs_wanted = [None] * n + list(wanted[n:])
  plan_with = lambda carry: plan_body(body, [*consts, *held[:k], *carry, *held[k + n :]], outs_wanted)
  plan, carry = _loop_carry.settle(held[k : k + n], plan_with, len(consts) + k, n)
  ins = [*held[:k], *carry, *held[k + n :]]
  return Call(equation, ins, [plan], _loop_carry.after_loop([*carry, *plan.outs[n:]]), plan_body, carry)


def _emit_scan(call: Call, operands: list[Any], run: Run) -> list[Any]:
  k, n, options = _compat.scan_parts(call.equation)
  histories = run.within(call.plans)
  # A probe for each step: what they see is merged by the largest, where a constant's would be added.
  probes = {number: spread(probe, options["length"]) for number, probe in histories.probes.items()}
  apart = {number: probe for number, probe in histories.watches.items() if by_step(probe)}

  def step(carry: Any, xs: Any) -> Any:
    xs, probes, rows = xs
    own = dataclasses.replace(histories, probes=probes, watches={**histories.watches, **rows})
    body = _body(call, run.replace(own))
    out = body(*operands[:k], *carry, *xs)
    return [cast(x, h) for x, h in zip(out[:n], call.carry, strict=True)], out[n:]

  with _compat.at(call.equation):
    carry, ys = jax.lax.scan(step, operands[k : k + n], (operands[k + n :], probes, apart), **options)
  return [*carry, *ys]


def _plan_while(equation: Any, held: list[Held], wanted: Any, plan_body: PlanBody) -> Call:
  p = equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  in_condition, in_body, entering = held[:first], held[first : first + second], held[first + second :]
  consts = _constants(p["body_jaxpr"])
  plan_with = lambda carry: plan_body(p["body_jaxpr"], [*consts, *in_body, *carry])
  plan, carry = _loop_carry.settle(entering, plan_with, len(consts) + second, len(entering))
  condition = plan_body(p["cond_jaxpr"], [*_constants(p["cond_jaxpr"]), *in_condition, *carry])
  ins = [*in_condition, *in_body, *carry]
  # In the order in which the bodies stand in the parameters.
  order = {"cond_jaxpr": condition, "body_jaxpr": plan}
  plans = [order[key] for key in p if key in order]
  return Call(equation, ins, plans, _loop_carry.after_loop(carry), plan_body, carry)


def _emit_while(call: Call, operands: list[Any], run: Run) -> list[Any]:
  p = call.equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  keys = [key for key in p if key in ("cond_jaxpr", "body_jaxpr")]
  condition = _body(call, run, keys.index("cond_jaxpr"))
  body = _body(call, run, keys.index("body_jaxpr"))

  def step(carry: Any) -> Any:
    out = body(*operands[first : first + second], *carry)
    return [cast(x, h) for x, h in zip(out, call.carry, strict=True)]

  with _compat.at(call.equation):
    go_on = lambda carry: condition(*operands[:first], *carry)[0]
    return jax.lax.while_loop(go_on, step, operands[first + second :])


def _plan_cond(equation: Any, held: list[Held], wanted: Any, plan_body: PlanBody) -> Call:
  branches = equation.params["branches"]
  plans = [plan_body(branch, [*_constants(branch), *held[1:]], wanted) for branch in branches]
  outs = [_agree(list(column)) for column in zip(*(plan.outs for plan in plans), strict=True)]
  return Call(equation, held, plans, outs, plan_body)


def _agree(column: list[Held]) -> Held:
  kinds = {held.kind for held in column}
  if Kind.FIXED in kinds or len(kinds) == 1:
    return column[0]._replace(wide=any(held.wide for held in column))
  wide = any(held.wide for held in column)
  for kind in (Kind.PINNED, Kind.STATISTIC):
    if kind in kinds:
      return Held(kind, FLOAT32, wide)
  if Kind.HALF in kinds and not wide:
    return next(held for held in column if held.kind is Kind.HALF)
  return Held(Kind.ISLAND, FLOAT32, wide)


def _emit_cond(call: Call, operands: list[Any], run: Run) -> list[Any]:
  def branch(i: int) -> Any:
    body = _body(call, run, i)
    same = lambda *xs: [cast(x, h) for x, h in zip(body(*xs), call.outs, strict=True)]
    return _compat.trace_open(same, operands[1:])

  traced = [branch(i) for i in range(len(call.plans))]
  consts = [c for _, own in traced for c in own]
  branches = _compat.joined_branches(traced, operands[1:])
  with _compat.at(call.equation):
    return _compat.bind(call.equation, [operands[0], *consts, *operands[1:]], branches=branches)


def _emit_shard_map(call: Call, operands: list[Any], run: Run) -> list[Any]:
  histories, n = run.within(call.plans), len(operands)
  scales, probes = list(histories.scales.values()), list(histories.probes.values())

  def inside(*xs: Any) -> Any:
    own = [*xs[n : n + len(scales)], *(probe[0] for probe in xs[n + len(scales) :])]
    return tuple(_body(call, run.replace(histories.with_arrays(own)))(*xs[:n]))

  with _compat.at(call.equation):
    mapped, devices = _compat.shard_map_like(call.equation, inside, len(scales), len(probes))
    # A probe for each device: what they see is merged by the largest.
    return list(mapped(*operands, *scales, *(spread(probe, devices) for probe in probes)))


def _emit_custom_jvp(call: Call, operands: list[Any], run: Run) -> list[Any]:
  body = _body(call, run)
  rule = _compat.custom_jvp_rule(call.equation)
  avals = [a.aval for a in call.equation.invars]
  moving = [i for i, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.inexact)]

  @jax.custom_jvp
  def f(*primals: Any) -> Any:
    return tuple(body(*primals))

  @f.defjvp
  def _(primals: Any, tangents: Any) -> Any:
    still = {i: tangents[i] for i in range(len(avals)) if i not in moving}

    def flat(*xs: Any) -> list[Any]:
      of = dict(zip(moving, xs[len(avals) :], strict=True)) | still
      return rule(*xs[: len(avals)], *(of[i] for i in range(len(avals))))

    like = [*map(_struct, avals), *(_struct(avals[i]) for i in moving)]
    held = [*call.ins, *(call.ins[i] for i in moving)]
    values = [*primals, *(tangents[i] for i in moving)]
    out = _interpret(call, run, flat, like, held, values, tangents=len(moving))
    n = len(call.outs)
    value = tuple(cast(x, h) for x, h in zip(out[:n], call.outs, strict=True))
    return value, tuple(cast(x, h) for x, h in zip(out[n:], call.outs, strict=True))

  with _compat.at(call.equation):
    return list(f(*operands))


def _emit_custom_vjp(call: Call, operands: list[Any], run: Run) -> list[Any]:
  body = _body(call, run)
  forward, backward = _compat.custom_vjp_rules(call.equation)
  avals = [a.aval for a in call.equation.invars]
  notes: dict[str, Any] = {}

  @jax.custom_vjp
  def f(*xs: Any) -> Any:
    return tuple(body(*xs))

  def f_forward(*primals: Any) -> Any:
    xs = [primal.value for primal in primals]

    def flat(*xs: Any) -> list[Any]:
      residuals, outs = forward(list(xs), [primal.perturbed for primal in primals])
      notes["residuals"] = [jax.typeof(r) for r in residuals]
      return [*outs, *residuals]

    closed = _compat.trace(flat, list(map(_struct, avals)))
    plan = call.plan_body(closed, [*_constants(closed), *call.ins])
    out = run(plan, [*_compat.constants(closed), *xs])
    n = len(call.outs)
    notes["held"] = plan.outs[n:]
    return tuple(cast(x, h) for x, h in zip(out[:n], call.outs, strict=True)), tuple(out[n:])

  def f_backward(residuals: Any, cotangents: Any) -> Any:
    def flat(*xs: Any) -> list[Any]:
      out = backward(list(xs[: len(residuals)]), list(xs[len(residuals) :]))
      notes["given"] = [x is not None and x.dtype != jax.dtypes.float0 for x in out]
      return [x for x, given in zip(out, notes["given"], strict=True) if given]

    zero = lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.custom_derivatives.SymbolicZero) else x
    cotangents = [zero(x) for x in cotangents]
    results = [v.aval for v in call.equation.outvars]
    like = [*map(_struct, notes["residuals"]), *map(_struct, results)]
    out = iter(_interpret(call, run, flat, like, [*notes["held"], *call.outs], [*residuals, *cotangents]))
    return tuple(
      cast(next(out), h) if given else None for h, given in zip(call.ins, notes["given"], strict=True)
    )

  # With these the rule is told truly which operands are differentiated: its constants are not.
  f.defvjp(f_forward, f_backward, symbolic_zeros=True)
  with _compat.at(call.equation):
    return list(f(*operands))


def _emit_custom_vmap(call: Call, operands: list[Any], run: Run) -> list[Any]:
  body = _body(call, run)
  f = jax.custom_batching.custom_vmap(lambda *xs: tuple(body(*xs)))
  parameters = call.equation.params

  @f.def_vmap
  def _(axis_size: int, in_batched: Any, *xs: Any) -> Any:
    notes: dict[str, Any] = {}
    shape = lambda aval, batched: (axis_size, *aval.shape) if batched else aval.shape
    like = [
      jax.ShapeDtypeStruct(shape(a.aval, b), a.aval.dtype)
      for a, b in zip(call.equation.invars, in_batched, strict=True)
    ]

    def flat(*xs: Any) -> list[Any]:
      unflatten = lambda leaves: jax.tree.unflatten(parameters["in_tree"], list(leaves))
      out, batched = parameters["rule"](axis_size, unflatten(in_batched), *unflatten(xs))
      notes["batched"] = tuple(jax.tree.leaves(batched))
      return jax.tree.leaves(out)

    out = _interpret(call, run, flat, like, call.ins, list(xs))
    return tuple(cast(x, h) for x, h in zip(out, call.outs, strict=True)), notes["batched"]

  with _compat.at(call.equation):
    return list(f(*operands))


def _interpret(
  call: Call,
  run: Run,
  flat: Any,
  like: list[Any],
  held: list[Held],
  operands: list[Any],
  tangents: int = 0,
) -> list[Any]:
  """A derivative or batching rule, traced in the dtypes it was written for and carried out in ours.

  The last `tangents` of the operands are tangents, in which the rule has to stay linear.
  """
  closed = _compat.trace(flat, like)
  plan = call.plan_body(closed, [*_constants(closed), *held], tangents=tangents)
  return run(plan, [*_compat.constants(closed), *operands])


def _struct(aval: Any) -> Any:
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


RULES: dict[CallKind | None, Rule] = {
  CallKind.JIT: Rule(_plan_simple, _emit_jit),
  CallKind.INLINE: Rule(_plan_simple, _emit_inline),
  CallKind.REMAT: Rule(_plan_remat, _emit_remat),
  CallKind.SCAN: Rule(_plan_scan, _emit_scan),
  CallKind.WHILE: Rule(_plan_while, _emit_while),
  CallKind.COND: Rule(_plan_cond, _emit_cond),
  CallKind.SHARD_MAP: Rule(_plan_simple, _emit_shard_map),
  CallKind.CUSTOM_JVP: Rule(_plan_simple, _emit_custom_jvp),
  CallKind.CUSTOM_VJP: Rule(_plan_simple, _emit_custom_vjp),
  CallKind.CUSTOM_VMAP: Rule(_plan_simple, _emit_custom_vmap),
}
