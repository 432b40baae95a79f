"""Numbers with units, for people."""

from __future__ import annotations

import math


def bytes_text(count: float) -> str:
  """Bytes in decimal units: `1.23 GB` are 1.23e9."""
  return f"{count:.0f} B" if abs(count) < 1000 else with_prefix(count, "B")


def with_prefix(value: float, unit: str) -> str:
  """A figure with two decimals and the decimal prefix that leaves it below 1000."""
  if not value:
    return f"0 {unit}"
  # From 999.995 on, two decimals would make it 1000.00.
  power = math.floor(math.log10(abs(value) / 0.999995) / 3)
  power = min(max(power, -3), 6)
  return f"{value / 1000.0**power:.2f} {'num kMGTPE'[power + 3].strip()}{unit}"
