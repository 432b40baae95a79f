"""Dimensions and scales of a product, the products for its gradients, and JAX's rules with another product.

A scale is f32[] for a tensor. By entry it has the dimensions of its operand, each of size 1 unless entries
along it have scales of their own: channels, or the members of an ensemble under `vmap`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import interpret

Dims: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]
Bind: TypeAlias = Callable[..., Array]

LARGEST_UNIT = 2.0**127  # that a scale gives a result; also of bfloat16


def free_dims(ndim: int, dims: jax.lax.DotDimensionNumbers, side: int) -> list[int]:
  """Returns the dimensions of the lhs (side 0) or rhs (1) that are neither contracted nor batch."""
  used = {*dims[0][side], *dims[1][side]}
  return [i for i in range(ndim) if i not in used]


def gradient_product(
  operand: ShapedArray, other_ndim: int, dims: Dims, side: int, *, cotangent_first: bool
) -> tuple[Dims, NamedSharding | None, Callable[[Array], Array]]:
  """Returns the product for the gradient of one operand, as JAX's own rule computes it.

  Args:
    operand: the type of the operand.
    other_ndim: the number of dimensions of the other operand.
    dims: the dimensions of the product.
    side: 0 if the operand is the lhs, 1 if it is the rhs.
    cotangent_first: whether the cotangent is the lhs of the gradient's product, or the rhs.

  Returns:
    dims: the dimensions of the product of the cotangent and the other operand.
    out_sharding: the sharding of its result; `None` without explicit axes.
    in_layout: its result -> the gradient, in the operand's layout and dtype.
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

  def in_layout(out: Array) -> Array:
    return jax.lax.convert_element_type(jax.lax.transpose(out, permutation), operand.dtype)

  return (contracted, batches), _compat.permuted_sharding(operand, layout), in_layout


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


def gradient_as_jax(
  plain: Primitive,
  ct: Array,
  x: ad.UndefinedPrimal,
  others: Sequence[Array],
  side: int,
  parameters: Mapping[str, Any],
  bind: Bind,
) -> Array:
  """Returns the cotangent of an operand as JAX's rule does: views of the operands, and a product.

  Args:
    plain: JAX's product.
    ct: the cotangent of its result.
    x: the operand.
    others: the other of lhs and rhs, and the operands after them.
    side: 0 if the operand is the lhs, 1 if it is the rhs.
    parameters: those of the product.
    bind: applies another product to operands, each a list of arrays with the same views, and parameters.
  """
  rule = ad.primitive_transposes[plain]
  dtype = ct.dtype

  def of_jax(ct: Array, y: Array, *more: Array) -> Array:
    return rule(ct, *((x, y) if side == 0 else (y, x)), *more, **parameters)[side]

  if ct.size == 0 or _compat.is_explicit(x.aval):
    return of_jax(ct, others[0].astype(dtype), *others[1:])
  return _replaced(plain, of_jax, [[a] for a in (ct, *others)], dtype, bind)


def mapped_as_jax(
  plain: Primitive,
  axis_data: Any,
  operands: Sequence[list[Array]],
  axes: Sequence[int | None],
  dtype: np.dtype,
  parameters: Mapping[str, Any],
  bind: Bind,
) -> tuple[Array, int | None]:
  """Returns a product whose operands `vmap` maps over, as JAX's rule does, and its mapped dimension.

  Args:
    axis_data: the argument of that name of a batching rule, which is also called if nothing is mapped.
    operands: its operands, each with arrays of the same shape and mapped dimension.
    axes: the mapped dimension of each; `None` for an operand that is not mapped.
    dtype: the dtype of lhs and rhs in JAX's product.
    plain, parameters, bind: see `gradient_as_jax`.
  """
  found: list[int | None] = []

  def mapped(*operands: Array) -> Array:
    out, axis = batching.fancy_primitive_batchers[plain](axis_data, operands, axes, **parameters)
    found.append(axis)
    return out

  lhs, rhs, *more = (group[0] for group in operands)
  if lhs.size and rhs.size:
    # JAX's rule reads the default precision.
    own = lambda values, **changed: bind(values, **{**changed, "precision": parameters["precision"]})
    out = _replaced(plain, mapped, operands, dtype, own)
  else:  # JAX binds no convolution
    out = mapped(lhs.astype(dtype), rhs.astype(dtype), *more)
  return out, found[0]


def _replaced(
  plain: Primitive, fun: Callable[..., Array], operands: Sequence[list[Array]], dtype: np.dtype, bind: Bind
) -> Array:
  """Returns the result of views and one product (of lhs and rhs in a dtype), with another product."""
  types = [jax.typeof(x) for x, *_ in operands]
  like = [
    jax.ShapeDtypeStruct(
      x.shape, dtype if i < 2 else x.dtype, sharding=x.sharding if _compat.is_explicit(x) else None
    )
    for i, x in enumerate(types)
  ]

  def rule(equation: JaxprEqn, values: list[list[Array]]) -> list[list[Array]]:
    if equation.primitive is plain:
      return [[bind(values, **equation.params)]]
    return [[_compat.bind(equation, [x])[0] for x in values[0]]]

  return cast(Array, interpret(jax.make_jaxpr(fun)(*like), operands, rule)[0][0])


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
