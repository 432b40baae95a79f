"""From a wide tensor to FP8 and a scale: amax, scale, the saturating cast; tensors saved so.

x is stored as q with x = q / scale; q never overflows. A cast to E4M3, which has no infinity, turns overflow
into NaN, and a cast to E5M2 into infinity, so values are clamped before it (arXiv 2209.05433, section 3.1:
conversions saturate). Values that were not finite become NaN, for the loss scale to notice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32

from mpjax._types import DTypeLike, PyTree

# Reciprocals stay normal numbers, which no device flushes to zero.
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126


def amax_of(x: Float[Array, "..."], alone: Sequence[int] = ()) -> Float32[Array, "..."]:
  """Returns the largest magnitude, f32[]; NaN or infinity if x holds one.

  Entries along the dimensions `alone` each have their own: then it has the dimensions of x, the others of
  size 1.
  """
  within = tuple(i for i in range(x.ndim) if i not in alone)
  return jnp.max(jnp.abs(x), axis=within, keepdims=bool(alone), initial=0).astype(jnp.float32)


def scale_of(
  amax: Float32[Array, "*lead"], dtype: DTypeLike, margin: int = 0, pow2: bool = True
) -> Float32[Array, "*lead"]:
  """Returns the scale that brings `amax` to the largest number of `dtype`, less `margin` binades.

  Args:
    amax: float32; 0 or not finite (amax unknown) gives 1.
    dtype: an FP8 format.
    margin: binades left free.
    pow2: round down to a power of two.

  Returns:
    float32 of the shape of `amax`, in [2**-126, 2**126].
  """
  known = (amax > 0) & (amax < jnp.inf)
  largest = float(jnp.finfo(dtype).max) * 2.0**-margin
  scale = jnp.clip(largest / jnp.where(known, amax, largest), _SMALLEST, _LARGEST)
  if pow2:
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32) & np.uint32(0xFF800000)
    scale = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return scale


def quantise(
  x: Float[Array, "*shape"], scale: Float32[Array, "..."], dtype: DTypeLike
) -> Float[Array, "*shape"]:
  """Returns `x * scale` in FP8, saturated; NaN where x is not finite.

  Args:
    x: array of any floating dtype and shape.
    scale: float32, of shape [] or the shape of leading dimensions of x.
    dtype: an FP8 format.
  """
  largest = float(jnp.finfo(dtype).max)
  scaled = as_stored(x) * scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))
  # 0 times a number that is not finite is NaN. On a GPU, a select or 0 * x would be a second pass over x.
  return (jnp.clip(scaled, -largest, largest) + 0 * scaled).astype(dtype)


def as_stored(x: Float[Array, "*shape"]) -> Float32[Array, "*shape"]:
  """Returns x in float32, as it is in memory.

  A conversion of 16 bits alone would let XLA take the float32 value that x was rounded from, write that to
  memory for the amax and the quantiser, and so double the bytes of an activation. It does not look through
  operations on integers.
  """
  if x.dtype.itemsize != 2:
    return x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, jnp.uint16)
  size = jax.lax.bitcast_convert_type(bits & np.uint16(0x7FFF), x.dtype).astype(jnp.float32)
  sign = (bits >> 15).astype(jnp.uint32) << 31
  return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(size, jnp.uint32) | sign, jnp.float32)


def keep_in_fp8(fun: Callable[..., PyTree], which: Sequence[bool], dtype: DTypeLike) -> Callable[..., PyTree]:
  """Returns `fun` with a backward pass that recomputes it, from operands saved in FP8.

  The value is that of `fun`; the gradient is the gradient at the rounded operands.

  Args:
    fun: any function of arrays.
    which: for each operand, whether it is saved in FP8; the others are saved as they are.
    dtype: an FP8 format.

  Returns:
    A function with `fun`'s value, for reverse-mode differentiation, once.
  """

  @jax.custom_vjp
  def kept(*operands: Array) -> PyTree:
    return fun(*operands)

  def forward(*operands: Array) -> tuple[PyTree, list[PyTree]]:
    return fun(*operands), [
      _narrow(x, dtype) if narrow else x for x, narrow in zip(operands, which, strict=True)
    ]

  def backward(saved: list[PyTree], cotangents: PyTree) -> tuple[PyTree, ...]:
    # Otherwise a compiler might widen early, and save the wide array.
    kept, cotangents = jax.lax.optimization_barrier(
      ([x for x, narrow in zip(saved, which, strict=True) if narrow], cotangents)
    )
    narrowed = iter(kept)
    operands = [_wide(*next(narrowed)) if narrow else x for x, narrow in zip(saved, which, strict=True)]
    return jax.vjp(fun, *operands)[1](cotangents)

  kept.defvjp(forward, backward)
  return kept


@jax.custom_jvp
def not_differentiable(x: jax.Array) -> jax.Array:
  """Returns `x`, saved for a backward pass in too few bits for a second differentiation."""
  return x


@not_differentiable.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> NoReturn:
  raise NotImplementedError(
    "a second derivative of a function with saved_activations: fp8, which saves too little for it: use "
    "saved_activations: compute"
  )


def _narrow(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array, jax.Array]:
  x = not_differentiable(x)
  scale = scale_of(amax_of(x), dtype)
  return quantise(x, scale, dtype), scale, jnp.zeros([0], x.dtype)


def _wide(q: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
  return (q.astype(jnp.float32) / scale).astype(like.dtype)
