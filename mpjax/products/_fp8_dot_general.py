"""A bilinear primitive with FP8 operands, in the forward and both backward products.

As a primitive it is differentiated like `dot_general` (forward and reverse, to any order). The platform
that it is lowered for decides whether FP8 units or wider ones multiply; the numbers are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.interpreters import ad, batching

from mpjax import _compat
from mpjax._types import JaxprEqn
from mpjax.fp8 import amax_of, not_differentiable, quantise, scale_of
from mpjax.jaxpr import shape_of
from mpjax.products._blocks import multiply_blocks, require_whole_blocks
from mpjax.products._dimensions import (
  LARGEST_UNIT,
  Dims,
  gradient_product,
  levelled,
  mapped_as_jax,
  own_dims,
  product_of_scales,
  sum_of_tangents,
)
from mpjax.products._half_products import half_product
from mpjax.products._primitives import define, fp8_primitive
from mpjax.products._spec import FLOAT32, Spec


def multiply_dot(
  lhs: Array,
  rhs: Array,
  dimension_numbers: jax.lax.DotDimensionNumbers,
  spec: Spec,
  scales: Sequence[Array] | None = None,
) -> Array:
  """Applies the primitive to operands that may vary over different axes of a mesh.

  Args:
    lhs: floating.
    rhs: floating.
    dimension_numbers: see `jax.lax.dot_general`.
    spec: all but whether scales are given.
    scales: float32[] for lhs, rhs and the gradient; `None`: from the tensors.
  """
  contracted, batch = dimension_numbers
  dims = tuple(tuple(tuple(int(i) for i in part) for part in pair) for pair in (contracted, batch))
  lhs, rhs = _compat.vary_like(lhs, rhs), _compat.vary_like(rhs, lhs)
  spec = dataclasses.replace(spec, given=(scales is not None,) * 3)
  factors = [jnp.ones([], jnp.float32)] * 3 if scales is None else [jnp.asarray(x, FLOAT32) for x in scales]
  return fp8_dot_general_p.bind(lhs, rhs, *factors, dimension_numbers=dims, spec=spec)


fp8_dot_general_p = fp8_primitive("fp8_dot_general", jax.lax.dot_general_p)


def _abstract(
  lhs: ShapedArray, rhs: ShapedArray, *scales: ShapedArray, dimension_numbers: Dims, spec: Spec
) -> ShapedArray:
  if spec.in_blocks:
    require_whole_blocks(lhs, rhs, scales, dimension_numbers, spec)
  # The type of a product in the dtype of the result, so that shardings and varying axes are right.
  return _compat.product_type(
    jax.lax.dot_general_p, spec.out_dtype, lhs, rhs, dimension_numbers=dimension_numbers, **_as_plain(spec)
  )


def _as_plain(spec: Spec) -> dict[str, Any]:
  """Returns the parameters of JAX's product, except its dimensions."""
  return {
    "precision": None,
    "preferred_element_type": spec.out_dtype,
    "out_sharding": spec.out_sharding,
  }


def _compute(
  lhs: Array,
  rhs: Array,
  *scales: Array,
  dimension_numbers: Dims,
  spec: Spec,
  platform: str | None,
) -> Array:
  multiplied_in = spec.multiplied_in(platform)
  if spec.in_blocks:
    kinds = map(jax.typeof, (lhs, rhs, *scales))
    kind = _abstract(*kinds, dimension_numbers=dimension_numbers, spec=spec)
    spec = dataclasses.replace(spec, out_sharding=None)
    members = [own_dims(scale.shape) for scale in scales[:2]]
    fun = functools.partial(
      multiply_blocks, members=members, dims=dimension_numbers, spec=spec, units=multiplied_in
    )
    return _compat.with_auto_axes(fun, kind)(lhs, rhs)
  operands, formats, ndims = (lhs, rhs), spec.formats, (lhs.ndim, rhs.ndim)
  own = [_scale(x, scales, side, spec, dimension_numbers) for side, x in enumerate(operands)]
  # The gradient's scale first: its format has more binades below.
  sides = sorted((0, 1), key=lambda side: formats[side] != spec.recipe.gradient)
  own = levelled(own, dimension_numbers, ndims, [i for i in sides if not _is_fixed(operands[i], i, spec)])
  lhs, rhs = (_in_fp8(x, scale, dtype) for x, scale, dtype in zip(operands, own, formats, strict=True))
  if multiplied_in is not None:  # bfloat16 holds every FP8 number
    lhs, rhs = lhs.astype(multiplied_in), rhs.astype(multiplied_in)
  out = jax.lax.dot_general(
    lhs, rhs, dimension_numbers, preferred_element_type=spec.wide, out_sharding=spec.out_sharding
  )
  unit = jnp.minimum(1 / product_of_scales(own, dimension_numbers, ndims), LARGEST_UNIT)
  # A power of two, in the dtype of the product, is exact, and XLA for GPU fuses it with the product.
  of = spec.wide if spec.pow2 else FLOAT32
  return (out.astype(of) * unit.astype(of).reshape(unit.shape or (1,) * out.ndim)).astype(spec.out_dtype)


