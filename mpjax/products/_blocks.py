"""Products of blocks with a scale each: MXFP8, MXFP4 and NVFP4, and what NVFP4 training adds.

Blocks lie along the dimension that a product contracts. What a block stands for is its codes times its
scale; for NVFP4 also divided by the tensor's scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.experimental.layout import Layout, with_layout_constraint

from mpjax._types import Array, DTypeLike
from mpjax.fp8 import BLOCKS, as_stored, scale_of
from mpjax.products._dimensions import LARGEST_UNIT, Dims, free_dims, own_dims, product_of_scales
from mpjax.products._spec import FLOAT32, Spec

_LARGEST = 2.0**126
_MX, _NVFP4 = BLOCKS["mx"], BLOCKS["nvfp4"]
_FP4, _E4M3 = jnp.float4_e2m1fn, jnp.float8_e4m3fn
_LARGEST_FP4, _LARGEST_E4M3, _SMALLEST_E4M3 = 6.0, 448.0, 2.0**-9


def require_whole_blocks(
  lhs: ShapedArray, rhs: ShapedArray, scales: Sequence[ShapedArray], dims: Dims, spec: Spec
) -> None:
  """Raises `ValueError` if a dimension that is divided into blocks is not a multiple of their size."""
  size = BLOCKS[spec.scheme]
  contracted = math.prod(lhs.shape[i] for i in dims[0][0])
  if contracted % size:
    raise ValueError(
      f"{spec.scheme} product of {lhs.shape} and {rhs.shape}: forward or backward it contracts {contracted} "
      f"elements, expected a multiple of {size}; pad them, or use fp8_dot_general with recipe 'current'"
    )
  for side, x in enumerate((lhs, rhs)):
    members = own_dims(scales[side].shape)
    rows = math.prod(x.shape[i] for i in free_dims(x.ndim, dims, side) if i not in members)
    if _in_squares(spec, side) and rows % size:
      raise ValueError(
        f"{spec.scheme} product of {lhs.shape} and {rhs.shape}: the weight has {rows} rows, expected a "
        f"multiple of {size}, in squares of which it is quantised; pad them, or use recipe 'current'"
      )


def _in_squares(spec: Spec, side: int) -> bool:
  is_weight = spec.weights is not None and spec.weights[side] and not spec.gradients[side]
  return spec.scheme == "nvfp4" and is_weight


def _is_fp4(dtype: np.dtype) -> bool:
  return jnp.finfo(dtype).bits < 8


class _Operand(NamedTuple):
  """An operand in blocks.

  Attributes:
    codes: [*batch, *free, k] or [*batch, k, *free].
    scales: the same with a k smaller by the size of a block.
    axis: the dimension k.
    unit: what the product is multiplied by for the scale of the tensor, [], or by member, of the codes'
      dimensions; `None` without one.
  """

  codes: Array
  scales: Array
  axis: int
  unit: Array | None


def multiply_blocks(
  lhs: Array,
  rhs: Array,
  members: Sequence[Sequence[int]],
  dims: Dims,
  spec: Spec,
  units: DTypeLike | None,
) -> Array:
  """Computes a product of operands that are quantised in blocks along the contracted dimension.

  Args:
    lhs: floating.
    rhs: floating.
    members: the dimensions of lhs and rhs whose entries have a scale of the tensor of their own.
    dims: the dimensions of the product.
    spec: `scheme` is `mx` or `nvfp4`.
    units: the dtype in which the platform multiplies what blocks stand for; `None`: it multiplies blocks.

  Returns:
    [batch, lhs free, rhs free] in `spec.out_dtype`.
  """
  batch = len(dims[1][0])
  shape = [lhs.shape[i] for i in dims[1][0]]
  shape += [x.shape[i] for side, x in enumerate((lhs, rhs)) for i in free_dims(x.ndim, dims, side)]
  left, right = (
    _quantised(x, members[side], dims, spec, side, native=units is None) for side, x in enumerate((lhs, rhs))
  )
  wide, batches = spec.wide, tuple(range(batch))
  of_codes = (((left.axis,), (right.axis,)), (batches, batches))
  if units is None:
    out = _multiply_blocks(left, right, batch, spec)
  else:
    values = _values(left, spec, units), _values(right, spec, units)
    # bfloat16 holds what blocks stand for, except at the ends of its range.
    out = jax.lax.dot_general(
      *values, of_codes, preferred_element_type=FLOAT32, out_sharding=spec.out_sharding
    )
  out = (out if out.shape == tuple(shape) else out.reshape(shape)).astype(wide)
  if left.unit is not None and right.unit is not None:  # powers of two
    unit = product_of_scales((left.unit, right.unit), of_codes, (left.codes.ndim, right.codes.ndim))
    out = out * jnp.minimum(unit, LARGEST_UNIT).astype(wide)  # infinity times zero is not zero
  return out.astype(spec.out_dtype)


def _multiply_blocks(left: _Operand, right: _Operand, batch: int, spec: Spec) -> Array:
  folded = []
  for x in (left, right):
    first = x.axis == batch and x.codes.ndim > batch + 1
    codes, scales = (_folded(y, batch, first) for y in (x.codes, x.scales))
    if _is_fp4(spec.formats[0]):
      # Units take FP4 only if the contracted dimension is last in memory. Without the barrier, XLA fuses what
      # it does not find a kernel for.
      codes, scales = jax.lax.optimization_barrier((codes, scales))
      rows = Layout(tuple(range(codes.ndim)))
      codes, scales = with_layout_constraint(codes, rows), with_layout_constraint(scales, rows)
    folded.append((codes, scales, codes.ndim - 1 - first))
  (lhs, lhs_scale, lhs_axis), (rhs, rhs_scale, rhs_axis) = folded
  batches = tuple(range(lhs.ndim - 2))
  return jax.lax.scaled_dot(
    lhs,
    rhs,
    lhs_scale=lhs_scale,
    rhs_scale=rhs_scale,
    dimension_numbers=(((lhs_axis,), (rhs_axis,)), (batches, batches)),
    preferred_element_type=spec.wide,
  )


def _values(x: _Operand, spec: Spec, dtype: DTypeLike) -> Array:
  """Returns what blocks stand for."""
  size = BLOCKS[spec.scheme]
  blocks = (*x.scales.shape[: x.axis + 1], size, *x.codes.shape[x.axis + 1 :])
  scales = jnp.expand_dims(x.scales.astype(FLOAT32), x.axis + 1)
  return (x.codes.astype(FLOAT32).reshape(blocks) * scales).reshape(x.codes.shape).astype(dtype)


def _quantised(x: Array, members: Sequence[int], dims: Dims, spec: Spec, side: int, native: bool) -> _Operand:
  """Quantises an operand with the contracted dimension last; an FP8 one also as it lies if that is first."""
  batch, contracted, free = dims[1][side], dims[0][side], free_dims(x.ndim, dims, side)
  kept, length, rows = (tuple(x.shape[i] for i in some) for some in (batch, contracted, free))
  dtype, trained = spec.formats[side], spec.scheme == "nvfp4" and spec.weights is not None
  # For the gradient of a weight.
  rotated = trained and sum(spec.gradients) == 1 and not any(_in_squares(spec, i) for i in (0, 1))
  first = bool(free) and (*batch, *contracted, *free) == tuple(range(x.ndim))
  first = first and (rotated or not _is_fp4(dtype))
  k = (math.prod(length),)
  x = x if first else x.transpose(*batch, *free, *contracted)
  shape = (*kept, *k, *rows) if first else (*kept, *rows, *k)
  x = x if x.shape == shape else x.reshape(shape)
  axis = len(kept) if first else x.ndim - 1
  # Amax and quantiser read it: as one array of 16 bits, where XLA would keep float32 intermediates.
  stored = jax.lax.optimization_barrier if native and x.dtype.itemsize == 2 else lambda x: x
  x = stored(x)
  if rotated:
    x, axis = stored(_rotate(x, axis, x.dtype if native else FLOAT32)), x.ndim - 1
  if spec.scheme == "mx":
    return _Operand(*_quantise_mx(x, dtype, axis), axis, None)
  members = [i for i, dim in enumerate((*batch, *free)) if dim in members]
  stochastic = trained and spec.gradients[side]
  codes, scales, scale = _quantise_nvfp4(
    x, squares=_in_squares(spec, side), stochastic=stochastic, members=members
  )
  return _Operand(codes, scales, axis, 1 / scale)


def _folded(x: Array, batch: int, first: bool) -> Array:
  """Returns [batch, rows, k], or [batch, k, rows] if k is `first`; without a batch dimension two."""
  batches = (math.prod(x.shape[:batch]),) if batch else ()
  if first:
    return x.reshape(*batches, x.shape[batch], math.prod(x.shape[batch + 1 :]))
  return x.reshape(*batches, math.prod(x.shape[batch:-1]), x.shape[-1])


def _quantise_mx(x: Array, dtype: DTypeLike, axis: int) -> tuple[Array, Array]:
  """Quantises to a Microscaling format: elements of few bits, and a power of two for every 32 of them.

  The scale is the smallest power of two that keeps the block's amax in range, so nothing saturates. (The
  OCP Microscaling specification 1.0, section 6.3, rounds down instead.)

  Args:
    x: floating; where it is not finite its block becomes NaN.
    dtype: an FP8 or FP4 format.
    axis: the contracted dimension.

  Returns:
    q: x divided by its block's scale, in `dtype`.
    scales: E8M0 of x's shape with `axis` divided by 32.
  """
  amax = _amax_of_blocks(x, axis, _MX)
  largest = float(jnp.finfo(dtype).max)
  scale = scale_of(amax, dtype)  # a power of two, and so is its reciprocal
  q = jnp.clip(_in_blocks(as_stored(x), axis, _MX) * jnp.expand_dims(scale, axis + 1), -largest, largest)
  scales = jnp.where(amax < jnp.inf, 1 / scale, jnp.nan)  # FP4 does not have a NaN: the scale tells
  return q.astype(dtype).reshape(x.shape), scales.astype(jnp.float8_e8m0fnu)


def _quantise_nvfp4(
  x: Array, *, squares: bool, stochastic: bool, members: Sequence[int]
) -> tuple[Array, Array, Array]:
  """Quantises to NVFP4: E2M1 elements, an E4M3 scale for every 16 of them, and one scale for the tensor.

  The source is arXiv 2509.25149, appendix on the quantisation of tensors, except that the tensor's scale is a
  power of two: multiplying by it is exact.

  Args:
    x: floating[..., rows, k]; where it is not finite its block becomes NaN.
    squares: one scale for 16 x 16 elements, of 16 rows in their order, so that a matrix and its transpose are
      quantised alike.
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
  y = _at_random(y, wide) if stochastic else jnp.clip(y, -_LARGEST_FP4, _LARGEST_FP4)
  return y.astype(_FP4).reshape(x.shape), scales, tensor_scale


