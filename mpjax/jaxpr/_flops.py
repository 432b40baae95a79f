"""Floating-point operations of matrix products and convolutions, 2 for a multiply-add."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np


def flops(equation: Any) -> int:
  """Floating-point operations of a matrix product or convolution; 0 for every other equation."""
  name = equation.primitive.name
  if name in ("dot_general", "fp8_dot_general"):
    (contracted, _), _ = equation.params["dimension_numbers"]
    depth = math.prod(equation.invars[0].aval.shape[i] for i in contracted)
    return 2 * depth * math.prod(equation.outvars[0].aval.shape)
  if name == "ragged_dot_general":
    # Every row meets one group's matrix, whatever the group sizes.
    numbers = equation.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    lhs, rhs = (a.aval.shape for a in equation.invars[:2])
    (contracted, of_rhs), (_, of_rhs_batch) = numbers
    groups = set(equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
    free = [d for i, d in enumerate(rhs) if i not in {*of_rhs, *of_rhs_batch, *groups}]
    return 2 * math.prod(lhs) * math.prod(free)
  if name == "conv_general_dilated":
    return _convolution(equation)
  return 0


@functools.lru_cache(maxsize=4096)
def taps(
  inputs: int, results: int, size: int, stride: int, pad: int, lhs_dilate: int, rhs_dilate: int
) -> int:
  """How many (result, tap) pairs of a convolution along one dimension meet an input.

  The others meet padding, or a gap that dilation put between inputs, and need no arithmetic.

  Args:
    inputs: size of the input along the dimension.
    results: size of the result.
    size: taps of the window.
    stride: of the window.
    pad: before the first input.
    lhs_dilate: distance of the inputs.
    rhs_dilate: distance of the taps.
  """
  at = np.arange(results)[:, None] * stride + np.arange(size) * rhs_dilate - pad
  return int(((at >= 0) & (at <= (inputs - 1) * lhs_dilate) & (at % lhs_dilate == 0)).sum())


def _convolution(equation: Any) -> int:
  params = equation.params
  spec = params["dimension_numbers"]
  inputs, kernel = (atom.aval.shape for atom in equation.invars[:2])
  out = equation.outvars[0].aval.shape
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
