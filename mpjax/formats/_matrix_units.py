"""Matrix units of devices, and the shapes of product that run on them at the full rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from mpjax._types import DTypeLike
from mpjax.dtypes import did_you_mean


def runs_on(unit: str, dtype: DTypeLike) -> bool:
  """Returns whether a unit multiplies operands of a dtype; true for all dtypes without units (`cpu`).

  ```python
  mpjax.formats.runs_on("ampere", "float8")  # False
  ```

  Args:
    unit: a name in `MATRIX_UNITS`.
    dtype: a dtype, its name, `"float8"`, `"tensorfloat32"`, or a format of blocks such as `"mxfp8"`.

  Raises:
    ValueError: for an unknown name of a unit.
  """
  return _multiples(unit, dtype) is not None


def narrow_bits(dtype: DTypeLike) -> int:
  """Returns the bits of a floating format below 16 bits, of an element for a format of blocks; 0 for others.

  ```python
  mpjax.formats.narrow_bits("float8_e4m3fn"), mpjax.formats.narrow_bits("bfloat16")  # 8, 0
  ```

  Args:
    dtype: a dtype, its name, `"float8"`, or a format of blocks such as `"mxfp8"`.
  """
  name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
  found = _NARROW.match(name)
  return int(found[1]) if found else 0


_NARROW = re.compile(r"(?:float|mxfp|nvfp)([468])(?!\d)")


def padded(unit: str, dtype: DTypeLike, m: int, n: int, k: int) -> tuple[int, int, int]:
  """Returns the smallest sizes that hold a product [m, k] x [k, n] and run at the full rate of a unit.

  ```python
  mpjax.formats.padded("hopper", "float8", 100, 30, 50)  # (112, 32, 64)
  ```

  Args:
    unit: a name in `MATRIX_UNITS`.
    dtype: dtype of the operands.
    m: rows of the product.
    n: columns of the product.
    k: the contracted size.

  Returns:
    (m, n, k), each rounded up; unchanged if the unit does not multiply the dtype.

  Raises:
    ValueError: for an unknown name of a unit.
  """
  m_step, n_step, k_step = _multiples(unit, dtype) or (1, 1, 1)
  return -(-m // m_step) * m_step, -(-n // n_step) * n_step, -(-k // k_step) * k_step


def eligible(unit: str, dtype: DTypeLike, m: int, n: int, k: int) -> bool:
  """Returns whether a product runs at the full rate of a unit without padding.

  ```python
  mpjax.formats.eligible("hopper", "bfloat16", 1024, 1024, 1000)  # True
  ```

  A product with a size of 1 (matrix times vector, outer product) moves more than it computes, and no unit
  runs it at full rate. Without matrix units every product is eligible. The arguments are
  those of `padded`.
  """
  if not runs_on(unit, dtype):
    return False
  return not MATRIX_UNITS[unit] or (m, n, k) == padded(unit, dtype, m, n, k)


# NVIDIA: rows of 16 bytes. Since version 11 cuBLAS also uses the units for other sizes, at a lower rate
# (NVIDIA, Matrix Multiplication Background User's Guide, section "Tensor Core Requirements"). That table has
# no row for FP8, for which cuBLASLt requires the 16 bytes (cuBLAS documentation, cublasLtMatmul). The float64
# units of data-centre cards are left out: no policy computes in float64.
_FLOAT16 = {"float16": (8, 8, 8)}
_AMPERE = {**_FLOAT16, "bfloat16": (8, 8, 8), "tensorfloat32": (4, 4, 4)}
_HOPPER = {**_AMPERE, "float8": (16, 16, 16)}
_BLACKWELL = {**_HOPPER, "mxfp8": (32, 32, 32), "mxfp4": (32, 32, 32), "nvfp4": (16, 16, 16)}
_AMD = ("bfloat16", "float16")

# TPU: the unit holds a block of the [K, N] operand, and the rows of the other one stream through. Arrays are
# padded to tiles of 8 rows by 128 columns in any dtype. A bfloat16 tile packs its rows in pairs and has the
# same height. Sources: Google Cloud, Cloud TPU performance guide and page TPU architecture; OpenXLA, Tiled
# layout.
# float16 operands take one pass through the unit, as bfloat16; float32 ones take one, three or six, by
# `jax.lax.Precision`. Before v7, E4M3FN is widened first. v5 and v6 multiply E4M3B11FNUZ and E5M2 at the rate
# of int8, as libtpu's compiler estimates it; JAX's own tests of Pallas kernels name the same generations.
# On v6 memory still pads columns to 128, but a block of 128 leaves half of the unit idle.
_TPU = ("bfloat16", "float16", "float32")
_TPU_FLOAT8 = (*_TPU, "float8_e4m3b11fnuz", "float8_e5m2")

Multiples = tuple[int, int, int]

_UNITS: Mapping[str, Mapping[str, Multiples]] = {
  "volta": _FLOAT16,
  "turing": _FLOAT16,
  "ampere": _AMPERE,
  "ada": _HOPPER,
  "hopper": _HOPPER,
  "blackwell": _BLACKWELL,
  "cdna3": dict.fromkeys((*_AMD, "float8_e4m3fnuz", "float8_e5m2fnuz"), (16, 16, 16)),  # MI300
  "cdna4": dict.fromkeys((*_AMD, "float8"), (16, 16, 16)),  # MI350 and RDNA 4
  "tpu": dict.fromkeys(_TPU, (8, 128, 128)),  # before v5
  "tpu_v5": dict.fromkeys(_TPU_FLOAT8, (8, 128, 128)),  # v5e and v5p
  "tpu_v6": dict.fromkeys(_TPU_FLOAT8, (8, 256, 256)),  # v6e
  "tpu_v7": dict.fromkeys((*_TPU, "float8"), (8, 256, 256)),  # TPU7x
  "cpu": {},
}
MATRIX_UNITS: Mapping[str, Mapping[str, Multiples]] = MappingProxyType(
  {name: MappingProxyType(multiples) for name, multiples in _UNITS.items()}
)
"""Kinds of matrix units by the names that the devices' files use.