def _in_blocks(x: Array, axis: int, block: int) -> Array:
  """Divides a dimension into blocks: [..., blocks, block, ...]."""
  return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def _amax_of_blocks(x: Array, axis: int, block: int) -> Array:
  return jnp.max(jnp.abs(_in_blocks(x, axis, block)), axis=axis + 1, initial=0).astype(jnp.float32)


def _at_random(y: Array, source: Array) -> Array:
  """Returns numbers of E2M1, above or below each y with the probability that keeps its mean."""
  size = jnp.minimum(jnp.abs(y), _LARGEST_FP4)
  step = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
  return jnp.sign(y) * jnp.minimum(jnp.floor(size / step + _uniform_of(source)) * step, _LARGEST_FP4)


def _uniform_of(x: Array) -> Array:
  """Returns a number in [0, 1) for each element of float32 x, a hash of its bits and its position."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  for i, odd in zip(range(x.ndim), _ODD * (1 + x.ndim // len(_ODD)), strict=False):
    bits = bits ^ (jax.lax.broadcasted_iota(jnp.uint32, x.shape, i) * np.uint32(odd))
    bits = (bits ^ (bits >> 16)) * np.uint32(0x7FEB352D)
  bits = (bits ^ (bits >> 15)) * np.uint32(0x846CA68B)
  bits = bits ^ (bits >> 16)
  return (bits >> 8).astype(jnp.float32) * np.float32(2.0**-24)


_ODD = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F)


def _rotate(x: Array, axis: int, units: DTypeLike) -> Array:
  """Multiplies every 16 elements of a dimension by a Hadamard matrix with random signs, over 4; puts it last.

  The matrix is orthogonal: a product of two operands that are both rotated along the contracted dimension
  stays, while outliers are spread over 16 elements (arXiv 2509.25149, section on random Hadamard transforms).

  Args:
    x: floating.
    axis: the dimension.
    units: the dtype to multiply in.
  """
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
