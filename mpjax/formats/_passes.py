"""Products of float32 operands in passes of narrower ones, by the names of `jax.lax.DotAlgorithmPreset`.

An operand is split into parts: its value rounded to the narrower dtype, the rounded rest, and so on. The
products of the parts are summed in float32, the leading ones only (arXiv 1904.06376 for bfloat16, arXiv
2203.03341 for TensorFloat-32).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Passes(NamedTuple):
  """How matrix units multiply float32 operands.

  Attributes:
    dtype: the dtype in which the units multiply.
    products: the number of products of parts that are summed.
    parts: the number of parts of an operand.
  """

  dtype: str
  products: int
  parts: int


PASSES: Mapping[str, Passes] = MappingProxyType(
  {
    "BF16_BF16_F32": Passes("bfloat16", 1, 1),
    "BF16_BF16_F32_X3": Passes("bfloat16", 3, 2),
    "BF16_BF16_F32_X6": Passes("bfloat16", 6, 3),
    "BF16_BF16_F32_X9": Passes("bfloat16", 9, 3),
    "TF32_TF32_F32": Passes("tensorfloat32", 1, 1),
    "TF32_TF32_F32_X3": Passes("tensorfloat32", 3, 2),
  }
)
"""The algorithms that take float32 operands and sum in float32."""

SHORT_NAMES: Mapping[str, str] = MappingProxyType(
  {f"{passes.dtype}_x{passes.products}": name for name, passes in PASSES.items() if passes.products > 1}
)
"""From names such as `bfloat16_x3` to JAX's names of the algorithms of several passes."""


def passes_of(precision: object) -> Passes | None:
  """Returns the passes of the `precision` of a product in a program; `None` for one that names no passes."""
  return PASSES.get(getattr(precision, "name", ""))