Each maps the dtypes that it multiplies (`float8` stands for E4M3FN and E5M2; `mxfp8`, `mxfp4` and `nvfp4` are
formats of blocks) to the numbers that M, N and K should be multiples of. For `cpu`, every shape runs alike.
"""


class LowPrecision(NamedTuple):
  """The recipe and formats below 16 bits that a kind of matrix units multiplies best.

  Attributes:
    recipe: as in `mpjax.fp8.Recipe`.
    forward_dtype: format of weights and activations.
    gradient_dtype: format of gradients.
  """

  recipe: str
  forward_dtype: str
  gradient_dtype: str


_OCP = LowPrecision("current", "float8_e4m3fn", "float8_e5m2")
# The units multiply two numbers of one format: with gradients in E5M2, both operands had two bits.
_B11 = LowPrecision("current", "float8_e4m3b11fnuz", "float8_e4m3b11fnuz")

LOW_PRECISION: Mapping[str, LowPrecision] = MappingProxyType(
  {
    **dict.fromkeys(("ada", "hopper", "cdna4", "tpu_v7"), _OCP),
    "blackwell": LowPrecision("mx", "float8_e4m3fn", "float8_e4m3fn"),
    "cdna3": LowPrecision("current", "float8_e4m3fnuz", "float8_e5m2fnuz"),
    **dict.fromkeys(("tpu_v5", "tpu_v6"), _B11),
  }
)
"""What the recipe `auto` is, by the names of `MATRIX_UNITS`; kinds without FP8 units are not in it."""


def _multiples(unit: str, dtype: DTypeLike) -> Multiples | None:
  """Returns the numbers that M, N and K should be multiples of; `None` if the unit does not run the dtype."""
  if unit not in MATRIX_UNITS:
    known = ", ".join(MATRIX_UNITS)
    raise ValueError(
      f"unknown matrix units {unit!r}: expected one of {known}{did_you_mean(unit, MATRIX_UNITS)}"
    )
  multiples = MATRIX_UNITS[unit]
  if not multiples:
    return (1, 1, 1)
  name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
  own = multiples.get(name)
  return multiples.get("float8") if own is None and name in ("float8_e4m3fn", "float8_e5m2") else own
