"""Amaxes that leave a differentiated program as the cotangents of probes.

A probe is a float32[3] on which no derivative depends, as a product's scales: its cotangent is the amaxes of
the product's lhs, rhs and gradient. If cotangents of one probe would be added (in a loop, over devices), the
largest is used instead.
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
from mpjax.fp8 import amax_of
from mpjax.jaxpr import PrimitiveFacts, register
from mpjax.products._primitives import return_first

LHS, RHS, GRADIENT, NOTHING = range(4)


def observe(x: jax.Array, probe: jax.Array, slot: int) -> jax.Array:
  """Returns `x`; its amax, or its gradient's for the slot GRADIENT, becomes the probe's cotangent.

  Args:
    x: floating.
    probe: float32[3].
    slot: LHS, RHS or GRADIENT; for NOTHING the cotangent is zero, but it exists.
  """
  return observe_p.bind(x, probe, slot=slot)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread(probe: jax.Array, n: int) -> jax.Array:
  """Returns a probe for each of n uses, [n, *probe.shape]; their largest cotangent is the probe's."""
  return jnp.broadcast_to(probe, (n, *probe.shape))


spread.defvjp(lambda probe, n: (spread(probe, n), None), lambda n, _, ct: (ct.max(0),))

# Returns x. Operands: x, a probe and, in a derivative, the amax of the value whose tangent x is. A probe may
# have leading dimensions, which the others have, too: one for each entry along them.
observe_p = Primitive("fp8_observe")


def _amax(x: Array, lead: Sequence[int]) -> Array:
  return amax_of(x, range(len(lead))).reshape(lead)


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, slot: int
) -> tuple[Array, Array | ad.Zero]:
  x, probe, *amax = primals
  dx, d_probe = tangents[:2]
  out = observe_p.bind(*primals, slot=slot)
  if isinstance(d_probe, ad.Zero):
    return out, dx
  lead = probe.shape[:-1]
  if not amax:
    amax = [_amax(x, lead) if slot in (LHS, RHS) else jnp.zeros(lead, jnp.float32)]
  return out, observe_p.bind(ad.instantiate_zeros(dx), d_probe, *amax, slot=slot)


def _transpose(
  ct: Array | ad.Zero,
  dx: Array | ad.UndefinedPrimal,
  d_probe: Array | ad.UndefinedPrimal,
  amax: Array,
  *,
  slot: int,
) -> list[Array | ad.Zero | None]:
  of_dx = ct if ad.is_undefined_primal(dx) else None
  of_probe = None
  if ad.is_undefined_primal(d_probe):
    if slot == GRADIENT:
      amax = jnp.zeros_like(amax) if isinstance(ct, ad.Zero) else _amax(ct, amax.shape)
    axes = tuple(sorted(_compat.varying_axes(amax) - _compat.varying_axes_of_type(d_probe.aval)))
    amax = jax.lax.pmax(amax, axes) if axes else amax
    of_probe = jnp.where(np.eye(4, 3, dtype=bool)[slot], amax[..., None], 0)  # an amax may be NaN
  return [of_dx, of_probe, None]


def _batch(operands: Sequence[Array], axes: Sequence[int | None], *, slot: int) -> tuple[Array, int | None]:
  if axes[1] is None and operands[1].ndim == 1:  # one probe for all
    x, probe, *amaxes = operands
    amaxes = [amax if axis is None else amax.max(axis) for amax, axis in zip(amaxes, axes[2:], strict=True)]
    return observe_p.bind(x, probe, *amaxes, slot=slot), axes[0]
  size = next(x.shape[axis] for x, axis in zip(operands, axes, strict=True) if axis is not None)
  operands = [batching.bdim_at_front(x, axis, size) for x, axis in zip(operands, axes, strict=True)]
  return observe_p.bind(*operands, slot=slot), 0


register(observe_p, PrimitiveFacts("opaque", "mpjax's own: it passes its operand on", recompute=False))
return_first(observe_p)
batching.primitive_batchers[observe_p] = _batch
ad.primitive_jvps[observe_p] = _jvp
ad.primitive_transposes[observe_p] = _transpose
