"""`Spec`: the formats, scales and units of one low-precision product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import DTypeLike
from mpjax.fp8 import Recipe

SCHEMES = {"current": "tensor", "delayed": "tensor", "per_channel": "channel", "mx": "mx", "nvfp4": "nvfp4"}
FLOAT32 = np.dtype(np.float32)
ACTIVATION, WEIGHT, GRADIENT, UNKNOWN = "activation", "weight", "gradient", ""


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
    lhs_dtype: format of the left operand.
    rhs_dtype: format of the right operand.
    gradient_dtype: format of gradients and tangents.
    out_dtype: dtype of the result, and of the gradients that it returns.
    scheme: what shares a scale: a `tensor`, a `channel` (the values that are summed together), or a block of
      `mx` or `nvfp4`.
    roles: what lhs and rhs are, by which `nvfp4` quantises: ACTIVATION, WEIGHT or GRADIENT; UNKNOWN for
      both: all operands alike.
    margin: as in `Recipe`.
    pow2: whether scales are powers of two, which a GPU applies inside the product without a rounding.
    backward: whether the products of the backward pass are quantised, too.
    saved: whether operands are saved in FP8 for the backward pass.
    given: whether the scales of lhs, rhs and gradient are operands; otherwise they come from the tensor, by
      entry along the dimensions in which the operand has several.
    native: multiply in the format; `None`: if the platform has units.
    out_sharding: sharding of the result, on a mesh with explicit axes; `None`: from the operands.
  """

  lhs_dtype: np.dtype
  rhs_dtype: np.dtype
  gradient_dtype: np.dtype
  out_dtype: np.dtype = FLOAT32
  scheme: str = "tensor"
  roles: tuple[str, str] = (UNKNOWN, UNKNOWN)
  margin: int = 0
  pow2: bool = False
  backward: bool = True
  saved: bool = False
  given: tuple[bool, bool, bool] = (False, False, False)
  native: bool | None = None
  out_sharding: jax.sharding.NamedSharding | None = None

  @property
  def in_blocks(self) -> bool:
    """Whether blocks of the contracted dimension have a scale each."""
    return self.scheme in ("mx", "nvfp4")

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
    formats = [self.lhs_dtype, self.rhs_dtype]
    formats[side] = self.gradient_dtype
    if jnp.float8_e4m3b11fnuz in formats:  # TPU v5 and v6 multiply two numbers of one format
      formats = [self.gradient_dtype, self.gradient_dtype]
    lhs, rhs = (GRADIENT if i == side and role != UNKNOWN else role for i, role in enumerate(self.roles))
    return dataclasses.replace(self, lhs_dtype=formats[0], rhs_dtype=formats[1], roles=(lhs, rhs))


def spec_of(
  recipe: Recipe,
  gradients: tuple[bool, bool] = (False, False),
  weights: tuple[bool, bool] | None = None,
  native: bool | None = None,
) -> Spec:
  """Returns the `Spec` of a product by a recipe that is not `auto`, with a float32 result.

  Args:
    recipe: the recipe.
    gradients: which operands are gradients.
    weights: which are weights; `None`: not known, and no matter.
    native: as in `Spec`.
  """
  scheme = SCHEMES[recipe.recipe]
  others = [UNKNOWN if weights is None else WEIGHT if weights[side] else ACTIVATION for side in (0, 1)]
  lhs_role, rhs_role = (GRADIENT if gradients[side] else others[side] for side in (0, 1))
  spec = Spec(
    lhs_dtype=recipe.forward,
    rhs_dtype=recipe.forward,
    gradient_dtype=recipe.gradient,
    scheme=scheme,
    roles=(lhs_role, rhs_role),
    margin=recipe.margin,
    pow2=scheme == "tensor",
    backward=recipe.backward == "policy",
    saved=recipe.saved_activations == "fp8",
    native=native,
  )
  for side in (0, 1):
    spec = spec.with_gradient(side) if gradients[side] else spec
  return spec
