"""Numbers and tables as plain text: units with decimal prefixes, shares, aligned columns; data for JSON."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

GAP = 2  # between columns


def bytes_text(count: float) -> str:
  """Returns bytes in decimal units: `1.23 GB` is 1.23e9 bytes."""
  return f"{count:.0f} B" if abs(count) < 1000 else with_prefix(count, "B")


def with_prefix(value: float, unit: str) -> str:
  """Returns a number with two decimals and the decimal prefix that makes it less than 1000."""
  if not value:
    return f"0 {unit}"
  size, name = prefixed_unit(value, unit)
  return f"{value / size:.2f} {name}"


def prefixed_unit(value: float, unit: str) -> tuple[float, str]:
  """Returns the size and the name of the unit that `with_prefix` uses for a number, such as 1e-6 and `us`."""
  # From 999.995 on, two decimals would give 1000.00.
  power = math.floor(math.log10(abs(value) / 0.999995) / 3) if value else 0
  power = min(max(power, -3), 6)
  return 1000.0**power, f"{'num kMGTPE'[power + 3].strip()}{unit}"


def percent(share: float) -> str:
  """Returns a share as `0`, `12.3%`, `0.012%` or `<0.001%`."""
  if not share:
    return "0"
  if share < 1e-5:
    return "<0.001%"
  return f"{100 * share:.3g}%" if share >= 1e-4 else f"{100 * share:.1g}%"


def power_of_two_text(number: float) -> str:
  """Returns `2^16` for a power of two, and other numbers as they are."""
  exponent = math.log2(number) if number > 0 else math.nan
  return f"2^{int(exponent)}" if exponent.is_integer() else f"{number:g}"


def table(rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> list[list[str]]:
  """Returns the lines of each row, with every cell padded to the width of its column.

  Args:
    rows: cells, the heading included. A cell with line breaks takes several lines.
    left: indices of the columns that are aligned left. The others are aligned right.
  """
  columns = zip(*rows, strict=True)
  widths = [max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
  pad = lambda i, cell: cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
  lines_of = lambda row: itertools.zip_longest(*(cell.split("\n") for cell in row), fillvalue="")
  gap = " " * GAP
  return [[gap.join(map(pad, range(len(line)), line)).rstrip() for line in lines_of(row)] for row in rows]


def fold(text: str, width: int) -> str:
  """Breaks text into lines of at most `width` characters, if possible after a space, comma or slash.

  Every line is indented like the first.
  """
  if len(text) <= width:
    return text
  indent = " " * (len(text) - len(text.lstrip(" ")))
  room = width - len(indent)
  folded = [""]
  for word in re.split(r"(?<= )|(?<=[,/])(?=[^\d ])", text.strip()):
    while len(folded[-1] + word.rstrip()) > room:
      if folded[-1]:
        folded.append("")
      else:
        folded[-1:], word = [word[:room], ""], word[room:]
    folded[-1] += word
  return "\n".join(indent + line.rstrip() for line in folded if line)


def pip_install(extras: str) -> str:
  """Returns the command that installs extras of mpjax, such as `plan` or `train,plan`."""
  return f'pip install "mpjax[{extras}]", or in a checkout pip install -e ".[{extras}]"'


def plain_data(value: Any) -> Any:
  """Returns data for JSON: NaN and the infinities as the strings that `float` reads, arrays as lists."""
  if isinstance(value, Mapping):
    return {str(key): plain_data(item) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain_data(item) for item in value]
  if hasattr(value, "tolist"):  # arrays and scalars of NumPy
    return plain_data(value.tolist())
  if isinstance(value, float) and not math.isfinite(value):
    return str(value)
  return value
