"""Executes higher-order primitives, with their bodies and rules under autocast.

A rule keeps the primitive's promises: the name, shardings and donation of a `jit`, the policy of a
`checkpoint`, one stable dtype for a loop's carry, the user's derivative rule of a `custom_vjp`.

A custom derivative or batching rule is a program that exists only once JAX differentiates or batches. It is
traced in its own dtypes, decided about as a whole, and emitted with its casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.custom_derivatives import SymbolicZero

from mpjax import _compat
from mpjax._types import Array, Jaxpr
from mpjax.casting._cast_plan import Call
from mpjax.casting._fp8_products import SideInputs
from mpjax.casting._gradient_sums import MANY, use, widened
from mpjax.casting._half_precision import Regions, tracing
from mpjax.casting._kinds import Held, Kind, as_held
from mpjax.jaxpr import (
  CallKind,
  as_traced,
  constants_of,
  custom_jvp_rule,
  custom_vjp_rules,
  dtype_of,
  joined_branches,
  scan_parts,
  shape_of,
  while_loop,
)
from mpjax.products import as_product, spread

if TYPE_CHECKING:
  from mpjax.casting._emit import Emitter


def _emit_jit(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  side = emit.within(call.plans)

  def inside(operands: Sequence[Array], side: SideInputs) -> list[Array]:
    return emit.body(call, side=side)(*operands)

  closed = jax.make_jaxpr(emit.once(call, side, inside))(operands, side)
  with as_traced(call.equation):
    return _compat.bind_jit(call.equation, list(operands), jax.tree.leaves(side), closed)


def _emit_inline(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  with as_traced(call.equation):
    return emit.body(call)(*operands)


def _emit_remat(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  jaxpr, constants = _compat.trace_open(emit.body(call), list(operands))
  policy = call.equation.params["policy"]
  if policy is not None:
    policy = as_product(policy)
  with as_traced(call.equation):
    return _compat.bind(call.equation, [*constants, *operands], jaxpr=jaxpr, policy=policy)


def _emit_scan(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  k, n, options = scan_parts(call.equation)
  side = emit.within(call.plans)
  captured = list(zip(operands[:k], call.ins[:k], strict=True))
  wide = {
    i: widened(x) for i, (x, h) in enumerate(captured) if h.kind is Kind.HALF and options["length"] > MANY
  }
  # Scales for each step: their cotangents are merged by the largest; a constant's would be added.
  scales = {number: spread(x, options["length"]) for number, x in side.scales.items()}

  def step(
    carry: Sequence[Array], row: tuple[Sequence[Array], SideInputs]
  ) -> tuple[list[Array], list[Array]]:
    xs, own = row
    read = [use(x, wide[i]) if i in wide else x for i, (x, _) in enumerate(captured)]
    out = emit.body(call, side=own)(*read, *carry, *xs)
    return _as_results(call, out[:n]), out[n:]

  with as_traced(call.equation):
    carry, ys = jax.lax.scan(
      step, list(operands[k : k + n]), (operands[k + n :], side._replace(scales=scales)), **options
    )
  return [*carry, *ys]


def _emit_while(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  p = call.equation.params
  first, second = p["cond_nconsts"], p["body_nconsts"]
  condition, body = emit.body(call, 0), emit.body(call, 1)

  def step(carry: Sequence[Array]) -> list[Array]:
    return _as_results(call, body(*operands[first : first + second], *carry))

  with as_traced(call.equation):
    go_on = lambda carry: condition(*operands[:first], *carry)[0]
    return while_loop(call.equation, go_on, step, list(operands[first + second :]))


def _emit_cond(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  def branch(i: int) -> tuple[Jaxpr, list[Array]]:
    body = emit.body(call, i)
    return _compat.trace_open(lambda *xs: _as_results(call, body(*xs)), list(operands[1:]))

  traced = [branch(i) for i in range(len(call.plans))]
  consts = [c for _, own in traced for c in own]
  branches = joined_branches(traced, list(operands[1:]))
  with as_traced(call.equation):
    return _compat.bind(call.equation, [operands[0], *consts, *operands[1:]], branches=branches)


def _emit_shard_map(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  n, (arrays, structure) = len(operands), jax.tree.flatten(emit.within(call.plans))

  def inside(*xs: Array) -> tuple[Array, ...]:
    side = jax.tree.unflatten(structure, [x[0] for x in xs[n:]])
    return tuple(emit.body(call, side=side)(*xs[:n]))

  with as_traced(call.equation):
    mapped, devices = _compat.shard_map_like(call.equation, inside, len(arrays))
    # Scales for each device: their cotangents are merged by the largest.
    return list(mapped(*operands, *(spread(x, devices) for x in arrays)))


def _emit_custom_jvp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_jvp_call` with the user's rule."""
  body = emit.body(call)
  rule = custom_jvp_rule(call.equation)
  inputs = call.equation.invars
  moving = [i for i, a in enumerate(inputs) if jnp.issubdtype(dtype_of(a), jnp.inexact)]

  @jax.custom_jvp
  def f(*primals: Array) -> tuple[Array, ...]:
    return tuple(body(*primals))

  @f.defjvp
  def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    still = {i: tangents[i] for i in range(len(inputs)) if i not in moving}

    def flat(*xs: Array) -> list[Array]:
      of = dict(zip(moving, xs[len(inputs) :], strict=True)) | still
      return rule(*xs[: len(inputs)], *(of[i] for i in range(len(inputs))))

    like = [*(_struct(a.aval) for a in inputs), *(_struct(inputs[i].aval) for i in moving)]
    held = [*call.ins, *(call.ins[i] for i in moving)]
    values = [*primals, *(tangents[i] for i in moving)]
    out, _ = _emit_rule(call, emit, flat, like, held, values, tangents=len(moving))
    n = len(call.outs)
    return tuple(_as_results(call, out[:n])), tuple(_as_results(call, out[n:]))

  with as_traced(call.equation):
    return list(f(*operands))


