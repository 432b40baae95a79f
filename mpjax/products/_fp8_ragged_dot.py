"""Products of experts with FP8 operands, in the forward and both backward products.

A scale belongs to the values that are summed together: a row of activations, a channel of one expert's
weight, and in the gradient of the weights a column of one expert's rows. So experts with small values
keep their digits. Other extents do not pay here: a scale for a tensor is coarser and needs a pass of its own,
and blocks of the contracted dimension may cross the end of an expert's rows.

The rows of an expert follow each other; rows after the last expert's are zero in the result, as in
`jax.lax.ragged_dot`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.interpreters import ad
from jax.lax import RaggedDotDimensionNumbers

from mpjax import _compat
from mpjax._types import JaxprEqn
from mpjax.fp8 import FP4, Recipe, amax_of, quantise, scale_of
from mpjax.jaxpr import shape_of
from mpjax.products._dimensions import free_dims, gradient_as_jax, mapped_as_jax, sum_of_tangents
from mpjax.products._half_products import half_ragged_dot_p
from mpjax.products._primitives import define, fp8_primitive
from mpjax.products._spec import FLOAT32, Spec

_Scaled: TypeAlias = tuple[Array, Array]  # codes, and the units of the result that they give it


def recipe_of_experts(recipe: Recipe) -> Recipe:
  """Returns the recipe for products of experts, which are scaled per channel under every recipe.

  Gradients with a scale for each channel do not need the range of E5M2, which those with a scale for each
  tensor have.
  """
  forward, gradient = recipe.forward_dtype, recipe.gradient_dtype
  if forward == FP4:
    forward = gradient = ""
  elif recipe.of_tensors and "e5m2" not in forward:  # no units multiply E5M2 by E5M2
    gradient = ""
  return dataclasses.replace(
    recipe.without_histories(),
    recipe="per_channel",
    forward_dtype=forward,
    gradient_dtype=gradient,
    margin=0,
    saved_activations="compute",
  )


def multiply_ragged(equation: JaxprEqn, operands: Sequence[Array], spec: Spec) -> Array:
  """Computes a `ragged_dot_general` with FP8 operands.

  Args:
    equation: the product, of a form that `why_not_fp8` has no reason against.
    operands: lhs and rhs, floating, and the sizes of the groups.
    spec: by a recipe of `recipe_of_experts`.
  """
  parameters = {name: value for name, value in equation.params.items() if name != "originals"}
  return _bind([[x] for x in operands[:3]], spec=spec, **{**parameters, "precision": None})


def why_not_fp8(equation: JaxprEqn) -> str:
  """Returns why a `ragged_dot_general` does not have an FP8 form, whatever its sizes; empty if it does."""
  dims = cast(RaggedDotDimensionNumbers, equation.params["ragged_dot_dimension_numbers"])
  (contract, _), (batch, _) = dims.dot_dimension_numbers
  free = free_dims(len(shape_of(equation.invars[0])), dims.dot_dimension_numbers, 0)
  (ragged,) = dims.lhs_ragged_dimensions
  if ragged in batch:
    return "its groups are of a batch dimension"
  if (contract if ragged in contract else free) not in ((ragged,), [ragged]):
    return "its groups are of one of several dimensions"
  if _compat.is_explicit(equation.outvars[0].aval):
    return "there is no FP8 ragged product over explicit axes of a mesh"
  return ""


fp8_ragged_dot_p = fp8_primitive("fp8_ragged_dot", _compat.ragged_dot_general_p)


def _bind(operands: Sequence[Sequence[Array]], *, spec: Spec, **parameters: Any) -> Array:
  parameters["preferred_element_type"] = spec.out_dtype
  return fp8_ragged_dot_p.bind(*(x for (x,) in operands), spec=spec, **parameters)


def _abstract(
  lhs: ShapedArray, rhs: ShapedArray, group_sizes: ShapedArray, *, spec: Spec, **parameters: Any
) -> ShapedArray:
  plain = _compat.ragged_dot_general_p
  return _compat.product_type(plain, spec.out_dtype, lhs, rhs, group_sizes, **parameters)


def _compute(
  lhs: Array, rhs: Array, group_sizes: Array, *, spec: Spec, platform: str | None, **parameters: Any
) -> Array:
  units = spec.multiplied_in(platform)
  dims = cast(RaggedDotDimensionNumbers, parameters["ragged_dot_dimension_numbers"])
  scaled = _by_channel if dims.rhs_group_dimensions else _by_expert
  (lhs, lhs_unit), (rhs, rhs_unit), dims = scaled(lhs, rhs, group_sizes, dims, spec)
  if units is not None:  # bfloat16 holds every FP8 number
    lhs, rhs = lhs.astype(units), rhs.astype(units)
  out = jax.lax.ragged_dot_general(lhs, rhs, group_sizes, dims, preferred_element_type=spec.wide)
  # One after the other: their product may leave float32's range.
  return (out.astype(jnp.float32) * lhs_unit * rhs_unit).astype(spec.out_dtype)


def _by_channel(
  lhs: Array, rhs: Array, group_sizes: Array, dims: RaggedDotDimensionNumbers, spec: Spec
) -> tuple[_Scaled, _Scaled, RaggedDotDimensionNumbers]:
  """Quantises the rows of the lhs, and the channels of each expert's rhs.

  Returns:
    lhs and rhs in FP8, each with units that broadcast to the result [*batch, rows, *rhs free]; `dims`.
  """
  contract, batch = dims.dot_dimension_numbers
  (ragged,), (group,) = dims.lhs_ragged_dimensions, dims.rhs_group_dimensions
  free = [i for i in free_dims(rhs.ndim, dims.dot_dimension_numbers, 1) if i != group]
  lhs_dtype, rhs_dtype = spec.formats
  lhs_scale = scale_of(amax_of(lhs, (*batch[0], ragged)), lhs_dtype, pow2=False)
  rhs_scale = scale_of(amax_of(rhs, (*batch[1], group, *free)), rhs_dtype, pow2=False)
  lead, rows = [lhs.shape[i] for i in batch[0]], lhs.shape[ragged]
  of_row = (1 / lhs_scale).transpose(*batch[0], ragged, *contract[0])
  of_row = of_row.reshape(*lead, rows, *(1,) * len(free))
  of_channel = (1 / rhs_scale).transpose(*batch[1], group, *free, *contract[1])
  of_channel = of_channel.reshape(math.prod(lead), rhs.shape[group], -1)  # f32[batch, experts, channels]
  at_rows = _at_rows(of_channel, _experts_of_rows(group_sizes, lead, rows))
  of_channel = at_rows.reshape(*lead, rows, *(rhs.shape[i] for i in free))
  lhs, rhs = quantise(lhs, lhs_scale, lhs_dtype), quantise(rhs, rhs_scale, rhs_dtype)
  return (lhs, of_row), (rhs, of_channel), dims


def _by_expert(
  lhs: Array, rhs: Array, group_sizes: Array, dims: RaggedDotDimensionNumbers, spec: Spec
) -> tuple[_Scaled, _Scaled, RaggedDotDimensionNumbers]:
  """Quantises the columns of each expert's rows, which are contracted.

  Returns:
    lhs and rhs as [*batch, rows, *free] in FP8, each with units that broadcast to the result [experts,
    *batch, *lhs free, *rhs free]; the dimensions of their product.
  """
  contract, batch = dims.dot_dimension_numbers
  lead = [lhs.shape[i] for i in batch[0]]
  experts = _experts_of_rows(group_sizes, lead, lhs.shape[contract[0][0]])
  frees = [free_dims(x.ndim, dims.dot_dimension_numbers, side) for side, x in enumerate((lhs, rhs))]
  found: list[_Scaled] = []
  for side, (x, dtype) in enumerate(zip((lhs, rhs), spec.formats, strict=True)):
    x = x.transpose(*batch[side], *contract[side], *frees[side])
    columns = x.reshape(math.prod(lead), experts.shape[1], -1)
    scale = scale_of(_amax_by_expert(columns, experts, group_sizes.shape[-1]), dtype, pow2=False)
    codes = quantise(columns, _at_rows(scale, experts), dtype).reshape(x.shape)
    ones = [(1,) * len(free) for free in frees]
    ones[side] = x.shape[len(lead) + 1 :]
    found.append((codes, jnp.moveaxis(1 / scale, 1, 0).reshape(-1, *lead, *ones[0], *ones[1])))
  n = len(lead)
  numbers = (((n,), (n,)), (tuple(range(n)), tuple(range(n))))
  return found[0], found[1], RaggedDotDimensionNumbers(numbers, (n,), ())


def _experts_of_rows(group_sizes: Array, lead: Sequence[int], rows: int) -> Array:
  """Returns the expert of each row, int32[batch, rows]; after the last expert's rows, their number."""
  sizes = jnp.broadcast_to(group_sizes.astype(jnp.int32), (*lead, group_sizes.shape[-1]))
  ends = jnp.cumsum(sizes.reshape(math.prod(lead), -1), -1)
  return jnp.sum(np.arange(rows)[:, None] >= ends[:, None], -1, dtype=jnp.int32)


