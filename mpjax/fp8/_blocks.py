"""From a wide tensor to blocks with a scale each: MXFP8, MXFP4 and NVFP4, and what NVFP4 training adds.

Blocks lie along the dimension that a product contracts. What a block stands for is its codes times its
scale; for NVFP4 also divided by the tensor's scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, DTypeLike
from mpjax.fp8._scaling import as_stored, scale_of

_E8M0_BIAS = 127
_LARGEST_E8M0 = 2 * _E8M0_BIAS - 1
_SMALLEST, _LARGEST = 2.0**-126, 2.0**126
_NVFP4 = 16
_FP4, _E4M3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn
_LARGEST_FP4, _LARGEST_E4M3, _SMALLEST_E4M3 = 6.0, 448.0, 2.0**-9


def quantise_mx(x: Array, dtype: DTypeLike, axis: int = -1, block: int = 32) -> tuple[Array, Array]:
  """Quantises to a Microscaling format: elements of few bits, and a power of two for every block of them.

  The scale is the smallest power of two that keeps the block's amax in range, so nothing saturates. (The
  OCP Microscaling specification 1.0, section 6.3, rounds down instead.)

  Args:
    x: floating, its `axis` a multiple of `block`; where it is not finite its block becomes NaN.
    dtype: an FP8 or FP4 format.
    axis: the contracted dimension.
    block: elements per scale.

  Returns:
    q: x divided by its block's scale, in `dtype`.
    scales: E8M0 of x's shape with `axis` divided by `block`.
  """
  axis %= x.ndim
  amax = _amax_of_blocks(x, axis, block)
  largest = float(jnp.finfo(dtype).max)
  known = (amax > 0) & (amax < jnp.inf)
  bits = jax.lax.bitcast_convert_type(jnp.maximum(jnp.where(known, amax, 1) / largest, _SMALLEST), jnp.uint32)
  exponent = (bits >> 23) + ((bits & np.uint32(0x7FFFFF)) != 0)  # rounded up
  exponent = jnp.clip(jnp.where(known, exponent, _E8M0_BIAS), 1, _LARGEST_E8M0)
  unit = jax.lax.bitcast_convert_type((exponent << 23).astype(jnp.uint32), jnp.float32)
  q = jnp.clip(_in_blocks(as_stored(x), axis, block) / jnp.expand_dims(unit, axis + 1), -largest, largest)
  scales = jnp.where(amax < jnp.inf, unit, jnp.nan)  # FP4 does not have a NaN: the scale tells
  return q.astype(dtype).reshape(x.shape), scales.astype(jnp.float8_e8m0fnu)


def quantise_nvfp4(
  x: Array, *, squares: bool = False, stochastic: bool = False, members: Sequence[int] = ()
) -> tuple[Array, Array, Array]:
  """Quantises to NVFP4: E2M1 elements, an E4M3 scale for every 16 of them, and one scale for the tensor.

  The source is arXiv 2509.25149, appendix on the quantisation of tensors, except that the tensor's scale is a
  power of two: multiplying by it is exact.

  Args:
    x: floating[..., rows, k], k a multiple of 16; where it is not finite its block becomes NaN.
    squares: one scale for 16 x 16 elements, of 16 rows in their order, so that a matrix and its transpose are
      quantised alike; the number of rows is a multiple of 16.
    stochastic: round elements at random and scales up, so that elements are right on average; a hash of
      value and position gives the random bits.
    members: dimensions of x along which tensors lie that have a scale each.

  Returns:
    q: E2M1, x's shape.
    scales: E4M3[*x.shape[:-1], k / 16]; x is about q * scales / tensor_scale.
    tensor_scale: f32[]; with members, of x's dimensions, of which the others have size 1.
  """
  axis = x.ndim - 1
  amax = _amax_of_blocks(x, axis, _NVFP4)
  if squares:
    rows = amax.reshape(math.prod(x.shape[:-1]) // _NVFP4, _NVFP4, amax.shape[-1])
    amax = jnp.broadcast_to(rows.max(1, keepdims=True), rows.shape).reshape(amax.shape)
  within = tuple(i for i in range(x.ndim) if i not in members)
  largest = jnp.max(amax, axis=within, keepdims=bool(members), initial=0)
  tensor_scale = scale_of(largest / 4, _E4M3)  # no block needs a scale above 448
  scaled = jnp.minimum(amax * tensor_scale / _LARGEST_FP4, _LARGEST_E4M3)
  if stochastic:  # what a scale that is rounded down clips is missing on average
    bits = jax.lax.bitcast_convert_type(scaled, jnp.uint32)
    up = (bits + np.uint32(0xFFFFF)) & np.uint32(0xFFF00000)  # to the 3 bits of E4M3
    scaled = jax.lax.bitcast_convert_type(up, jnp.float32)
  scales = jnp.where(amax < jnp.inf, jnp.maximum(scaled, _SMALLEST_E4M3), jnp.nan).astype(_E4M3)
  wide = _in_blocks(as_stored(x), axis, _NVFP4)
  # A factor, since compilers round a division in two ways. Zero times infinity is not zero.
  factor = jnp.minimum(tensor_scale / scales.astype(jnp.float32), _LARGEST)
  y = wide * factor[..., None]
  y = _to_fp4_at_random(y, wide) if stochastic else jnp.clip(y, -_LARGEST_FP4, _LARGEST_FP4)
  return y.astype(_FP4).reshape(x.shape), scales, tensor_scale


def _in_blocks(x: Array, axis: int, block: int) -> Array:
  """Divides a dimension into blocks: [..., blocks, block, ...]."""
  return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def _amax_of_blocks(x: Array, axis: int, block: int) -> Array:
  return jnp.max(jnp.abs(_in_blocks(x, axis, block)), axis=axis + 1, initial=0).astype(jnp.float32)


def _to_fp4_at_random(y: Array, source: Array) -> Array:
  """Returns numbers of E2M1, above or below each y with the probability that keeps its mean."""
  size = jnp.minimum(jnp.abs(y), _LARGEST_FP4)
  step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
  return jnp.sign(y) * jnp.minimum(jnp.floor(size / step + uniform_of(source)) * step, _LARGEST_FP4)


def uniform_of(x: Array) -> Array:
  """Returns a number in [0, 1) for each element of float32 x, a hash of its bits and its position."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  for i, odd in zip(range(x.ndim), _ODD * (1 + x.ndim // len(_ODD)), strict=False):
    bits = bits ^ (jax.lax.broadcasted_iota(jnp.uint32, x.shape, i) * np.uint32(odd))
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
  bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
  bits = bits ^ (bits >> 16)
  return (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)


