"""Amaxes that leave a differentiated program as the cotangents of probes.

A probe is a float32[3] that nothing depends on: its cotangent is the amaxes of a product's lhs,
rhs and gradient. If cotangents of one probe would be added (in a loop, over devices), the largest is
used instead.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from mpjax import _compat
from mpjax._types import Array
from mpjax.fp8._scaling import amax_of
from mpjax.jaxpr import PrimitiveFacts, register
from mpjax.products._lowering import lower_as

LHS, RHS, GRADIENT, NOTHING = range(4)


def observe(x: jax.Array, probe: jax.Array, slot: int) -> jax.Array:
  """Returns `x`; its amax, or its gradient's for the slot GRADIENT, becomes the probe's cotangent.

  Args:
    x: floating.
    probe: float32[3].
    slot: LHS, RHS or GRADIENT; for NOTHING the cotangent is zero, but it exists.
  """
  return observe_p.bind(x, probe, slot=slot, lead=0)


def spread(probe: jax.Array, n: int) -> jax.Array:
  """Returns a probe for each of n uses, [n, *probe.shape]; their largest cotangent is the probe's."""
  return spread_p.bind(probe, n=n)


observe_p = Primitive("fp8_observe")
observe_linear_p = Primitive("fp8_observe_linear")
spread_p = Primitive("fp8_spread")


def _observe_jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, slot: int, lead: int
) -> tuple[Array, Array | ad.Zero]:
  (x, probe), (dx, d_probe) = primals, tangents
  out = observe_p.bind(x, probe, slot=slot, lead=lead)
  if isinstance(d_probe, ad.Zero):
    return out, dx
  amax = amax_of(x, lead) if slot in (LHS, RHS) else jnp.zeros(x.shape[:lead], jnp.float32)
  dx = ad.instantiate_zeros(dx)
  return out, observe_linear_p.bind(dx, d_probe, amax, slot=slot, lead=lead)


def _linear_jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, slot: int, lead: int
) -> tuple[Array, Array | ad.Zero]:
  dx, d_probe, amax = primals
  ddx, dd_probe = tangents[:2]
  bind = functools.partial(observe_linear_p.bind, slot=slot, lead=lead)
  out = bind(dx, d_probe, amax)
  if isinstance(dd_probe, ad.Zero):
    return out, ddx
  return out, bind(ad.instantiate_zeros(ddx), dd_probe, amax)


def _linear_transpose(
  ct: Array | ad.Zero,
  dx: Array | ad.UndefinedPrimal,
  d_probe: Array | ad.UndefinedPrimal,
  amax: Array,
  *,
  slot: int,
  lead: int,
) -> list[Array | ad.Zero | None]:
  of_dx = ct if ad.is_undefined_primal(dx) else None
  of_probe = None
  if ad.is_undefined_primal(d_probe):
    if slot == GRADIENT:
      amax = jnp.zeros_like(amax) if isinstance(ct, ad.Zero) else amax_of(ct, lead)
    axes = tuple(sorted(_compat.varying_axes(amax) - _compat.varying_axes_of_type(d_probe.aval)))
    amax = jax.lax.pmax(amax, axes) if axes else amax
    of_probe = jnp.where(np.eye(4, 3, dtype=bool)[slot], amax[..., None], 0)  # an amax may be NaN
  return [of_dx, of_probe, None]


def _batch(
  primitive: Primitive, operands: Sequence[Array], axes: Sequence[int | None], *, slot: int, lead: int
) -> tuple[Array, int | None]:
  if axes[1] is None and not lead:  # one probe for all
    x, probe, *amaxes = operands
    amaxes = [amax if axis is None else amax.max(axis) for amax, axis in zip(amaxes, axes[2:], strict=True)]
    return primitive.bind(x, probe, *amaxes, slot=slot, lead=0), axes[0]
  size = batch_size(operands, axes)
  operands = [to_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)]
  return primitive.bind(*operands, slot=slot, lead=lead + 1), 0


def batch_size(operands: Sequence[Array], axes: Sequence[int | None]) -> int:
  """Returns the size of the axis that `vmap` maps operands over."""
  return next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)


def to_front(x: jax.Array, axis: int | None, size: int) -> jax.Array:
  """Moves the axis that `vmap` maps over to the front, or repeats an operand that is not mapped."""
  return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)


def _spread_batch(operands: Sequence[Array], axes: Sequence[int], *, n: int) -> tuple[Array, int]:
  return spread_p.bind(operands[0], n=n), axes[0] + 1


def _register() -> None:
  for primitive in (observe_p, observe_linear_p, spread_p):
    register(primitive, PrimitiveFacts("opaque", "mpjax's own: it passes its operand on", recompute=False))
  first = lambda x, *_, **__: x
  for primitive in (observe_p, observe_linear_p):
    primitive.def_impl(first)
    primitive.def_abstract_eval(first)
    lower_as(primitive, first)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
  ad.primitive_jvps[observe_p] = _observe_jvp
  ad.primitive_jvps[observe_linear_p] = _linear_jvp
  ad.primitive_transposes[observe_linear_p] = _linear_transpose

  copies = lambda x, n: jnp.broadcast_to(x, (n, *x.shape))
  spread_p.def_impl(copies)
  spread_p.def_abstract_eval(lambda x, n: jax.core.ShapedArray((n, *x.shape), x.dtype))
  lower_as(spread_p, copies)
  ad.deflinear2(spread_p, lambda ct, _, n: [None if isinstance(ct, ad.Zero) else ct.max(0)])
  batching.primitive_batchers[spread_p] = _spread_batch


_register()
