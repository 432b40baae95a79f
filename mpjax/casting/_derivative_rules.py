"""Custom derivative and batching rules under autocast: kept, and run under the same lists.

A rule is a program that exists only once JAX differentiates or batches. It is traced in its own dtypes,
decided about as a whole, and emitted with its casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
from jax.core import AbstractValue
from jax.custom_derivatives import SymbolicZero

from mpjax import _compat
from mpjax._types import Array, Atom, ClosedJaxpr, PyTree
from mpjax.casting._cast_plan import Call, CastPlan
from mpjax.casting._half_precision import Regions, tracing
from mpjax.casting._kinds import Held, Kind, as_held, initial
from mpjax.jaxpr import (
  as_traced,
  constants_of,
  custom_jvp_rule,
  custom_vjp_rules,
  dtype_of,
  open_jaxpr,
  shape_of,
)

if TYPE_CHECKING:
  from mpjax.casting._emit import Emitter


def emit_custom_jvp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_jvp_call` with the user's rule."""
  body = call.body(emit)
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
    out = _emit_rule(call, emit, flat, like, held, values, tangents=len(moving))
    n = len(call.outs)
    return _as_results(call, out[:n]), _as_results(call, out[n:])

  with as_traced(call.equation):
    return list(f(*operands))


def emit_custom_vjp(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vjp_call` with the user's rules."""
  body = call.body(emit)
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

    closed, plan = _decide_rule(call, flat, list(map(_struct, avals)), call.ins)
    out = emit(plan, [*constants_of(closed), *(primal.value for primal in primals)])
    n = len(call.outs)
    kept_held[:] = plan.outs[n:]
    return _as_results(call, out[:n]), tuple(_merged(is_traced, out[n:], known))

  def f_backward(residuals: Sequence[Any], cotangents: Sequence[Array]) -> tuple[Array | None, ...]:
    given: list[bool] = []
    kept, known = _parted(is_traced, residuals)
    results = [v.aval for v in call.equation.outvars]
    if not _compat.takes_symbolic_zeros(call.equation):
      cotangents = [_instantiated(g) for g in cotangents]
    # Zeros stay symbolic: a batched rule asks which results have a cotangent.
    is_given = [not isinstance(g, SymbolicZero) for g in cotangents]
    moving, still = _parted(is_given, cotangents)
    zeros = [_zero_like(g, aval) for g, aval in zip(still, _parted(is_given, results)[1], strict=True)]

    def flat(*xs: Array) -> list[Array]:
      of_results = _merged(is_given, xs[len(kept) :], zeros)
      out = backward(_merged(is_traced, xs[: len(kept)], known), of_results)
      given[:] = [x is not None and x.dtype != jax.dtypes.float0 for x in out]
      return [x for x, is_given in zip(out, given, strict=True) if is_given]

    like = [*map(_struct, kept_types), *map(_struct, _parted(is_given, results)[0])]
    held = [*kept_held, *_parted(is_given, call.outs)[0]]

    def gradients() -> list[bool]:
      return [h.kind is Kind.FLEXIBLE for h, here in zip(call.ins, given, strict=True) if here]

    out = iter(_emit_rule(call, emit, flat, like, held, [*kept, *moving], gradients=gradients))
    return tuple(as_held(next(out), h) if here else None for h, here in zip(call.ins, given, strict=True))

  # Symbolic zeros tell the rule which operands are differentiated: its constants are not.
  f.defvjp(f_forward, f_backward, symbolic_zeros=True)
  with as_traced(call.equation):
    return list(f(*operands))


def emit_custom_vmap(call: Call, operands: Sequence[Array], emit: Emitter) -> list[Array]:
  """Emits a `custom_vmap_call` with the user's rule."""
  body = call.body(emit)
  f = jax.custom_batching.custom_vmap(lambda *xs: tuple(body(*xs)))
  parameters = call.equation.params

  @f.def_vmap
  def _(axis_size: int, in_batched: Sequence[bool], *xs: Array) -> tuple[tuple[Array, ...], tuple[bool, ...]]:
    out_batched: list[bool] = []

    def batched_struct(a: Atom, is_batched: bool) -> jax.ShapeDtypeStruct:
      return jax.ShapeDtypeStruct((*([axis_size] * is_batched), *shape_of(a)), dtype_of(a))

    def unflatten(leaves: Sequence[PyTree]) -> PyTree:
      return jax.tree.unflatten(parameters["in_tree"], list(leaves))

    def flat(*xs: Array) -> list[Array]:
      out, batched = parameters["rule"](axis_size, unflatten(in_batched), *unflatten(xs))
      out_batched[:] = jax.tree.leaves(batched)
      return jax.tree.leaves(out)

    like = [batched_struct(a, b) for a, b in zip(call.equation.invars, in_batched, strict=True)]
    out = _emit_rule(call, emit, flat, like, call.ins, xs)
    return _as_results(call, out), tuple(out_batched)

  with as_traced(call.equation):
    return list(f(*operands))


def _decide_rule(
  call: Call,
  flat: Callable[..., list[Array]],
  like: Sequence[jax.ShapeDtypeStruct],
  held: Sequence[Held],
  tangents: int = 0,
  gradients: Callable[[], list[bool]] | None = None,
) -> tuple[ClosedJaxpr, CastPlan]:
  """Returns a rule, traced in its own dtypes, and the decisions about it.

  `gradients` is called after the trace.
  """
  # The rule is traced long after the function.
  with tracing(Regions(call.decide_rule.half, instead=tracing.value.instead)):
    closed = jax.make_jaxpr(flat)(*like)
  constants = [initial(v.aval) for v in open_jaxpr(closed).constvars]
  of_parameters = gradients() if gradients else None
  return closed, call.decide_rule(closed, [*constants, *held], tangents=tangents, gradients=of_parameters)


def _emit_rule(
  call: Call,
  emit: Emitter,
  flat: Callable[..., list[Array]],
  like: Sequence[jax.ShapeDtypeStruct],
  held: Sequence[Held],
  operands: Sequence[Array],
  tangents: int = 0,
  gradients: Callable[[], list[bool]] | None = None,
) -> list[Array]:
  """Returns the results of a rule for operands, which are held as `held` says.

  The last `tangents` of them are tangents, in which the rule must stay linear. For a backward rule
  `gradients` returns which results are gradients of parameters.
  """
  closed, plan = _decide_rule(call, flat, like, held, tangents, gradients)
  return emit(plan, [*constants_of(closed), *operands])


def _parted(flags: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
  """Returns the values with a flag, and those without."""
  pairs = list(zip(flags, values, strict=True))
  return [x for flag, x in pairs if flag], [x for flag, x in pairs if not flag]


def _merged(flags: Sequence[bool], flagged: Sequence[Any], others: Sequence[Any]) -> list[Any]:
  """Inverts `_parted`."""
  parts = iter(flagged), iter(others)
  return [next(parts[0] if flag else parts[1]) for flag in flags]


def _as_results(call: Call, out: Sequence[Array]) -> tuple[Array, ...]:
  return tuple(as_held(x, h) for x, h in zip(out, call.outs, strict=True))


def _instantiated(x: Array | SymbolicZero) -> Array:
  return jnp.zeros(x.shape, x.dtype) if isinstance(x, SymbolicZero) else x


def _zero_like(zero: SymbolicZero, aval: AbstractValue) -> SymbolicZero:
  """Returns a zero in the dtype of the program's result; the zero of an integer result has its own dtype."""
  dtype = cast(jax.core.ShapedArray, aval).dtype
  return SymbolicZero(zero.aval.update(dtype=dtype)) if jnp.issubdtype(dtype, jnp.inexact) else zero


def _struct(aval: AbstractValue) -> jax.ShapeDtypeStruct:
  aval = cast(jax.core.ShapedArray, aval)
  return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))