def _is_fixed(x: Array, side: int, spec: Spec) -> bool:
  """Returns whether the scale of an operand is an operand, too."""
  return spec.given[side] or x.dtype.itemsize == 1


def _scale(x: Array, scales: Sequence[Array], side: int, spec: Spec, dims: Dims) -> Array:
  if _is_fixed(x, side, spec):
    return scales[side]
  alone = own_dims(scales[side].shape)
  if spec.scheme == "per_channel":  # values that are not summed together have scales of their own
    alone = [i for i in range(x.ndim) if i not in dims[0][side]]
  return scale_of(amax_of(x, alone), spec.formats[side], spec.recipe.margin, spec.pow2)


def _in_fp8(x: Array, scale: Array, dtype: np.dtype) -> Array:
  """Quantises an operand, or converts one in FP8: a backward product may have another format."""
  return x.astype(dtype) if x.dtype.itemsize == 1 else quantise(x, scale, dtype)


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, dimension_numbers: Dims, spec: Spec
) -> tuple[Array, Array | ad.Zero]:
  lhs, rhs, *scales = primals
  # Quantised before they are differentiated, so that the backward pass keeps them in FP8.
  if spec.recipe.saved_activations == "fp8":
    lhs, rhs = not_differentiable(lhs), not_differentiable(rhs)
    own = [_scale(x, scales, side, spec, dimension_numbers) for side, x in enumerate((lhs, rhs))]
    lhs, rhs = (_in_fp8(*each) for each in zip((lhs, rhs), own, spec.formats, strict=True))
    scales = [*own, scales[2]]
    recipe = dataclasses.replace(spec.recipe, saved_activations="compute")
    spec = dataclasses.replace(spec, recipe=recipe, given=(True, True, spec.given[2]))
  bind = functools.partial(fp8_dot_general_p.bind, dimension_numbers=dimension_numbers)
  out = bind(lhs, rhs, *scales, spec=spec)

  def term(side: int, lhs: Array, rhs: Array) -> Array:
    if spec.recipe.backward == "compute":
      pair = zip((lhs, rhs), scales, strict=False)
      lhs, rhs = (x if i == side else _widened(x, s, spec.out_dtype) for i, (x, s) in enumerate(pair))
      return half_product(lhs, rhs, dimension_numbers, spec.out_dtype, spec.out_sharding)
    given: Any = tuple(known and i != side for i, known in enumerate(spec.given))
    return bind(lhs, rhs, *scales, spec=dataclasses.replace(spec.with_gradient(side), given=given))

  return out, sum_of_tangents(out, (lhs, rhs), enumerate(tangents[:2]), term)


def _widened(x: Array, scale: Array, dtype: np.dtype) -> Array:
  """Returns an operand in a wider dtype; `scale` is that of one in FP8."""
  if x.dtype.itemsize > 1:
    return x.astype(dtype)
  return (x.astype(jnp.float32) / scale.reshape(scale.shape + (1,) * (x.ndim - scale.ndim))).astype(dtype)


def _transpose(
  ct: Array,
  side: int,
  *operands: Any,  # an `ad.UndefinedPrimal` on that side
  dimension_numbers: Dims,
  spec: Spec,
) -> Array:
  (*pair, lhs_scale, rhs_scale, of_next), own = operands, (operands[2], operands[3])
  like, other_ndim = pair[side].aval, pair[1 - side].ndim
  # The gradient is the left operand for lhs and the right one for rhs, so that E4M3 and E5M2 always meet.
  dims, sharding, in_layout = gradient_product(
    like, other_ndim, dimension_numbers, side, cotangent_first=side == 0
  )
  of_gradient, known = of_next, spec.given[2]
  if not known:  # by entry where that of an operand is
    ndims = (like.ndim, other_ndim)[:: 1 if side == 0 else -1]
    in_result = functools.partial(product_of_scales, dims=dimension_numbers, ndims=ndims)
    shape = jax.eval_shape(in_result, (lhs_scale, rhs_scale)).shape
    of_gradient = of_gradient if of_gradient.shape == shape else jnp.ones(shape, jnp.float32)
  put = lambda values, value: tuple(value if i == side else x for i, x in enumerate(values))
  given: Any = (*put(spec.given[:2], known), False)  # a gradient of a gradient differs from the history's
  backward = dataclasses.replace(
    spec.with_gradient(side),
    given=given,
    out_dtype=like.dtype if like.dtype.itemsize > 1 else spec.out_dtype,  # float32 for a master weight
    out_sharding=sharding,
  )
  values = (*put(pair, ct), *put(own, of_gradient), of_next)
  return in_layout(fp8_dot_general_p.bind(*values, dimension_numbers=dims, spec=backward))


