"""Facts about number formats: range, precision, and where rounding to one underflows or overflows."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

_INFINITY = 0x7F800000  # as the bits of a float32; finite numbers have lower bits


@dataclass(frozen=True)
class NumberFormat:
  """Range and precision of a floating format.

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

  @property
  def sign_bits(self) -> int:
    """1, or 0 in a format of positive numbers."""
    return self.bits - self.exponent_bits - self.mantissa_bits

  @property
  def has_subnormals(self) -> bool:
    """Returns whether the format has numbers below the smallest normal one, which have fewer digits."""
    return self.smallest_subnormal < self.smallest_normal

  @property
  def decimal_digits(self) -> int:
    """`floor(mantissa_bits * log10(2))`: the format represents every decimal number of so many digits.

    This is `precision` of NumPy's `finfo` and `FLT_DIG` of C. Where this is 0, `ml_dtypes.finfo` says 1,
    although three bits of mantissa do not represent every number of one digit.
    """
    return math.floor(self.mantissa_bits * math.log10(2))

  @property
  def on_overflow(self) -> str:
    """What a number too large for the format becomes: `infinity`, `NaN`, or `max` without either."""
    return "infinity" if self.has_inf else "NaN" if math.isfinite(self.overflow_edge) else "max"

  @property
  def underflow_edge(self) -> float:
    """The largest float32 magnitude that rounds to zero.

    Rounding is to the nearest number, with ties to even: half of the smallest number still rounds to zero.
    The value is 0 in float32 and float64, which hold every float32, and in `float8_e8m0fnu`, which has no
    zero: there a magnitude that is too small rounds to the smallest number, and zero itself to NaN.
    """
    return self._edges[0]

  @property
  def normal_edge(self) -> float:
    """The smallest float32 magnitude that rounds to a normal number, with all of its digits.

    Half a step below `smallest_normal`, which is even and wins the tie; in float32 `smallest_normal`
    itself. In float64 and `float8_e8m0fnu` every positive float32 rounds to a normal number, and this is the
    smallest float32, 2**-149.
    """
    return self._edges[1]

  @property
  def overflow_edge(self) -> float:
    """The smallest float32 magnitude that rounds to infinity or NaN; `inf` if no finite one does.

    Half a step above `max`, by the step below it. If the bits of `max` are odd, that tie overflows. If they
    are even (`float8_e4m3fn`), it rounds to `max`, and the edge is the next float32. Ties in `float8_e8m0fnu`
    round up. `inf` in float32 and float64, and in formats of fewer than 8 bits, which have neither infinity
    nor NaN and keep `max` instead.
    """
    return self._edges[2]

  @cached_property
  def _edges(self) -> tuple[float, float, float]:
    """`underflow_edge`, `normal_edge`, `overflow_edge`, from trying casts.

    tensorfloat32 is not a dtype, so its edges come from arithmetic with the same rule. The bits of a positive
    number grow with the number, so numbers are compared by their bits: a thread that flushes subnormals
    treats some floats as zero.
    """
    # Such a thread also flushes casts to float64; but these formats hold every float32 anyway.
    if self.mantissa_bits >= np.finfo(np.float32).nmant:
      return 0.0, max(self.smallest_normal, _from_bits(1)), math.inf
    if self.name == "tensorfloat32":
      half = self.smallest_subnormal / 2
      return half, self.smallest_normal - half, self.max + math.ldexp(self.epsilon, 126)
    dtype = jnp.dtype(self.name)

    def code(pattern: int) -> int:
      number = np.array(pattern, np.uint32).view(np.float32)
      with np.errstate(all="ignore"):
        return int(number.astype(dtype).view(f"uint{8 * dtype.itemsize}"))

    def first(least: int) -> int:
      return bisect.bisect_left(range(_INFINITY), least, key=code)

    zero = code(0) == 0
    largest = code(int(np.float32(self.max).view(np.uint32)))
    overflow = bisect.bisect_left(range(_INFINITY), True, lo=1, key=lambda pattern: code(pattern) > largest)
    return (
      _from_bits(first(1) - 1) if zero else 0.0,
      _from_bits(first(1 << self.mantissa_bits) if zero else 1),
      _from_bits(overflow),
    )


def _from_bits(pattern: int) -> float:
  """Returns the float32 with these bits, without using a float32, which a thread may flush to zero."""
  if pattern >= _INFINITY:
    return math.inf
  exponent, fraction = divmod(pattern, 1 << 23)
  return math.ldexp(fraction + (1 << 23), exponent - 150) if exponent else math.ldexp(fraction, -149)


def _format(name: str) -> NumberFormat:
  info = jnp.finfo(jnp.dtype(name))
  return NumberFormat(
    name=name,
    bits=int(info.bits),
    exponent_bits=int(info.nexp),
    mantissa_bits=int(info.nmant),
    max=float(info.max),
    smallest_normal=math.ldexp(1.0, int(info.minexp)),
    # Not `info.smallest_subnormal`: NumPy warns about it in a thread that flushes subnormals to zero.
    smallest_subnormal=math.ldexp(1.0, int(info.minexp) - int(info.nmant)),
    epsilon=float(info.eps),
    has_inf=bool(np.isinf(np.asarray(np.inf).astype(info.dtype).astype(np.float64))),
  )


# The range of float32 with the mantissa of float16: the part of a float32 operand that NVIDIA's units keep
# (NVIDIA A100 Tensor Core GPU Architecture whitepaper). Arrays do not have this dtype, so the row is written
# out.
_TENSORFLOAT32 = NumberFormat(
  name="tensorfloat32",
  bits=19,
  exponent_bits=8,
  mantissa_bits=10,
  max=(2 - 2.0**-10) * 2.0**127,
  smallest_normal=2.0**-126,
  smallest_subnormal=2.0**-136,
  epsilon=2.0**-10,
  has_inf=True,
)

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
_BELOW_8 = ("float6_e3m2fn", "float6_e2m3fn", "float4_e2m1fn")
FORMATS: Mapping[str, NumberFormat] = MappingProxyType(
  {name: _format(name) for name in ("float64", "float32")}
  | {"tensorfloat32": _TENSORFLOAT32}
  | {name: _format(name) for name in ("bfloat16", "float16", *_FLOAT8, *_BELOW_8)}
)
"""Number formats by name, `float64` first, with `tensorfloat32`, which is not a dtype."""
