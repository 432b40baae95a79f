"""FP8 products of operands already in FP8: a parameter that crossed devices in FP8, or is read often."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpjax._types import JaxprEqn
from mpjax.fp8 import Recipe
from mpjax.fp8._scaling import amax_of, quantise, scale_of
from mpjax.products._dimensions import Dims
from mpjax.products._fp8_dot_general import fp8_dot_general_p, jvp, roles_of
from mpjax.products._spec import Spec, spec_of


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
  # A parameter that crosses devices has a power of two for a scale, and no margin.
  if spec.scheme != "tensor" or spec.margin or not spec.pow2 or spec.members[operand]:
    return False
  return not spec.given[operand] and (spec.lhs_dtype, spec.rhs_dtype)[operand] == dtype


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


def in_fp8(x: Array, recipe: Recipe) -> Array | InFp8:
  """Returns an operand of several products, quantised once; unchanged if its scales depend on the product."""
  if not recipe.of_tensors:
    return x
  scale = scale_of(amax_of(x), recipe.forward, recipe.margin, bool(recipe.pow2_scales))
  return InFp8(x, quantise(x, scale, recipe.forward), scale)


def product(
  lhs: Array | InFp8,
  rhs: Array | InFp8,
  dimension_numbers: Dims,
  recipe: Recipe,
  *,
  out_dtype: np.dtype,
  gradient_operand: tuple[bool, bool] = (False, False),
  weight_operand: tuple[bool, bool] = (False, True),
  native: bool | None = None,
) -> Array:
  """Computes a product as `fp8_dot_general` does; operands may be in FP8 already."""
  given = (isinstance(lhs, InFp8), isinstance(rhs, InFp8), False)
  spec, one = (
    spec_of(recipe, roles_of(gradient_operand, weight_operand), given, out_dtype, native),
    jnp.ones([], jnp.float32),
  )
  return _multiply((lhs, rhs), (one, one, one), dimension_numbers, spec)


def multiply_codes(equation: JaxprEqn, operands: Sequence[Array | InFp8]) -> Array:
  """Applies an FP8 product to operands, of which some are in FP8, as `takes_codes` allows."""
  spec, scales = equation.params["spec"], cast(Sequence[Array], operands[2:])
  given = (
    *(own or isinstance(x, InFp8) for own, x in zip(spec.given, operands[:2], strict=False)),
    spec.given[2],
  )
  spec = dataclasses.replace(spec, given=given)
  return _multiply(operands[:2], scales, equation.params["dimension_numbers"], spec)


def _multiply(pair: Sequence[Array | InFp8], scales: Sequence[Array], dims: Dims, spec: Spec) -> Array:
  """Computes a product whose derivative uses the values of the operands in FP8."""
  values = [x.value if isinstance(x, InFp8) else x for x in pair]
  codes = [x.codes if isinstance(x, InFp8) else None for x in pair]
  own = [x.scale if isinstance(x, InFp8) else scale for x, scale in zip(pair, scales, strict=False)]

  @jax.custom_jvp
  def multiply(values: Sequence[Array], codes: Sequence[Array | None], scales: Sequence[Array]) -> Array:
    primals = [value if x is None else x for value, x in zip(values, codes, strict=True)]
    return fp8_dot_general_p.bind(*primals, *scales, dimension_numbers=dims, spec=spec)

  @multiply.defjvp
  def _(primals: Any, tangents: Any) -> tuple[Array, Array]:
    values, codes, scales = primals
    known = [value if x is None else x for value, x in zip(values, codes, strict=True)]
    out, tangent = jvp((*known, *scales), tangents[0], dimension_numbers=dims, spec=spec)
    return out, cast(Array, tangent)

  return multiply(values, codes, [*own, scales[2]])