_ODD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


def rotate(x: Array, axis: int = -1, units: DTypeLike = jnp.float32) -> Array:
  """Multiplies every 16 elements of a dimension by a Hadamard matrix with random signs, over 4; puts it last.

  The matrix is orthogonal: a product of two operands that are both rotated along the contracted dimension
  stays, while outliers are spread over 16 elements (arXiv 2509.25149, section on random Hadamard transforms).

  Args:
    x: floating, its `axis` a multiple of 16.
    axis: the dimension.
    units: the dtype to multiply in.

  Returns:
    x's dtype, [..., k].
  """
  axis %= x.ndim
  blocks = _in_blocks(x.astype(units), axis, _NVFP4)
  dims = (((axis + 1,), (0,)), ((), ()))
  out = jax.lax.dot_general(
    blocks, _ROTATION.astype(units), dims, precision=jax.lax.Precision.HIGHEST, preferred_element_type=units
  )
  out = jnp.moveaxis(out, axis, -2)  # [..., blocks, 16]
  return out.reshape(*out.shape[:-2], x.shape[axis]).astype(x.dtype)


# One vector of signs for all tensors, as in the paper.
_SIGNS = np.array([1, -1, -1, 1, 1, 1, -1, 1, -1, -1, 1, -1, 1, -1, 1, 1], np.float32)
_OF_FOUR = np.kron(*[np.array([[1, 1], [1, -1]], np.float32)] * 2)
_ROTATION = _SIGNS[:, None] * np.kron(_OF_FOUR, _OF_FOUR) / 4
