"""FP8 products of operands already in FP8: parameters that crossed devices in FP8."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from jax import Array

from mpjax._types import JaxprEqn
from mpjax.jaxpr import shape_of
from mpjax.products._fp8_dot_general import fp8_dot_general_p, jvp
from mpjax.products._spec import Spec


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
  if spec.scheme != "tensor" or spec.margin or shape_of(equation.invars[2 + operand]):
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
    out, tangent = jvp(primals[1:], tangents[0], dimension_numbers=dims, spec=spec)
    return out, cast(Array, tangent)

  return multiply(values, *stored, *scales, of_gradient)
