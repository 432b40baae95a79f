"""Floating-point operations of matrix products, convolutions and kernels; a multiply-add counts 2."""

from __future__ import annotations

import functools
import math

import numpy as np

from mpjax._types import JaxprEqn
from mpjax.jaxpr._bodies import shape_of
from mpjax.jaxpr._primitives import Trait, has


def flops(equation: JaxprEqn) -> int:
  """Returns the FLOPs of a matrix product or convolution, a kernel's own figure, otherwise 0."""
  if has(equation, Trait.KERNEL):
    return int(getattr(equation.params.get("cost_estimate"), "flops", 0))
  if not has(equation, Trait.PRODUCT):
    return 0
  if "lhs_dilation" in equation.params:
    return _convolution(equation)
  # Each row of a ragged product is multiplied by one group's matrix, for all group sizes.
  ragged = equation.params.get("ragged_dot_dimension_numbers")
  numbers = ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
  (_, contracted), (_, batch) = numbers
  lhs, rhs = (shape_of(atom) for atom in equation.invars[:2])
  shared = {*contracted, *batch, *(ragged.rhs_group_dimensions if ragged else ())}
  return 2 * math.prod(lhs) * math.prod(size for i, size in enumerate(rhs) if i not in shared)


@functools.lru_cache(maxsize=4096)
def taps(
  inputs: int, results: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
  """Counts the (result, tap) pairs of a convolution along one dimension that meet an input.

  The other pairs meet padding, or a gap that dilation put between inputs, and need no arithmetic.

  Args:
    inputs: size of the input along the dimension.
    results: size of the result.
    size: taps of the window.
    stride: stride of the window.
    pad: padding before the first input.
    lhs_dilate: distance of the inputs.
    rhs_dilate: distance of the taps.
  """
  at = np.arange(results)[:, None] * stride + np.arange(size) * rhs_dilate - pad
  return int(((at >= 0) & (at <= (inputs - 1) * lhs_dilate) & (at % lhs_dilate == 0)).sum())


def _convolution(equation: JaxprEqn) -> int:
  params = equation.params
  spec = params["dimension_numbers"]
  inputs, kernel = (shape_of(atom) for atom in equation.invars[:2])
  out = shape_of(equation.outvars[0])
  met = math.prod(
    taps(
      inputs[spec.lhs_spec[i + 2]],
      out[spec.out_spec[i + 2]],
      kernel[spec.rhs_spec[i + 2]],
      params["window_strides"][i],
      params["padding"][i][0],
      params["lhs_dilation"][i],
      params["rhs_dilation"][i],
    )
    for i in range(len(out) - 2)
  )
  return 2 * out[spec.out_spec[0]] * out[spec.out_spec[1]] * kernel[spec.rhs_spec[1]] * met
