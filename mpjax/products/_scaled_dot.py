"""`scaled_dot`: a product of blocks with a scale each, with derivatives, on every platform."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, DTypeLike
from mpjax.dtypes import one_of
from mpjax.products._fp8_dot_general import multiply_dot
from mpjax.products._spec import Spec, wide_operands

_FORMATS = {  # the scheme and the elements
  "mxfp8": ("mx", np.dtype(jnp.float8_e4m3fn)),
  "mxfp4": ("mx", np.dtype(jnp.float4_e2m1fn)),
  "nvfp4": ("nvfp4", np.dtype(jnp.float4_e2m1fn)),
}


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
  lhs, rhs, out = wide_operands("scaled_dot", lhs, rhs, "preferred_element_type", preferred_element_type)
  if dimension_numbers is None:
    if lhs.ndim != rhs.ndim or lhs.ndim not in (2, 3):
      raise ValueError(
        f"scaled_dot: lhs has shape {lhs.shape} and rhs {rhs.shape}: pass dimension_numbers, as of "
        "jax.lax.dot_general"
      )
    batch = (0,) if lhs.ndim == 3 else ()
    dimension_numbers = (((lhs.ndim - 1,), (rhs.ndim - 2,)), (batch, batch))
  scheme, dtype = _FORMATS[format]
  spec = Spec(dtype, dtype, dtype, out, scheme=scheme, native=native)
  return multiply_dot(lhs, rhs, dimension_numbers, spec)
