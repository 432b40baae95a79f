"""FP8 products of operands that are FP8 already: a parameter that crossed devices so, or is read often."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mpjax._types import JaxprEqn
from mpjax.fp8._dot_general import Dims, Spec, fp8_dot_general_p, jvp, spec_of
from mpjax.fp8._recipe import Recipe
from mpjax.fp8._scaling import amax_of, quantise, scale_of


def takes_codes(equation: JaxprEqn, operand: int, dtype: np.dtype) -> bool:
  """Returns whether an equation is an FP8 product that may take an operand in FP8, with its own scale.

  Args:
    equation: any.
    operand: its position.
    dtype: of the codes.
  """
  if equation.primitive is not fp8_dot_general_p or operand > 1:
    return False
  spec: Spec = equation.params["spec"]
  if spec.margin or spec.pow2:  # another scale than that of a parameter which crosses
    return False
  return not spec.block and not spec.given[operand] and (spec.lhs_dtype, spec.rhs_dtype)[operand] == dtype


class InFp8(NamedTuple):
  """A value that is there in FP8 already, with a scale of its own.

  Attributes:
    value: floating, of any shape; what is differentiated.
    codes: FP8 of its shape: the value is `codes / scale`.
    scale: f32[].
  """

  value: Array
  codes: Array
  scale: Array


def in_fp8(x: Array, recipe: Recipe) -> Array | InFp8:
  """Returns an operand of several products, quantised once; as it is where its blocks go by the product."""
  if recipe.recipe == "block":
    return x
  scale = scale_of(amax_of(x), recipe.forward, recipe.margin, recipe.pow2_scales)
  return InFp8(x, quantise(x, scale, recipe.forward), scale)


def product(
  lhs: Array | InFp8,
  rhs: Array | InFp8,
  dimension_numbers: Dims,
  recipe: Recipe,
  *,
  out_dtype: np.dtype,
  gradient_operand: tuple[bool, bool] = (False, False),
  native: bool | None = None,
) -> Array:
  """Computes a product as `fp8_dot_general` does, which is not differentiated."""
  pair, one = (lhs, rhs), jnp.ones([], jnp.float32)
  given = (isinstance(lhs, InFp8), isinstance(rhs, InFp8), False)
  spec = spec_of(recipe, gradient_operand, given, out_dtype, native)
  codes = [x.codes if isinstance(x, InFp8) else x for x in pair]
  scales = [x.scale if isinstance(x, InFp8) else one for x in pair]
  return fp8_dot_general_p.bind(*codes, *scales, one, dimension_numbers=dimension_numbers, spec=spec)


def multiply_codes(equation: JaxprEqn, operands: Sequence[Array | InFp8]) -> Array:
  """Applies an FP8 product to operands of which some are in FP8, as `takes_codes` allows."""
  spec, dims = equation.params["spec"], equation.params["dimension_numbers"]
  values = [x.value if isinstance(x, InFp8) else x for x in operands[:2]]
  codes = [x.codes if isinstance(x, InFp8) else None for x in operands[:2]]
  pairs = zip(operands[:2], operands[2:4], strict=True)
  scales = [*(x.scale if isinstance(x, InFp8) else cast(Array, scale) for x, scale in pairs), operands[4]]
  given = (*(own or x is not None for own, x in zip(spec.given[:2], codes, strict=True)), spec.given[2])
  spec = dataclasses.replace(spec, given=given)

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

  return multiply(values, codes, scales)
