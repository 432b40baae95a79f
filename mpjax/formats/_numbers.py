"""Facts about number formats: range, precision, and where rounding to one underflows or overflows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class NumberFormat:
  """Range and precision of a floating format.

  The edges say what becomes of a float32 magnitude that is rounded to the nearest number, with ties to even.

  Attributes:
    name: as in `jnp.dtype(...).name`, or `tensorfloat32`, which is not a dtype.
    bits: sign, exponent and mantissa; the 19 of tensorfloat32 take 32 in memory, fewer than 8 take a byte.
    exponent_bits: width of the exponent.
    mantissa_bits: width of the mantissa without the implicit one.
    max: the largest finite number.
    smallest_normal: the smallest positive number with the full mantissa.
    smallest_subnormal: the smallest positive number; `smallest_normal` in a format without subnormals.
    epsilon: distance from 1 to the next number.
    has_inf: whether the format has an infinity; without one, an overflow becomes NaN or `max`.
    underflow_edge: the largest magnitude that rounds to zero: half of the smallest number. 0 in float32 and
      float64, and in `float8_e8m0fnu`, which has no zero.
    normal_edge: the smallest magnitude that rounds to a normal number: half a step below `smallest_normal`.
      `smallest_normal` in float32; the smallest float32, 2**-149, in float64 and `float8_e8m0fnu`.
    overflow_edge: the smallest magnitude that rounds to infinity or NaN: half a step above `max`. In
      `float8_e4m3fn`, where that tie rounds to `max`, the next float32; `inf` where nothing does: in float32
      and float64, and in formats of fewer than 8 bits, which have neither and keep `max`.
  """

  name: str
  bits: int
  exponent_bits: int
  mantissa_bits: int
  max: float
  smallest_normal: float
  smallest_subnormal: float
  epsilon: float
  has_inf: bool
  underflow_edge: float
  normal_edge: float
  overflow_edge: float


_BELOW_8 = ("float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn")
_SMALLEST_FLOAT32 = 2.0**-149
# Edges that are not half a step from a number.
_EDGES: Mapping[str, Mapping[str, float]] = {
  "float64": {"underflow_edge": 0.0, "normal_edge": _SMALLEST_FLOAT32, "overflow_edge": math.inf},
  "float32": {"underflow_edge": 0.0, "normal_edge": 2.0**-126, "overflow_edge": math.inf},
  "float8_e8m0fnu": {"underflow_edge": 0.0, "normal_edge": _SMALLEST_FLOAT32},
  "float8_e4m3fn": {"overflow_edge": 464 + 2.0**-15},
  **{name: {"overflow_edge": math.inf} for name in _BELOW_8},
}


def _format(
  name: str, bits: int, exponent_bits: int, mantissa_bits: int, largest: float, least: int, has_inf: bool
) -> NumberFormat:
  """Returns a row; `least` is the exponent of the smallest normal number."""
  # By exponents: a thread that flushes subnormals to zero treats the smallest numbers as zero.
  half_step = math.ldexp(1.0, least - mantissa_bits - 1)
  edges = {
    "underflow_edge": half_step,
    "normal_edge": math.ldexp(1.0, least) - half_step,
    "overflow_edge": largest + math.ldexp(1.0, math.frexp(largest)[1] - mantissa_bits - 2),
  }
  return NumberFormat(
    name=name,
    bits=bits,
    exponent_bits=exponent_bits,
    mantissa_bits=mantissa_bits,
    max=largest,
    smallest_normal=math.ldexp(1.0, least),
    smallest_subnormal=math.ldexp(1.0, least - mantissa_bits),
    epsilon=math.ldexp(1.0, -mantissa_bits),
    has_inf=has_inf,
    **edges | dict(_EDGES.get(name, {})),
  )


def _of_dtype(name: str) -> NumberFormat:
  info = jnp.finfo(jnp.dtype(name))
  has_inf = bool(np.isinf(np.asarray(np.inf).astype(info.dtype).astype(np.float64)))
  widths = (int(info.bits), int(info.nexp), int(info.nmant))
  return _format(name, *widths, float(info.max), int(info.minexp), has_inf)


# The range of float32 with the mantissa of float16: the part of a float32 operand that NVIDIA's units keep
# (NVIDIA A100 Tensor Core GPU Architecture whitepaper). Arrays do not have this dtype, so the row is written
# out.
_TENSORFLOAT32 = _format("tensorfloat32", 19, 8, 10, (2 - 2.0**-10) * 2.0**127, -126, has_inf=True)

_FLOAT8 = (
  "float8_e4m3fn",
  "float8_e5m2",
  "float8_e4m3fnuz",
  "float8_e5m2fnuz",
  "float8_e4m3b11fnuz",
  "float8_e8m0fnu",
  "float8_e4m3",
  "float8_e3m4",
)
FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
  {name: _of_dtype(name) for name in ("float64", "float32")}
  | {"tensorfloat32": _TENSORFLOAT32}
  | {name: _of_dtype(name) for name in ("bfloat16", "float16", *_FLOAT8, *_BELOW_8)}
)
"""Number formats by name, `float64` first, with `tensorfloat32`, which is not a dtype."""