def _at_rows(of_experts: Array, experts: Array) -> Array:
  """Returns f32[batch, rows, n] from f32[batch, experts, n]; after the last expert's rows, that expert's."""
  return jnp.take_along_axis(of_experts, experts[..., None], 1, mode="clip")


def _amax_by_expert(x: Array, experts: Array, n: int) -> Array:
  """Returns the largest magnitude in each column of each expert's rows, f32[batch, n, columns].

  Args:
    x: floating[batch, rows, columns].
    experts: the expert of each row, int32[batch, rows]; `n` for none.
    n: the number of experts.
  """
  # Magnitudes are ordered as their bits, NaN the largest; GPUs have an atomic maximum of integers.
  bits = jax.lax.bitcast_convert_type(jnp.abs(x.astype(jnp.float32)), jnp.int32)
  none = _compat.vary_like(jnp.zeros((x.shape[0], n, x.shape[2]), jnp.int32), bits)
  batch = np.arange(x.shape[0])[:, None]
  largest = none.at[batch, experts].max(bits, mode="drop", indices_are_sorted=True)
  return jax.lax.bitcast_convert_type(largest, jnp.float32)


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, spec: Spec, **parameters: Any
) -> tuple[Array, Array | ad.Zero]:
  lhs, rhs, group_sizes = primals

  def term(side: int, lhs: Array, rhs: Array) -> Array:
    if spec.recipe.backward == "compute":
      lhs, rhs = (x if i == side else x.astype(spec.out_dtype) for i, x in enumerate((lhs, rhs)))
      return half_ragged_dot_p.bind(lhs, rhs, group_sizes, originals=(), **parameters)
    return _bind([[lhs], [rhs], [group_sizes]], spec=spec.with_gradient(side), **parameters)

  out = fp8_ragged_dot_p.bind(*primals, spec=spec, **parameters)
  return out, sum_of_tangents(out, (lhs, rhs), enumerate(tangents[:2]), term)