def _emit_custom_vjp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vjp_call` with the user's rules."""
  body = emit.body(call)
  forward, backward = custom_vjp_rules(call.equation)
  avals = [a.aval for a in call.equation.invars]
  # Facts about the residuals, from the forward rule for the backward rule. Those that are not tracers (a
  # Python bool, an array of constants) are passed on unchanged: the backward rule may branch on them.
  is_traced: list[bool] = []
  kept_types: list[AbstractValue] = []  # the types of the tracers
  kept_held: list[Held] = []

  @jax.custom_vjp
  def f(*xs: Array) -> tuple[Array, ...]:
    return tuple(body(*xs))

  def f_forward(
    *primals: jax.custom_derivatives.CustomVJPPrimal,
  ) -> tuple[tuple[Array, ...], tuple[Any, ...]]:
    known: list[Any] = []

    def flat(*xs: Array) -> list[Array]:
      residuals, outs = forward(list(xs), [primal.perturbed for primal in primals])
      is_traced[:] = [isinstance(r, jax.core.Tracer) for r in residuals]
      kept, known[:] = _parted(is_traced, residuals)
      kept_types[:] = map(jax.typeof, kept)
      return [*outs, *kept]

    values = [primal.value for primal in primals]
    out, held = _emit_rule(call, emit, flat, list(map(_struct, avals)), call.ins, values)
    n = len(call.outs)
    kept_held[:] = held[n:]
    return tuple(_as_results(call, out[:n])), tuple(_merged(is_traced, out[n:], known))

  def f_backward(residuals: Sequence[Any], cotangents: Sequence[Array]) -> tuple[Array | None, ...]:
    given: list[bool] = []
    kept, known = _parted(is_traced, residuals)
    avals_out = [v.aval for v in call.equation.outvars]
    if not _compat.takes_symbolic_zeros(call.equation):
      cotangents = [jnp.zeros(g.shape, g.dtype) if isinstance(g, SymbolicZero) else g for g in cotangents]
    # Zeros stay symbolic: a batched rule asks which results have a cotangent.
    is_given = [not isinstance(g, SymbolicZero) for g in cotangents]
    moving, still = _parted(is_given, cotangents)
    zeros = [_zero_like(g, aval) for g, aval in zip(still, _parted(is_given, avals_out)[1], strict=True)]

    def flat(*xs: Array) -> list[Array]:
      of_results = _merged(is_given, xs[len(kept) :], zeros)
      out = backward(_merged(is_traced, xs[: len(kept)], known), of_results)
      given[:] = [x is not None and x.dtype != jax.dtypes.float0 for x in out]
      return [x for x, is_given in zip(out, given, strict=True) if is_given]

    like = [*map(_struct, kept_types), *map(_struct, _parted(is_given, avals_out)[0])]
    held = [*kept_held, *_parted(is_given, call.outs)[0]]

    def gradients() -> list[bool]:
      return [h.kind is Kind.FLEXIBLE for h, here in zip(call.ins, given, strict=True) if here]

    out, _ = _emit_rule(call, emit, flat, like, held, [*kept, *moving], gradients=gradients)
    results = iter(out)
    return tuple(as_held(next(results), h) if here else None for h, here in zip(call.ins, given, strict=True))

  # Symbolic zeros tell the rule which operands are differentiated: its constants are not.
  f.defvjp(f_forward, f_backward, symbolic_zeros=True)
  with as_traced(call.equation):
    return list(f(*operands))


def _emit_custom_vmap(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vmap_call` with the user's rule."""
  body = emit.body(call)
  f = jax.custom_batching.custom_vmap(lambda *xs: tuple(body(*xs)))
  parameters = call.equation.params

  @f.def_vmap
  def _(axis_size: int, in_batched: Sequence[bool], *xs: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    out_batched: list[bool] = []

    def flat(*xs: Array) -> list[Array]:
      batched, operands = (jax.tree.unflatten(parameters["in_tree"], list(of)) for of in (in_batched, xs))
      out, batched = parameters["rule"](axis_size, batched, *operands)
      out_batched[:] = jax.tree.leaves(batched)
      return jax.tree.leaves(out)

    like = [
      jax.ShapeDtypeStruct((*([axis_size] * is_batched), *shape_of(a)), dtype_of(a))
      for a, is_batched in zip(call.equation.invars, in_batched, strict=True)
    ]
    out, _ = _emit_rule(call, emit, flat, like, call.ins, xs)
    return tuple(_as_results(call, out)), tuple(out_batched)

  with as_traced(call.equation):
    return list(f(*operands))


def _emit_rule(
  call: Call,
  emit: Emitter,
  flat: Callable[..., list[Array]],
  like: Sequence[jax.ShapeDtypeStruct],
  held: Sequence[Held],
  operands: Sequence[Array],
  tangents: int = 0,
  gradients: Callable[[], list[bool]] | None = None,
) -> tuple[list[Array], tuple[Held, ...]]:
  """Returns the results of a rule, and how they are held.

  Args:
    call: the call that the rule is of.
    emit: executes plans.
    flat: the rule, as a function of arrays.
    like: the operands in the program's own dtypes, in which the rule is traced.
    held: how the operands are held.
    operands: the operands.
    tangents: how many of the last are tangents, in which the rule must stay linear.
    gradients: for a backward rule, returns after the trace which results are gradients of parameters.
  """
  # The rule is traced long after the function.
  with tracing(Regions(call.half, instead=tracing.value.instead)):
    closed = jax.make_jaxpr(flat)(*like)
  of_parameters = gradients() if gradients else None
  plan = call.decide(-1, closed, held, tangents=tangents, gradients=of_parameters)
  return emit(plan, [*constants_of(closed), *operands]), plan.outs


def _parted(flags: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
  """Returns the values with a flag, and those without."""
  pairs = list(zip(flags, values, strict=True))
  return [x for flag, x in pairs if flag], [x for flag, x in pairs if not flag]


def _merged(flags: Sequence[bool], flagged: Sequence[Any], others: Sequence[Any]) -> list[Any]:
  """Inverts `_parted`."""
  parts = iter(flagged), iter(others)
  return [next(parts[0] if flag else parts[1]) for flag in flags]


def _as_results(call: Call, out: Sequence[Array]) -> list[Array]:
  """Returns results of a call, the first or all, as they are held: a carry in one dtype for every step."""
  return [as_held(x, h) for x, h in zip(out, call.outs, strict=False)]


def _zero_like(zero: SymbolicZero, aval: AbstractValue) -> SymbolicZero:
  """Returns a zero in the dtype of the program's result; the zero of an integer result has its own dtype."""
  dtype = cast(jax.core.ShapedArray, aval).dtype
  return SymbolicZero(zero.aval.update(dtype=dtype)) if jnp.issubdtype(dtype, jnp.inexact) else zero


def _struct(aval: AbstractValue) -> jax.ShapeDtypeStruct:
  aval = cast(jax.core.ShapedArray, aval)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


# (call, operands, emit) -> results, as `call.outs` says
EMIT: dict[CallKind | None, Callable[[Call, Sequence[Array], Emitter], list[Array]]] = {
  CallKind.JIT: _emit_jit,
  CallKind.INLINE: _emit_inline,
  CallKind.REMAT: _emit_remat,
  CallKind.SCAN: _emit_scan,
  CallKind.WHILE: _emit_while,
  CallKind.COND: _emit_cond,
  CallKind.SHARD_MAP: _emit_shard_map,
  CallKind.CUSTOM_JVP: _emit_custom_jvp,
  CallKind.CUSTOM_VJP: _emit_custom_vjp,
  CallKind.CUSTOM_VMAP: _emit_custom_vmap,
}