def _batch(
  axis_data: Any,
  operands: Sequence[Array],
  axes: Sequence[int | None],
  *,
  dimension_numbers: Dims,
  spec: Spec,
) -> tuple[Array, int | None]:
  pair, sides, size = list(operands[:2]), list(axes[:2]), axis_data.size
  scales = list(zip(operands[2:], axes[2:], spec.given, strict=True))
  mapped = any(axis is not None for axis in axes)
  of_members = mapped and any(given and (x.ndim or axis is not None) for x, axis, given in scales)
  for i, (x, axis) in enumerate(zip(pair, sides, strict=True)):
    # In `nvfp4` the rows of a square are those of one member.
    if of_members or (spec.scheme == "nvfp4" and axis is not None):
      pair[i], sides[i] = batching.bdim_at_front(x, axis, size), 0
  (contracted, _), (batch, _) = dimension_numbers
  ndims = [x.ndim for x in pair]
  # The given scale of a gradient is by entry for members of both operands, with which the result begins.
  places = [*zip(sides, ndims, strict=True), (0, sum(ndims) - 1 - len(batch) - 2 * len(contracted))]
  by_entry = []
  for i, ((scale, axis, given), (at, ndim)) in enumerate(zip(scales, places, strict=True)):
    # A channel or a block of `mx` belongs to one member; a gradient's scale is read only if it is given.
    of_tensor = (spec.recipe.of_tensors or spec.scheme == "nvfp4") and i < 2
    own = scale.ndim or axis is not None if given else of_tensor
    if mapped and own and at is not None:
      scale = batching.bdim_at_front(scale, axis, 1 if given else size)
      scale = jnp.moveaxis(scale.reshape(scale.shape[0], *(scale.shape[1:] or (1,) * (ndim - 1))), 0, at)
    by_entry.append(scale)

  def bind(values: Sequence[Sequence[Array]], **parameters: Any) -> Array:
    dims, sharding = parameters["dimension_numbers"], parameters["out_sharding"]
    of_result = dataclasses.replace(spec, out_sharding=sharding)
    return fp8_dot_general_p.bind(*(x for (x,) in values), *by_entry, dimension_numbers=dims, spec=of_result)

  parameters = {"dimension_numbers": dimension_numbers, **_as_plain(spec)}
  return mapped_as_jax(
    jax.lax.dot_general_p, axis_data, [[x] for x in pair], sides, spec.out_dtype, parameters, bind
  )


define(fp8_dot_general_p, _abstract, _compute, _jvp, _transpose, _batch)


# Operands already in FP8: parameters that crossed devices in FP8


def takes_codes(equation: JaxprEqn, operand: int, dtype: np.dtype) -> bool:
  """Returns whether an equation is an FP8 product that may take an operand in FP8, with its own scale.

  Args:
    equation: any equation.
    operand: the operand's position.
    dtype: dtype of the codes.
  """
  if equation.primitive is not fp8_dot_general_p or operand > 1:
    return False
  spec: Spec = equation.params["spec"]
  # The scale of a parameter that crosses devices has no margin.
  if not spec.recipe.of_tensors or spec.recipe.margin or shape_of(equation.invars[2 + operand]):
    return False
  return not spec.given[operand] and spec.formats[operand] == dtype


class InFp8(NamedTuple):
  """A value already in FP8, with its own scale.

  Attributes:
    value: floating, of any shape; what is differentiated.
    codes: FP8, of its shape: the value is `codes / scale`.
    scale: f32[].
  """

  value: Array
  codes: Array
  scale: Array


def multiply_codes(equation: JaxprEqn, operands: Sequence[Array | InFp8]) -> Array:
  """Applies an FP8 product to operands, of which some are in FP8, as `takes_codes` allows.

  Its derivative uses the values of the operands in FP8.
  """
  spec, dims = equation.params["spec"], equation.params["dimension_numbers"]
  pair, (*own, of_gradient) = operands[:2], cast(Sequence[Array], operands[2:])
  values = [x.value if isinstance(x, InFp8) else x for x in pair]
  stored = [x.codes if isinstance(x, InFp8) else x for x in pair]
  scales = [x.scale if isinstance(x, InFp8) else scale for x, scale in zip(pair, own, strict=True)]
  given = [known or isinstance(x, InFp8) for known, x in zip(spec.given, pair, strict=False)]
  spec = dataclasses.replace(spec, given=(*given, spec.given[2]))

  @jax.custom_jvp
  def multiply(values: Sequence[Array], *operands: Array) -> Array:
    return fp8_dot_general_p.bind(*operands, dimension_numbers=dims, spec=spec)

  @multiply.defjvp
  def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    out, tangent = _jvp(primals[1:], tangents[0], dimension_numbers=dims, spec=spec)
    return out, cast(Array, tangent)

  return multiply(values, *stored, *scales, of_gradient)
