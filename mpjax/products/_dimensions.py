"""Dimensions and sizes of a product, the products for its gradients, and the sum of its tangents."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Array
from mpjax.fp8 import Recipe

Dims: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]


def free_dims(ndim: int, dims: jax.lax.DotDimensionNumbers, side: int) -> list[int]:
  """Returns the dimensions of the lhs (side 0) or rhs (1) that are neither contracted nor batch."""
  used = {*dims[0][side], *dims[1][side]}
  return [i for i in range(ndim) if i not in used]


class Sizes(NamedTuple):
  """A product as [m, k] x [k, n], without batch dimensions; a symbolic dimension is `None`."""

  m: int | None
  k: int | None
  n: int | None


def sizes_of(
  lhs_shape: tuple[Any, ...], rhs_shape: tuple[Any, ...], dimension_numbers: jax.lax.DotDimensionNumbers
) -> Sizes:
  """Returns the sizes of a `dot_general`, its dimensions folded."""

  def folded(sizes: list[Any]) -> int | None:
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None

  return Sizes(
    folded([lhs_shape[i] for i in free_dims(len(lhs_shape), dimension_numbers, 0)]),
    folded([lhs_shape[i] for i in dimension_numbers[0][0]]),
    folded([rhs_shape[i] for i in free_dims(len(rhs_shape), dimension_numbers, 1)]),
  )


def unfit(sizes: Sizes, recipe: Recipe) -> str | None:
  """Returns why a product of these sizes is not quantised; `None` if it is.

  All three dimensions count: each is contracted in one of the forward and the two backward products.
  """
  named = {"M": sizes.m, "K": sizes.k, "N": sizes.n}
  known = {name: size for name, size in named.items() if size is not None}
  if len(known) < len(named):
    return "a dimension is symbolic, so it may not be a multiple of 16"
  shown = " x ".join(f"{name}={size}" for name, size in known.items())
  odd = [name for name, size in known.items() if size % recipe.multiple]
  if odd:
    return f"{shown}: {', '.join(odd)} is not a multiple of {recipe.multiple}"
  if min(known.values()) < recipe.min_dim:
    return f"{shown}: smaller than fp8.min_dim={recipe.min_dim}"
  return None


class GradientProduct(NamedTuple):
  """The product that gives an operand's gradient: its dimensions, and the transpose to the operand's layout.

  Attributes:
    dims: the dimensions of the product of the cotangent and the other operand.
    permutation: from the product's result to the operand.
    out_sharding: the sharding of the product's result; `None` without explicit axes.
    operand: the operand's type.
  """

  dims: Dims
  permutation: tuple[int, ...]
  out_sharding: NamedSharding | None
  operand: ShapedArray

  def in_layout(self, out: Array) -> Array:
    """Returns the product's result as the operand's gradient."""
    return jax.lax.convert_element_type(jax.lax.transpose(out, self.permutation), self.operand.dtype)


def gradient_product(
  operand: ShapedArray, other_ndim: int, dims: Dims, side: int, *, cotangent_first: bool
) -> GradientProduct:
  """Returns the product for the gradient of one operand, as JAX's own rule computes it.

  Args:
    operand: the type of the operand.
    other_ndim: the number of dimensions of the other operand.
    dims: the dimensions of the product.
    side: 0 if the operand is the lhs, 1 if it is the rhs.
    cotangent_first: whether the cotangent is the lhs of the gradient's product, or the rhs.
  """
  (contract, other_contract), (batch, other_batch) = ((pair[side], pair[1 - side]) for pair in dims)
  free, other_free = free_dims(operand.ndim, dims, side), free_dims(other_ndim, dims, 1 - side)
  n = len(batch)
  first = n + len(free) * (side == 0)
  contracted = (tuple(range(first, first + len(other_free))), tuple(other_free))
  batches = (tuple(range(n)), other_batch)
  layout = [*batch, *free, *(contract[i] for i in np.argsort(other_contract))]
  if not cotangent_first:
    contracted, batches = contracted[::-1], batches[::-1]
    layout = [*batch, *layout[n + len(free) :], *free]
  permutation = tuple(int(i) for i in np.argsort(layout))
  sharding = _compat.permuted_sharding(operand, permutation)
  return GradientProduct((contracted, batches), permutation, sharding, operand)


def sum_of_tangents(
  out: Array,
  values: Sequence[Array],
  tangents: Iterable[tuple[int, Array | ad.Zero]],
  bind: Callable[[int, Array, Array], Array],
) -> Array | ad.Zero:
  """Returns the tangent of a product's result.

  Args:
    out: the result.
    values: lhs and rhs.
    tangents: by side (0, 1).
    bind: (side, lhs, rhs) -> the product with a tangent on that side.
  """
  lhs, rhs = values
  terms = [
    bind(side, dx, rhs) if side == 0 else bind(side, lhs, dx)
    for side, dx in tangents
    if not isinstance(dx, ad.Zero)
  ]
  return functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out))
