"""What every benchmark reports beside its figures, and how: command, device, versions, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from typing import Any

import jax


def origin(command: str, *packages: str, device: str | None = None) -> dict[str, Any]:
  """The first entries of a report: the command, the device and the versions."""
  here = f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}"
  names = ("jax", *packages, "mpjax")
  return {
    "command": f"python benchmarks/{command}",
    "device": device or here,
    "versions": {name: importlib.metadata.version(name) for name in names},
  }


def write(report: dict[str, Any], path: str | None) -> None:
  """Writes a report as JSON, where a path is given."""
  if path:
    with open(path, "w") as file:
      json.dump(report, file, indent=1)
      file.write("\n")


def compiler_figures(compiled: Any) -> dict[str, Any]:
  """Memory, aliasing and instruction count of a compiled program."""
  memory = compiled.memory_analysis()
  return {
    "temp_bytes": memory.temp_size_in_bytes,
    "argument_bytes": memory.argument_size_in_bytes,
    "alias_bytes": memory.alias_size_in_bytes,
    "ops": len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", compiled.as_text(), re.MULTILINE)),
  }


def print_times(title: str, rows: dict[str, Any]) -> None:
  """The table of a model: time, memory and instructions by variant."""
  print(f"{title:44}{'ms':>9}{'ratio':>7}{'q25-q75':>14}{'temp MB':>9}{'ratio':>7}{'ops':>7}{'ratio':>7}")
  for name, row in rows.items():
    print(
      f"  {name:42}{row['ms']:9.3f}{row['ratio']:7.3f}{row['q25']:7.3f}-{row['q75']:.3f} "
      f"{row['temp_bytes'] / 1e6:9.2f}{row['temp_ratio']:7.3f}{row['ops']:7}{row['ops_ratio']:7.2f}",
      flush=True,
    )
