"""Tables of the number formats: range, precision, and the devices whose matrix units multiply them."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from mpjax._render.plain_text import table, table_width
from mpjax.dtypes import did_you_mean
from mpjax.formats._devices import described_devices
from mpjax.formats._matrix_units import LOW_PRECISION, MATRIX_UNITS, runs_on
from mpjax.formats._numbers import FORMATS, NumberFormat

if TYPE_CHECKING:
  import rich.console


def describe(names: Iterable[str] | str | None = None) -> list[dict[str, Any]]:
  """Returns the facts about number formats, one row each.

  ```python
  [row] = mpjax.formats.describe("float16")
  print(row["max"], row["smallest_normal"], row["units"])
  ```

  Args:
    names: keys of `FORMATS`, or one; all of them if `None`.

  Returns:
    A dict for each format. It has `name`, `bits`, `sign_bits`, `exponent_bits`, `mantissa_bits` (the
    fraction); `max`, `smallest_normal`, `smallest_subnormal`, `epsilon`, `decimal_digits`, `has_subnormals`,
    `on_overflow`, `underflow_edge`, `normal_edge` and `overflow_edge` as in `NumberFormat`.
    `log2_max` and `log2_smallest` are for the largest and the smallest positive number, `binades` is the
    number of powers of two between them. `units` are from the names in `MATRIX_UNITS` of the units that
    multiply the format to the devices that have them, by their names as targets of `mpjax.plan`.

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
  """Returns the rows of `describe` as plain text, at most 120 columns wide.

  ```python
  print(mpjax.formats.format_table())
  ```

  Args:
    names: keys of `FORMATS`, or one; all of them if `None`.

  Returns:
    Lines of text: the formats, their units and notes.

  Raises:
    ValueError: for an unknown name.
  """
  return "\n".join(line for line, _ in _lines(names))


def print_formats(
  console: rich.console.Console | None = None, names: Iterable[str] | str | None = None
) -> None:
  """Prints the rows of `describe` in colour; needs `rich`, which `format_table` does not need.

  ```python
  mpjax.formats.print_formats(names=["bfloat16", "float16"])
  ```

  Args:
    console: the `rich` console to print to; standard output if `None`.
    names: keys of `FORMATS`, or one; all of them if `None`.

  Raises:
    ValueError: for an unknown name.
  """
  import rich.console
  import rich.text

  console = console or rich.console.Console()
  for line, style in _lines(names):
    # A number that the terminal wraps is readable; one that it cuts is not.
    console.print(rich.text.Text(line, style), soft_wrap=True)


def _devices() -> dict[str, list[str]]:
  """Returns the names of devices by the name of their matrix units."""
  found: dict[str, list[str]] = {name: [] for name, unit in MATRIX_UNITS.items() if unit.multiples}
  for name, device in described_devices().items():
    found[device["matrix_units"]].append(name)
  return found


def _described(row: NumberFormat, devices: Mapping[str, list[str]]) -> dict[str, Any]:
  # Computed from the normal one: a thread that flushes subnormals treats the smallest float64 as zero.
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
  "Matrix units are listed for the operands that policies compute in, not for float64. mxfp8, mxfp4: blocks "
  "of 32 with a scale in float8_e8m0fnu; nvfp4: blocks of 16 with one in float8_e4m3fn. A TPU multiplies "
  "float32 in one, three or six passes.",
)
_BLOCKS = ("mxfp8", "mxfp4", "nvfp4")
_TITLE, _RULE, _NOTE = "bold cyan", "dim", "dim"
_WIDTH = 120
_UNBROKEN = "\N{NO-BREAK SPACE}"


def _lines(names: Iterable[str] | str | None) -> Iterator[tuple[str, str]]:
  """Yields the lines of the table, of the formats with units, and of the notes, each with its style."""
  rows = describe(names)
  cells = [_HEADING, *map(_cells, rows)]
  rule = "-" * table_width(cells)
  (heading,), *body = table(cells)
  yield from ((heading, _TITLE), (rule, _RULE))
  yield from ((line, "") for (line,) in body)
  devices = _devices()
  units = {row["name"]: _joined(row["units"]) for row in rows}
  recipes: dict[str, dict[str, list[str]]] = {}
  if names is None:
    units |= {name: _joined({u: devices[u] for u in devices if runs_on(u, name)}) for name in _BLOCKS}
    for unit, own in LOW_PRECISION.items():
      name = f"{own.recipe}, {' and '.join(dict.fromkeys(own[1:]))}"
      recipes.setdefault(name, {})[unit] = devices[unit]
  yield "", ""
  yield from _columns("format", "matrix units: devices", units)
  if recipes:
    yield "", ""
    yield from _columns("recipe auto", "on", {name: _joined(found) for name, found in recipes.items()})
  for note in _NOTES:
    yield "", ""
    for line in textwrap.wrap(note, _WIDTH):
      yield line, _NOTE


def _joined(units: Mapping[str, list[str]]) -> str:
  """Returns units with their devices as text, in which an unbreakable space joins what belongs together."""
  groups = [f"{unit}: {', '.join(devices)}" if devices else unit for unit, devices in units.items()]
  return "; ".join(group.replace(" ", _UNBROKEN) for group in groups) or "none"


def _columns(first: str, second: str, rows: Mapping[str, str]) -> Iterator[tuple[str, str]]:
  """Yields the lines of a table with two columns, the second folded, each with its style."""
  indent = " " * (max(map(len, rows)) + 2)
  lines = [
    line.replace(_UNBROKEN, " ")
    for name, text in rows.items()
    for line in textwrap.wrap(text, _WIDTH, initial_indent=name.ljust(len(indent)), subsequent_indent=indent)
  ]
  yield f"{first.ljust(len(indent))}{second}", _TITLE
  yield "-" * max(map(len, lines)), _RULE
  yield from ((line, "") for line in lines)


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
