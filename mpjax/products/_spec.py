"""`Spec`: the formats, scales and units of one low-precision product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import DTypeLike
from mpjax.fp8 import BLOCKS, Recipe

FLOAT32 = np.dtype(np.float32)

# The dtypes in which a platform multiplies FP8 numbers, and what blocks stand for; `None`: in the format.
# XLA for CPU does not have a bfloat16 kernel for some layouts. XLA for TPU widens a format that the TPU
# does not have, and blocks in passes of their own.
_UNITS: dict[str | None, tuple[DTypeLike | None, DTypeLike | None]] = {
  None: (jnp.bfloat16, jnp.bfloat16),
  "cpu": (jnp.float32, jnp.float32),
  "cuda": (None, None),
  "rocm": (None, jnp.bfloat16),
  "tpu": (None, jnp.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class Spec:
  """The formats, scales and units of one product.

  Attributes:
    recipe: the formats, and what shares a scale; not `auto`.
    out_dtype: dtype of the result, and of the gradients that it returns.
    gradients: whether lhs and rhs are gradients or tangents.
    weights: whether they are weights, by which `nvfp4` quantises; `None`: all operands alike.
    elements: format of both operands in place of the recipe's.
    any_scales: whether the given scales may be any numbers; otherwise they are powers of two.
    given: whether the scales of lhs, rhs and gradient are operands; otherwise they come from the tensor, by
      entry along the dimensions in which the operand has several.
    native: multiply in the format; `None`: if the platform has units.
    out_sharding: sharding of the result, on a mesh with explicit axes; `None`: from the operands.
  """

  recipe: Recipe
  out_dtype: np.dtype = FLOAT32
  gradients: tuple[bool, bool] = (False, False)
  weights: tuple[bool, bool] | None = None
  elements: np.dtype | None = None
  any_scales: bool = False
  given: tuple[bool, bool, bool] = (False, False, False)
  native: bool | None = None
  out_sharding: jax.sharding.NamedSharding | None = None

  @property
  def formats(self) -> tuple[np.dtype, np.dtype]:
    """Formats of lhs and rhs."""
    if self.elements is not None:
      return self.elements, self.elements
    gradient = self.recipe.gradient
    lhs, rhs = (gradient if is_gradient else self.recipe.forward for is_gradient in self.gradients)
    # TPU v5 and v6 multiply two numbers of one format.
    alike = any(self.gradients) and jnp.float8_e4m3b11fnuz in (lhs, rhs)
    return (gradient, gradient) if alike else (lhs, rhs)

  @property
  def scheme(self) -> str:
    """The name of the recipe: what shares a scale."""
    return self.recipe.recipe

  @property
  def in_blocks(self) -> bool:
    """Whether blocks of the contracted dimension have a scale each."""
    return self.scheme in BLOCKS

  @property
  def pow2(self) -> bool:
    """Whether scales are powers of two, which a GPU applies inside the product without a rounding."""
    return self.recipe.of_tensors and not self.any_scales

  @property
  def wide(self) -> np.dtype:
    """The dtype of a result that is not scaled back yet, which overflows in float16."""
    return FLOAT32 if self.out_dtype == np.float16 else self.out_dtype

  def multiplied_in(self, platform: str | None) -> DTypeLike | None:
    """Returns the dtype to multiply in on a platform, `None` for the format."""
    units = _UNITS[platform][self.in_blocks]
    if self.native is None:
      return units
    return None if self.native else units or jnp.bfloat16

  def with_gradient(self, side: int) -> Spec:
    """Returns the spec of a product whose lhs (0) or rhs (1) is a gradient."""
    lhs, rhs = self.gradients
    return dataclasses.replace(self, gradients=(lhs or side == 0, rhs or side == 1))
