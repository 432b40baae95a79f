"""Facts about number formats: range, precision, and where rounding to one loses numbers."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import jax.numpy as jnp
import numpy as np

_INFINITY = 0x7F800000  # as the bits of a float32; those of the finite ones are lower


@dataclass(frozen=True)
class NumberFormat:
  """Range and precision of a floating format.

  Attributes:
    name: as in `jnp.dtype(...).name`, or `tensorfloat32`, which is no dtype.
    bits: sign, exponent and mantissa; the 19 of tensorfloat32 are kept in 32, fewer than 8 in a byte.
    exponent_bits: width of the exponent.
    mantissa_bits: width of the mantissa without the implicit one.
    max: the largest finite number.
    smallest_normal: the smallest positive number with the full mantissa.
    smallest_subnormal: the smallest positive number; `smallest_normal` in a format without subnormals.
    epsilon: distance from 1 to the next number.
    has_inf: whether there is an infinity; without one, an overflow becomes NaN or `max`.
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
    """Returns whether there are numbers below the smallest normal one, which have fewer digits."""
    return self.smallest_subnormal < self.smallest_normal

  @property
  def decimal_digits(self) -> int:
    """`floor(mantissa_bits * log10(2))`: decimal numbers of so many digits survive being held in the format.

    It is `precision` of NumPy's `finfo` and `FLT_DIG` of C. That of `ml_dtypes.finfo` says 1 where this says
    0: that not every number of one digit survives three bits of mantissa.
    """
    return math.floor(self.mantissa_bits * math.log10(2))

  @property
  def on_overflow(self) -> str:
    """Returns what a number too large for the format becomes: `infinity`, `NaN`, or `max` without either."""
    return "infinity" if self.has_inf else "NaN" if math.isfinite(self.overflow_edge) else "max"

  @property
  def underflow_edge(self) -> float:
    """The largest float32 magnitude that rounds to zero.

    Rounding is to the nearest number, and to the even one of two that are equally near: half of the smallest
    number still becomes zero. 0 where no other number does: in float32 and float64, which hold every float32;
    and in `float8_e8m0fnu`, which has no zero, where what is too small becomes the smallest number, and zero
    itself NaN.
    """
    return self._edges[0]

  @property
  def normal_edge(self) -> float:
    """The smallest float32 magnitude that rounds to a normal number, with all of its digits.

    Half a step below `smallest_normal`, which wins the tie as the even one; in float32 `smallest_normal`
    itself. In float64 and `float8_e8m0fnu` every positive float32 becomes a normal number, and this is the
    smallest one, 2**-149.
    """
    return self._edges[1]

  @property
  def overflow_edge(self) -> float:
    """The smallest float32 magnitude that rounds to infinity or NaN; `inf` if no finite one does.

    Half a step above `max`, by the step below it: if the bits of `max` are odd that tie overflows, if they
    are even (`float8_e4m3fn`) it becomes `max`, and the edge is the next float32. Ties of `float8_e8m0fnu`
    go up. `inf` in float32 and float64, and in formats of fewer than 8 bits, which have neither infinity nor
    NaN and keep `max` instead.
    """
    return self._edges[2]

  @cached_property
  def _edges(self) -> tuple[float, float, float]:
    """`underflow_edge`, `normal_edge`, `overflow_edge`: by trying casts.

    For tensorfloat32, which is no dtype, by arithmetic to the same rule. The bits of a positive number grow
    with it: numbers are compared by them and never as floats, as a thread that flushes subnormals takes some
    for zero.
    """
    # Such a thread also flushes what it casts to float64; but these formats hold every float32 anyway.
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
  """Returns the float32 of a pattern of bits, by way of no float32, which a thread may flush to zero."""
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


# The range of float32 with the mantissa of float16: what NVIDIA's units keep of a float32 operand (NVIDIA
# A100 Tensor Core GPU Architecture whitepaper). It is no dtype of an array, so nothing can compute its row.
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
"""Number formats by name, `float64` first; `tensorfloat32` is among them, and is no dtype."""
