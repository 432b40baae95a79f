"""Scales of a product's operands: one for a tensor, or one for each entry along some of its dimensions.

A scale by entry has the dimensions of its operand, each of size 1 unless entries along it have scales of
their own: the members of an ensemble under `vmap`, or channels. A scale of a tensor is f32[].
"""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from mpjax._types import Array
from mpjax.fp8._scaling import amax_of
from mpjax.products._dimensions import Dims, free_dims


def amax_by_entry(x: Array, dims: Sequence[int]) -> Array:
  """Returns the largest magnitude at each entry along some dimensions, by entry; f32[] without dimensions."""
  if not dims:
    return amax_of(x)
  within = tuple(i for i in range(x.ndim) if i not in dims)
  return jnp.max(jnp.abs(x), axis=within, keepdims=True, initial=0).astype(jnp.float32)


def own_dims(shape: Sequence[int]) -> list[int]:
  """Returns the dimensions along which a scale of this shape is by entry."""
  return [i for i, size in enumerate(shape) if size != 1]


def product_of_scales(scales: Sequence[Array], dims: Dims, ndims: Sequence[int]) -> Array:
  """Returns the product of scales, [] or [batch, lhs free, rhs free]; of `levelled` ones where they vary."""
  if not any(scale.ndim for scale in scales):
    return scales[0] * scales[1]
  free = [free_dims(ndims[side], dims, side) for side in (0, 1)]
  aligned = []
  for side, scale in enumerate(scales):
    batch, contracted = dims[1][side], dims[0][side]
    scale = scale.reshape(scale.shape or (1,) * ndims[side]).transpose(*batch, *free[side], *contracted)
    scale = scale[(..., *(0,) * len(contracted))]
    at = len(batch) if side else scale.ndim
    aligned.append(jnp.expand_dims(scale, range(at, at + len(free[1 - side]))))
  return aligned[0] * aligned[1]


def levelled(scales: Sequence[Array], dims: Dims, ndims: Sequence[int], sides: Sequence[int]) -> list[Array]:
  """Lowers scales by entry that vary in a sum so that their products are equal in it, to the lowest.

  An entry loses only values that are small compared with the sum. If neither scale can absorb the difference
  alone, both are lowered.

  Args:
    scales: the scales of lhs and rhs.
    dims: the dimensions of the product.
    ndims: the numbers of dimensions of lhs and rhs.
    sides: the operands whose scales may be lowered, in the order of preference.
  """
  if not any(i in own_dims(scales[side].shape) for side in (0, 1) for i in dims[0][side]):
    return list(scales)
  both = [scale.reshape(scale.shape or (1,) * ndim) for scale, ndim in zip(scales, ndims, strict=True)]
  for side in sides:
    own, other = both[side], both[1 - side]
    free = free_dims(other.ndim, dims, 1 - side)
    if any(other.shape[i] != 1 for i in free):
      continue
    partner = {i: j for pair in dims for i, j in zip(pair[side], pair[1 - side], strict=True)}
    shape = [other.shape[partner[i]] if i in partner else 1 for i in range(own.ndim)]
    other = other.transpose(*(partner[i] for i in sorted(partner)), *free).reshape(shape)
    lowest = (own * other).min(dims[0][side], keepdims=True)
    both[side] = jnp.minimum(lowest / other, own)
    return both
  return [scale.min(dims[0][side], keepdims=True) for side, scale in enumerate(both)]
