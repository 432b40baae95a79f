"""The number formats as rows and as a table, with the devices whose matrix units multiply them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from mpjax._render.tables import Table
from mpjax.dtypes import did_you_mean
from mpjax.formats._devices import described_devices
from mpjax.formats._matrix_units import MATRIX_UNITS, runs_on
from mpjax.formats._numbers import FORMATS

_HEADING = ("format", "bits", "exponent", "mantissa", "max", "normal", "smallest", "epsilon", "overflow")


def describe(names: Iterable[str] | str | None = None) -> list[dict[str, Any]]:
  """Returns the facts about number formats, one row each.

  ```python
  [row] = mpjax.formats.describe("float16")
  print(row["max"], row["smallest_normal"], row["units"])
  ```

  Args:
    names: keys of `FORMATS`, or one; all of them if `None`.

  Returns:
    A dict for each format. It has the attributes of `NumberFormat`, and `units`: from the names in
    `MATRIX_UNITS` of the units that multiply the format to the devices that have them, by their names as
    targets of `mpjax.plan`.

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
  devices: dict[str, list[str]] = {name: [] for name, multiples in MATRIX_UNITS.items() if multiples}
  for name, device in described_devices().items():
    devices[device["matrix_units"]].append(name)
  units = lambda name: {unit: list(found) for unit, found in devices.items() if runs_on(unit, name)}
  return [dataclasses.asdict(FORMATS[name]) | {"units": units(name)} for name in names]


def format_table(names: Iterable[str] | str | None = None) -> str:
  """Returns the rows of `describe`, which takes the same argument, as plain text at most 116 columns wide.

  ```python
  print(mpjax.formats.format_table())
  ```
  """
  rows = [[*_HEADING, "devices with matrix units"]]
  for row in describe(names):
    widths = [str(row[key]) for key in ("bits", "exponent_bits", "mantissa_bits")]
    small = [f"{row[key]:.3g}" for key in ("smallest_normal", "smallest_subnormal", "epsilon")]
    largest, overflow = (f"{row[key]:.6g}" for key in ("max", "overflow_edge"))
    devices = ", ".join(device for found in row["units"].values() for device in found)
    rows.append([row["name"], *widths, largest, *small, overflow, devices or "none"])
  note = "normal: the smallest number with all digits; overflow: the smallest that rounds to infinity or NaN."
  return Table("", "Number formats", rows, [note], left=(0, 9)).text()
