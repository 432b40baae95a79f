"""Products of blocks with a scale each: MXFP8, MXFP4 and NVFP4."""

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
from mpjax.fp8._blocks import quantise_mx, quantise_nvfp4, rotate
from mpjax.fp8._recipe import BLOCKS
from mpjax.products._dimensions import Dims, free_dims
from mpjax.products._scales import own_dims, product_of_scales
from mpjax.products._spec import ACTIVATION, FLOAT32, GRADIENT, WEIGHT, Spec

_LARGEST = 2.0**127  # also of bfloat16


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
  return spec.scheme == "nvfp4" and spec.roles[side] == WEIGHT


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
  wide = spec.wide
  multiply = _multiply_blocks if units is None else _multiply_values
  out = multiply(left, right, batch, spec, units or wide)
  out = (out if out.shape == tuple(shape) else out.reshape(shape)).astype(wide)
  if left.unit is not None and right.unit is not None:  # powers of two
    batches = tuple(range(batch))
    of_codes = (((left.axis,), (right.axis,)), (batches, batches))
    unit = product_of_scales((left.unit, right.unit), of_codes, (left.codes.ndim, right.codes.ndim))
    out = out * jnp.minimum(unit, _LARGEST).astype(wide)  # infinity times zero is not zero
  return out.astype(spec.out_dtype)


def _multiply_blocks(left: _Operand, right: _Operand, batch: int, spec: Spec, out_dtype: DTypeLike) -> Array:
  folded = []
  for x in (left, right):
    first = x.axis == batch and x.codes.ndim > batch + 1
    codes, scales = (_folded(y, batch, first) for y in (x.codes, x.scales))
    if _is_fp4(spec.lhs_dtype):
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
    preferred_element_type=out_dtype,
  )


def _multiply_values(left: _Operand, right: _Operand, batch: int, spec: Spec, dtype: DTypeLike) -> Array:
  """Multiplies what blocks stand for; bfloat16 holds it except at the ends of its range."""

  def value(x: _Operand) -> Array:
    size = BLOCKS[spec.scheme]
    blocks = (*x.scales.shape[: x.axis + 1], size, *x.codes.shape[x.axis + 1 :])
    scales = jnp.expand_dims(x.scales.astype(FLOAT32), x.axis + 1)
    return (x.codes.astype(FLOAT32).reshape(blocks) * scales).reshape(x.codes.shape).astype(dtype)

  batches = tuple(range(batch))
  return jax.lax.dot_general(
    value(left),
    value(right),
    (((left.axis,), (right.axis,)), (batches, batches)),
    preferred_element_type=FLOAT32,
    out_sharding=spec.out_sharding,
  )


def _quantised(x: Array, members: Sequence[int], dims: Dims, spec: Spec, side: int, native: bool) -> _Operand:
  """Quantises an operand with the contracted dimension last; an FP8 one also as it lies if that is first."""
  batch, contracted, free = dims[1][side], dims[0][side], free_dims(x.ndim, dims, side)
  kept, length, rows = (tuple(x.shape[i] for i in some) for some in (batch, contracted, free))
  dtype = (spec.lhs_dtype, spec.rhs_dtype)[side]
  # For the gradient of a weight.
  rotated = spec.scheme == "nvfp4" and set(spec.roles) == {ACTIVATION, GRADIENT}
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
    x, axis = stored(rotate(x, axis, x.dtype if native else FLOAT32)), x.ndim - 1
  if spec.scheme == "mx":
    return _Operand(*quantise_mx(x, dtype, axis), axis, None)
  members = [i for i, dim in enumerate((*batch, *free)) if dim in members]
  codes, scales, scale = quantise_nvfp4(
    x, squares=_in_squares(spec, side), stochastic=spec.roles[side] == GRADIENT, members=members
  )
  return _Operand(codes, scales, axis, 1 / scale)


def _folded(x: Array, batch: int, first: bool) -> Array:
  """Returns [batch, rows, k], or [batch, k, rows] if k is `first`; without a batch dimension two."""
  batches = (math.prod(x.shape[:batch]),) if batch else ()
  if first:
    return x.reshape(*batches, x.shape[batch], math.prod(x.shape[batch + 1 :]))
  return x.reshape(*batches, math.prod(x.shape[batch:-1]), x.shape[-1])
