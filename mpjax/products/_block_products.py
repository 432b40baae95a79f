"""Products of blocks with a scale each: MXFP8, MXFP4 and NVFP4."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray

from mpjax._types import Array, DTypeLike
from mpjax.fp8._blocks import quantise_mx, quantise_nvfp4, rotate
from mpjax.fp8._recipe import BLOCKS
from mpjax.products._dimensions import Dims, free_dims
from mpjax.products._spec import ACTIVATION, GRADIENT, WEIGHT, Spec

_FLOAT32 = np.dtype(np.float32)


def require_whole_blocks(lhs: ShapedArray, rhs: ShapedArray, dims: Dims, spec: Spec) -> None:
  """Raises `ValueError` if a dimension that is divided into blocks is not a multiple of their size."""
  size = BLOCKS[spec.scheme]
  contracted = math.prod(lhs.shape[i] for i in dims[0][0])
  if contracted % size:
    raise ValueError(
      f"fp8 recipe {spec.scheme!r} for {lhs.shape} and {rhs.shape}: the product, forward or "
      f"backward, contracts {contracted} elements, expected a multiple of {size}; pad them, or use "
      "recipe 'current'"
    )
  for side, x in enumerate((lhs, rhs)):
    rows = math.prod(x.shape[i] for i in free_dims(x.ndim, dims, side))
    if _in_squares(spec, side) and rows % size:
      raise ValueError(
        f"fp8 recipe {spec.scheme!r} for {lhs.shape} and {rhs.shape}: the weight has {rows} rows, expected a "
        f"multiple of {size}, in squares of which it is quantised; pad them, or use recipe 'current'"
      )


def _in_squares(spec: Spec, side: int) -> bool:
  return spec.scheme == "nvfp4" and spec.roles[side] == WEIGHT


def multiply_blocks(lhs: Array, rhs: Array, dims: Dims, spec: Spec, units: DTypeLike | None) -> Array:
  """Computes a product of operands that are quantised in blocks along the contracted dimension.

  Args:
    lhs: floating.
    rhs: floating.
    dims: the dimensions of the product.
    spec: `scheme` is `mx` or `nvfp4`.
    units: the dtype in which the platform multiplies what blocks stand for; `None`: it multiplies blocks.

  Returns:
    [batch, lhs free, rhs free] in `spec.out_dtype`.
  """
  batch = len(dims[1][0])
  operands, shape, unit = [], lhs.shape[:0], None
  for side, x in enumerate((lhs, rhs)):
    x = x.transpose(*dims[1][side], *free_dims(x.ndim, dims, side), *dims[0][side])
    kept = x.shape[: x.ndim - len(dims[0][side])]
    x = x.reshape(*kept, -1) if len(dims[0][side]) != 1 else x
    shape = kept if side == 0 else (*shape, *kept[batch:])
    codes, scales, own = _quantised(x, spec, side, batch)
    operands.append((codes, scales))
    unit = own if unit is None or own is None else unit * own
  # Float16 holds the result only after it is scaled back.
  wide = _FLOAT32 if spec.out_dtype == np.float16 else spec.out_dtype
  if units is None:
    (lhs, lhs_scales), (rhs, rhs_scales) = ((_folded(x, batch), _folded(s, batch)) for x, s in operands)
    middle = lhs.ndim - 2
    dims = (((middle + 1,), (middle + 1,)), ((0,), (0,)) if middle else ((), ()))
    out = jax.lax.scaled_dot(
      lhs,
      rhs,
      lhs_scale=lhs_scales,
      rhs_scale=rhs_scales,
      dimension_numbers=dims,
      preferred_element_type=wide,
    ).reshape(shape)
  else:
    lhs, rhs = (_what_blocks_stand_for(*x, BLOCKS[spec.scheme], units) for x in operands)
    batches = tuple(range(batch))
    dims = (((lhs.ndim - 1,), (rhs.ndim - 1,)), (batches, batches))
    out = jax.lax.dot_general(
      lhs, rhs, dims, preferred_element_type=_FLOAT32, out_sharding=spec.out_sharding
    ).astype(wide)
    out = out if out.shape == shape else out.reshape(shape)
  return out.astype(spec.out_dtype) if unit is None else (out.astype(_FLOAT32) * unit).astype(spec.out_dtype)


def _quantised(x: Array, spec: Spec, side: int, batch: int) -> tuple[Array, Array, Array | None]:
  """Returns codes, scales of blocks, and what the product is multiplied by for the scale of the tensor."""
  if spec.scheme == "mx":
    return *quantise_mx(x, (spec.lhs_dtype, spec.rhs_dtype)[side]), None
  if set(spec.roles) == {ACTIVATION, GRADIENT}:  # for the gradient of a weight
    x = rotate(x)
  if _in_squares(spec, side):
    x = x.reshape(*x.shape[:batch], -1, x.shape[-1])
  is_gradient = spec.roles[side] == GRADIENT
  codes, scales, scale = quantise_nvfp4(x, squares=_in_squares(spec, side), stochastic=is_gradient)
  return codes, scales, 1 / scale


def _folded(x: Array, batch: int) -> Array:
  """Returns [batch, rows, k]; [rows, k] without a batch dimension."""
  batches = (math.prod(x.shape[:batch]),) if batch else ()
  return x.reshape(*batches, math.prod(x.shape[batch:-1]), x.shape[-1])


def _what_blocks_stand_for(codes: Array, scales: Array, size: int, dtype: DTypeLike) -> Array:
  """Multiplies blocks by their scales; bfloat16 holds the results except at the ends of its range."""
  blocks = codes.astype(jnp.float32).reshape(*scales.shape, size) * scales.astype(jnp.float32)[..., None]
  return blocks.reshape(codes.shape).astype(dtype)
