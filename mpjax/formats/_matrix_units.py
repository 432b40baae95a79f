"""Matrix units of devices, and the shapes of product that run on them at the full rate."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp

from mpjax._types import DTypeLike
from mpjax.dtypes import did_you_mean


@dataclass(frozen=True)
class MatrixUnit:
  """The shapes of a product [M, K] x [K, N] that a kind of matrix unit multiplies without waste.

  Attributes:
    description: the unit, in words.
    multiples: from a dtype (`float8` stands for E4M3FN and E5M2; `mxfp8`, `mxfp4` and `nvfp4` are formats of
      blocks) to the numbers that M, N and K should be multiples of; the unit does not multiply other dtypes.
      Empty: no matrix units, all shapes run alike.
  """

  description: str
  multiples: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)


def runs_on(unit: MatrixUnit | str, dtype: DTypeLike) -> bool:
  """Returns whether a unit multiplies operands of a dtype.

  ```python
  mpjax.formats.runs_on("ampere", "float8")  # False
  ```

  Args:
    unit: a `MatrixUnit`, or the name of a row of `MATRIX_UNITS`.
    dtype: a dtype, its name, `"float8"`, `"tensorfloat32"`, or a format of blocks such as `"mxfp8"`.

  Returns:
    A Python bool; also true without matrix units (`cpu`), where all dtypes run alike.

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


def padded(unit: MatrixUnit | str, dtype: DTypeLike, m: int, n: int, k: int) -> tuple[int, int, int]:
  """Returns the smallest sizes that hold a product [m, k] x [k, n] and run at the full rate of a unit.

  ```python
  mpjax.formats.padded("hopper", "float8", 100, 30, 50)  # (112, 32, 64)
  ```

  Args:
    unit: a `MatrixUnit`, or the name of a row of `MATRIX_UNITS`.
    dtype: dtype of the operands.
    m: rows of the product.
    n: columns of the product.
    k: the contracted size.

  Returns:
    (m, n, k), each rounded up; unchanged if the unit does not multiply the dtype.

  Raises:
    ValueError: for an unknown name of a unit, or a negative size.
  """
  sizes = _checked(m, n, k)
  steps = _multiples(unit, dtype) or (1, 1, 1)
  return tuple(-(-size // step) * step for size, step in zip(sizes, steps, strict=True))  # type: ignore[return-value]


def eligible(unit: MatrixUnit | str, dtype: DTypeLike, m: int, n: int, k: int) -> bool:
  """Returns whether a product runs at the full rate of a unit without padding.

  ```python
  mpjax.formats.eligible("hopper", "bfloat16", 1024, 1024, 1000)  # True
  ```

  A product with a size of 1 (matrix times vector, outer product) moves more than it computes, and no unit
  runs it at full rate. Without matrix units every product is eligible.

  Args:
    unit: a `MatrixUnit`, or the name of a row of `MATRIX_UNITS`.
    dtype: dtype of the operands.
    m: rows of the product.
    n: columns of the product.
    k: the contracted size.

  Returns:
    A Python bool.

  Raises:
    ValueError: for an unknown name of a unit, or a negative size.
  """
  sizes, steps = _checked(m, n, k), _multiples(unit, dtype)
  if steps is None:
    return False
  if not _unit(unit).multiples:
    return True
  return 1 not in sizes and all(size % step == 0 for size, step in zip(sizes, steps, strict=True))


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

_UNITS: Mapping[str, tuple[str, Mapping[str, tuple[int, int, int]]]] = {
  "volta": ("Tensor Cores of the NVIDIA Volta generation: float16 alone", _FLOAT16),
  "turing": ("Tensor Cores of the NVIDIA Turing generation: float16 alone", _FLOAT16),
  "ampere": ("Tensor Cores of the NVIDIA Ampere generation: no FP8", _AMPERE),
  "ada": ("Tensor Cores of the NVIDIA Ada generation", _HOPPER),
  "hopper": ("Tensor Cores of the NVIDIA Hopper generation", _HOPPER),
  "blackwell": ("Tensor Cores of the NVIDIA Blackwell generation", _BLACKWELL),
  "cdna3": (
    "Matrix Cores of AMD's MI300",
    dict.fromkeys((*_AMD, "float8_e4m3fnuz", "float8_e5m2fnuz"), (16, 16, 16)),
  ),
  "cdna4": ("Matrix Cores of AMD's MI350, and of RDNA 4", dict.fromkeys((*_AMD, "float8"), (16, 16, 16))),
  "tpu": ("128 x 128 matrix units of TPUs before v5", dict.fromkeys(_TPU, (8, 128, 128))),
  "tpu_v5": ("128 x 128 matrix units of TPU v5e and v5p", dict.fromkeys(_TPU_FLOAT8, (8, 128, 128))),
  "tpu_v6": ("256 x 256 matrix units of TPU v6e", dict.fromkeys(_TPU_FLOAT8, (8, 256, 256))),
  "tpu_v7": ("256 x 256 matrix units of TPU7x", dict.fromkeys((*_TPU, "float8"), (8, 256, 256))),
  "cpu": ("no matrix units: every shape runs alike", {}),
}
MATRIX_UNITS: Mapping[str, MatrixUnit] = MappingProxyType(
  {name: MatrixUnit(words, MappingProxyType(multiples)) for name, (words, multiples) in _UNITS.items()}
)
"""Kinds of matrix units by name; the devices' files use these names."""


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


def _unit(unit: MatrixUnit | str) -> MatrixUnit:
  if isinstance(unit, MatrixUnit):
    return unit
  if unit not in MATRIX_UNITS:
    known = ", ".join(MATRIX_UNITS)
    raise ValueError(
      f"unknown matrix units {unit!r}: expected one of {known}{did_you_mean(unit, MATRIX_UNITS)}"
    )
  return MATRIX_UNITS[unit]


def _multiples(unit: MatrixUnit | str, dtype: DTypeLike) -> tuple[int, int, int] | None:
  """Returns the numbers that M, N and K should be multiples of; `None` if the unit does not run the dtype."""
  multiples = _unit(unit).multiples
  if not multiples:
    return (1, 1, 1)
  name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
  own = multiples.get(name)
  return multiples.get("float8") if own is None and name in ("float8_e4m3fn", "float8_e5m2") else own


def _checked(*sizes: int) -> tuple[int, ...]:
  if any(size < 0 for size in sizes):
    raise ValueError(f"sizes (m, n, k) of a product: {sizes}: expected none to be negative")
  return sizes
