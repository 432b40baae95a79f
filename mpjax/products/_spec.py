"""`Spec`: the formats, scales and units of one low-precision product."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.fp8 import Recipe
from mpjax.products._member_scales import Members

SCHEMES = {"current": "tensor", "delayed": "tensor", "per_channel": "channel", "mx": "mx", "nvfp4": "nvfp4"}
ACTIVATION, WEIGHT, GRADIENT, UNKNOWN = "activation", "weight", "gradient", ""


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
    given: whether the scales of lhs, rhs and gradient are operands; otherwise they come from the tensor.
    members: dimensions of lhs and rhs that `vmap` maps over; each member has its own scale from the tensor.
    native: multiply in the format; `None`: if the platform has units.
    out_sharding: sharding of the result, on a mesh with explicit axes; `None`: from the operands.
  """

  lhs_dtype: np.dtype
  rhs_dtype: np.dtype
  gradient_dtype: np.dtype
  out_dtype: np.dtype
  scheme: str = "tensor"
  roles: tuple[str, str] = (UNKNOWN, UNKNOWN)
  margin: int = 0
  pow2: bool = False
  backward: bool = True
  saved: bool = False
  given: tuple[bool, bool, bool] = (False, False, False)
  members: Members = ((), ())
  native: bool | None = None
  out_sharding: jax.sharding.NamedSharding | None = None

  @property
  def in_blocks(self) -> bool:
    """Whether blocks of the contracted dimension have a scale each."""
    return self.scheme in ("mx", "nvfp4")

  def with_gradient(self, side: int) -> Spec:
    """Returns the spec with the formats of a product whose lhs (0) or rhs (1) is a gradient."""
    formats = [self.lhs_dtype, self.rhs_dtype]
    formats[side] = self.gradient_dtype
    if jnp.float8_e4m3b11fnuz in formats:  # TPU v5 and v6 multiply two numbers of one format
      formats = [self.gradient_dtype, self.gradient_dtype]
    return dataclasses.replace(self, lhs_dtype=formats[0], rhs_dtype=formats[1])


def require_wide(function: str, **dtypes: np.dtype) -> None:
  """Raises `ValueError` for an operand, or a result, that is not floating of 16 bits or more."""
  for name, dtype in dtypes.items():
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
      raise ValueError(f"{function}: {name} is {dtype}, expected float16, bfloat16, float32 or float64")


def spec_of(
  recipe: Recipe,
  roles: tuple[str, str],
  given: tuple[bool, bool, bool],
  out_dtype: np.dtype,
  native: bool | None,
) -> Spec:
  """Returns the `Spec` of one product by a recipe that is not `auto`; `Spec` explains the arguments."""
  scheme = SCHEMES[recipe.recipe]
  spec = Spec(
    lhs_dtype=recipe.forward,
    rhs_dtype=recipe.forward,
    gradient_dtype=recipe.gradient,
    out_dtype=out_dtype,
    scheme=scheme,
    roles=roles,
    margin=recipe.margin,
    pow2=scheme == "tensor",
    backward=recipe.backward == "policy",
    saved=recipe.saved_activations == "fp8",
    given=given,
    native=native,
  )
  for side, role in enumerate(roles):
    spec = spec.with_gradient(side) if role == GRADIENT else spec
  return spec
