"""Facts about number formats: range, precision, where rounding to one loses numbers, and a table of them."""

from __future__ import annotations

import bisect
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from mpjax.dtypes import did_you_mean
from mpjax.formats._matrix_units import (
  MATRIX_UNITS,
  described_devices,
  runs_on,
)

if TYPE_CHECKING:
  import rich.console

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
    """Whether there are numbers below the smallest normal one, with fewer digits the smaller they are."""
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
    """What a number too large for the format becomes: `infinity`, `NaN`, or `max` where there is neither."""
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


def describe(names: Iterable[str] | str | None = None) -> list[dict[str, Any]]:
  """What there is to know of number formats, one row each.

  Args:
    names: keys of `FORMATS`, or one; all of them if `None`.

  Returns:
    For each format its name and `bits`, `sign_bits`, `exponent_bits`, `mantissa_bits` (the fraction); `max`,
    `smallest_normal`, `smallest_subnormal`, `epsilon`, `decimal_digits`, `has_subnormals`, `on_overflow`,
    `underflow_edge`, `normal_edge` and `overflow_edge` as in `NumberFormat`; `log2_max` and `log2_smallest`,
    of the largest and of the smallest positive number; `binades`, how many powers of two lie from one to the
    other; `units`, from the names in `MATRIX_UNITS` of the units that multiply the format to the devices that
    have them, by the names that `mpjax.plan` takes for targets.

  Raises:
    ValueError: for an unknown name.
  """
  names = [names] if isinstance(names, str) else list(FORMATS if names is None else names)
  for name in names:
    if name not in FORMATS:
      known = ", ".join(FORMATS)
      raise ValueError(
        f"unknown number format {name!r}: expected one of {known}{did_you_mean(name, FORMATS)}"
      )
  devices = _devices()
  return [_described(FORMATS[name], devices) for name in names]


def format_table(names: Iterable[str] | str | None = None) -> str:
  """The rows of `describe` as plain text, at most 120 columns wide."""
  return "\n".join(line for line, _ in _lines(names))


def print_formats(
  console: rich.console.Console | None = None, names: Iterable[str] | str | None = None
) -> None:
  """Prints the rows of `describe` in colour; needs `rich`, which `format_table` does not.

  Args:
    console: to print to; standard output if `None`.
    names: keys of `FORMATS`, or one; all of them if `None`.
  """
  import rich.console
  import rich.text

  console = console or rich.console.Console()
  for line, style in _lines(names):
    # A number that the terminal wraps can still be read, one that is cut cannot.
    console.print(rich.text.Text(line, style), soft_wrap=True)


def _devices() -> dict[str, list[str]]:
  """From the names of matrix units to those of the devices that have them."""
  found: dict[str, list[str]] = {name: [] for name, unit in MATRIX_UNITS.items() if unit.multiples}
  for name, device in described_devices().items():
    found[device["matrix_units"]].append(name)
  return found


def _described(row: NumberFormat, devices: Mapping[str, list[str]]) -> dict[str, Any]:
  # The smallest number of float64 is taken for zero in a thread that flushes subnormals: from the normal one.
  log2_smallest = math.frexp(row.smallest_normal)[1] - 1 - row.has_subnormals * row.mantissa_bits
  return {
    "name": row.name,
    "bits": row.bits,
    "sign_bits": row.sign_bits,
    "exponent_bits": row.exponent_bits,
    "mantissa_bits": row.mantissa_bits,
    "max": row.max,
    "smallest_normal": row.smallest_normal,
    "smallest_subnormal": row.smallest_subnormal,
    "epsilon": row.epsilon,
    "decimal_digits": row.decimal_digits,
    "has_subnormals": row.has_subnormals,
    "on_overflow": row.on_overflow,
    "underflow_edge": row.underflow_edge,
    "normal_edge": row.normal_edge,
    "overflow_edge": row.overflow_edge,
    "log2_max": math.log2(row.max),
    "log2_smallest": log2_smallest,
    "binades": math.frexp(row.max)[1] - log2_smallest,
    "units": {unit: list(names) for unit, names in devices.items() if runs_on(unit, row.name)},
  }


_HEADING = (
  *("format", "bits", "s+e+f", "max", "normal", "subnormal", "epsilon", "digits", "overflow", "log2"),
  "binades",
)
_NOTES = (
  "s+e+f: bits of sign, exponent and fraction. normal, subnormal: the smallest numbers. digits: decimal "
  "digits that always survive. overflow: what a number too large becomes. log2: from the smallest number to "
  "the largest. binades: powers of two between them.",
  "Matrix units are listed for the operands that policies compute in: not for blocks of 4 to 8 bits with a "
  "scale in float8_e8m0fnu, nor for float64. A TPU multiplies float32 in one, three or six passes.",
)
_TITLE, _RULE, _NOTE = "bold cyan", "dim", "dim"
_WIDTH = 120
_UNBROKEN = "\N{NO-BREAK SPACE}"


def _lines(names: Iterable[str] | str | None) -> Iterator[tuple[str, str]]:
  """The lines of the table, of the formats that have units, and of the notes, each with its style."""
  rows = describe(names)
  cells = [_HEADING, *map(_cells, rows)]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  for i, (name, *figures) in enumerate(cells):
    yield "  ".join([name.ljust(widths[0]), *map(str.rjust, figures, widths[1:])]), "" if i else _TITLE
    if not i:
      yield "-" * (sum(widths) + 2 * len(widths) - 2), _RULE
  indent = " " * (widths[0] + 2)
  yield "", ""
  yield f"{'format'.ljust(len(indent))}matrix units: devices", _TITLE
  yield "-" * (sum(widths) + 2 * len(widths) - 2), _RULE
  for row in rows:
    groups = [f"{unit}: {', '.join(devices)}" for unit, devices in row["units"].items()]
    units = "; ".join(group.replace(" ", _UNBROKEN) for group in groups) or "none"
    name = row["name"].ljust(len(indent))
    for line in textwrap.wrap(units, _WIDTH, initial_indent=name, subsequent_indent=indent):
      yield line.replace(_UNBROKEN, " "), ""
  for note in _NOTES:
    yield "", ""
    for line in textwrap.wrap(note, _WIDTH):
      yield line, _NOTE


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
  return (
    row["name"],
    str(row["bits"]),
    f"{row['sign_bits']}+{row['exponent_bits']}+{row['mantissa_bits']}",
    _number(row["max"]),
    _number(row["smallest_normal"]),
    _number(row["smallest_subnormal"]) if row["has_subnormals"] else "none",
    _number(row["epsilon"]),
    str(row["decimal_digits"]),
    row["on_overflow"],
    f"{row['log2_smallest']}..{row['log2_max']:.1f}".removesuffix(".0"),
    str(row["binades"]),
  )


def _number(x: float) -> str:
  text = f"{x:.8g}"
  return text if len(text) < 10 else f"{x:.2e}"


def _from_bits(pattern: int) -> float:
  """The float32 of a pattern of bits, by way of no float32, which a thread may flush to zero."""
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
