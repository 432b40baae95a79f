"""`fp8_dot_general` and `scaled_dot`: the products of few bits that users call, with derivatives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, DTypeLike
from mpjax.dtypes import one_of
from mpjax.fp8 import Recipe, RecipeLike, on_device, parse_recipe
from mpjax.products._fp8_dot_general import multiply_dot
from mpjax.products._spec import Spec

_FORMATS = {
  "mxfp8": Spec(Recipe("mx")),
  "mxfp4": Spec(Recipe("mx"), elements=np.dtype(jnp.float4_e2m1fn)),
  "nvfp4": Spec(Recipe("nvfp4")),
}


def fp8_dot_general(
  lhs: Array,
  rhs: Array,
  dimension_numbers: jax.lax.DotDimensionNumbers,
  recipe: RecipeLike = "current",
  *,
  scales: tuple[Array, Array, Array] | None = None,
  out_dtype: DTypeLike | None = None,
  gradient_operand: tuple[bool, bool] = (False, False),
  weight_operand: tuple[bool, bool] = (False, True),
  native: bool | None = None,
) -> Array:
  """Computes `jax.lax.dot_general` with FP8 operands and float32 accumulation, forward and backward.

  ```python
  y = mpjax.fp8_dot_general(x, params["body"]["kernel"], (((1,), (0,)), ((), ())))
  ```

  Operands are scaled, saturated and rounded to `recipe.forward_dtype`, incoming gradients to
  `recipe.gradient_dtype`. Scaling the result back is exact to float32 if the product of the two amaxes is
  between 1e-31 and 1e43; below, the result is zero.

  Args:
    lhs: floating, any shape.
    rhs: floating.
    dimension_numbers: see `jax.lax.dot_general`.
    recipe: a `Recipe`, its mapping or its name; `delayed` needs `scales`; `auto` is this device's.
    scales: float32[] for lhs, rhs and the gradient; `None`: from the tensors. For `delayed` they are powers
      of two.
    out_dtype: dtype of the result; `None`: that of lhs.
    gradient_operand: which operands are gradients themselves.
    weight_operand: which operands are weights, which `nvfp4` quantises in squares.
    native: whether FP8 units multiply; `None`: if the platform has them.

  Returns:
    [batch, lhs free, rhs free] in `out_dtype`.

  Raises:
    ValueError: for an invalid recipe, a delayed one without scales, scales for blocks or of another shape,
      operands that are not floating, or a contracted dimension that is not a multiple of its blocks.
  """
  lhs, rhs, out = _wide_operands("fp8_dot_general", lhs, rhs, "out_dtype", out_dtype)
  parsed = on_device(parse_recipe(recipe) or Recipe())
  if parsed.recipe == "delayed" and scales is None:
    raise ValueError("recipe 'delayed' takes its scales from earlier steps: pass scales=, or use 'current'")
  any_scales = scales is not None and parsed.recipe != "delayed"
  spec = Spec(parsed, out, gradient_operand, weight_operand, any_scales=any_scales, native=native)
  if scales is not None and spec.in_blocks:
    raise ValueError(
      f"recipe {parsed.recipe!r} has a scale for each block: leave out scales=, or use 'current'"
    )
  if scales is not None and [np.shape(x) for x in scales] != [(), (), ()]:
    raise ValueError(
      f"fp8_dot_general: scales of shapes {[np.shape(x) for x in scales]}, expected three numbers: for lhs, "
      "rhs and the gradient"
    )
  return multiply_dot(lhs, rhs, dimension_numbers, spec, scales)


def scaled_dot(
  lhs: Array,
  rhs: Array,
  *,
  format: str = "mxfp8",
  dimension_numbers: jax.lax.DotDimensionNumbers | None = None,
  preferred_element_type: DTypeLike | None = None,
  native: bool | None = None,
) -> Array:
  """Computes a product of operands that are quantised in blocks, and has derivatives.

  ```python
  y = mpjax.scaled_dot(jnp.ones([8, 64]), jnp.ones([64, 32]), format="mxfp8")
  ```

  Unlike `jax.lax.scaled_dot`, which takes codes and scales, it takes floats and quantises them: along the
  dimension that each product contracts, so forward and backward products have blocks of their own. Compiled
  for CUDA it is `jax.lax.scaled_dot`, block-scaled instructions on Blackwell; elsewhere what the blocks stand
  for is multiplied in a wider dtype. The numbers are the same but for the order of float32 sums.

  | `format` | elements | a scale for | scale |
  |---|---|---|---|
  | `mxfp8` | E4M3FN | 32 | E8M0, rounded up |
  | `mxfp4` | E2M1 | 32 | E8M0, rounded up |
  | `nvfp4` | E2M1 | 16 | E4M3, and a power of two for the tensor |

  All roundings are to the nearest. What training in NVFP4 adds (stochastic rounding, rotations, squares) is
  the policy's recipe `nvfp4`.

  Args:
    lhs: floating, any shape.
    rhs: floating.
    format: `mxfp8`, `mxfp4` or `nvfp4`.
    dimension_numbers: see `jax.lax.dot_general`; `None`: as `jax.lax.scaled_dot`, the last dimension of lhs
      with the first of rhs that is not a batch dimension, for two or three dimensions.
    preferred_element_type: dtype of the result; `None`: that of lhs.
    native: whether units for blocks multiply; `None`: if the platform may have them.

  Returns:
    [batch, lhs free, rhs free]. Gradients of a float32 operand are float32.

  Raises:
    ValueError: for an unknown format, operands or a result that are not floating, or a contracted dimension,
      forward or backward, that is not a multiple of the block.
  """
  if format not in _FORMATS:
    raise ValueError(f"scaled_dot: format={format!r}: {one_of(format, _FORMATS)}")
  lhs, rhs, out = _wide_operands("scaled_dot", lhs, rhs, "preferred_element_type", preferred_element_type)
  if dimension_numbers is None:
    if lhs.ndim != rhs.ndim or lhs.ndim not in (2, 3):
      raise ValueError(
        f"scaled_dot: lhs has shape {lhs.shape} and rhs {rhs.shape}: pass dimension_numbers, as of "
        "jax.lax.dot_general"
      )
    batch = (0,) if lhs.ndim == 3 else ()
    dimension_numbers = (((lhs.ndim - 1,), (rhs.ndim - 2,)), (batch, batch))
  spec = dataclasses.replace(_FORMATS[format], out_dtype=out, native=native)
  return multiply_dot(lhs, rhs, dimension_numbers, spec)


def _wide_operands(
  function: str, lhs: Array, rhs: Array, key: str, out_dtype: DTypeLike | None
) -> tuple[Array, Array, np.dtype]:
  """Returns lhs and rhs as arrays, and the dtype of their product: that asked for by a key, or that of lhs.

  Raises:
    ValueError: for an operand or a result that is not floating of 16 bits or more.
  """
  lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
  out = np.dtype(lhs.dtype if out_dtype is None else out_dtype)
  found = {f"lhs is {lhs.dtype}": lhs.dtype, f"rhs is {rhs.dtype}": rhs.dtype, f"{key}={out}": out}
  for said, dtype in found.items():
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      raise ValueError(
        f"{function}: {said}, expected float16, bfloat16, float32 or float64; for codes with scales call "
        "jax.lax.scaled_dot"
      )
  return lhs, rhs, out