def _transpose(
  ct: Array,
  side: int,
  *operands: Any,  # an `ad.UndefinedPrimal` on that side
  spec: Spec,
  **parameters: Any,
) -> Array:
  x, y = operands[side], operands[1 - side]
  # The gradient is the left operand for lhs and the right one for rhs, so that E4M3 and E5M2 always meet.
  out = FLOAT32 if x.aval.dtype == FLOAT32 else spec.out_dtype  # float32 for a master weight
  bind = functools.partial(_bind, spec=dataclasses.replace(spec.with_gradient(side), out_dtype=out))
  parameters["preferred_element_type"] = out
  return gradient_as_jax(_compat.ragged_dot_general_p, ct, x, [y, operands[2]], side, parameters, bind)


def _batch(
  axis_data: Any, operands: Sequence[Array], axes: Sequence[int | None], *, spec: Spec, **parameters: Any
) -> tuple[Array, int | None]:
  """Maps the product as JAX maps its own: each member's rows, columns and channels have their own scales."""
  bind, groups = functools.partial(_bind, spec=spec), [[x] for x in operands]
  plain = _compat.ragged_dot_general_p
  return mapped_as_jax(plain, axis_data, groups, axes, spec.out_dtype, parameters, bind)


define(fp8_ragged_dot_p, _abstract, _compute, _jvp, _transpose, _batch)
