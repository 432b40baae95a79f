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
  return {
    "command": f"python scripts/bench.py {command}".strip(),
    "device": device or f"{jax.device_count()} x {jax.devices()[0].device_kind}, {platform.machine()}",
    "versions": {name: version for name in ("jax", *packages, "mpjax") if (version := installed(name))},
  }


def installed(package: str) -> str:
  """The version of a package; empty if it is not installed."""
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return ""


def write(report: dict[str, Any], path: str | None) -> None:
  """Writes a report as JSON, where a path is given."""
  if path:
    with open(path, "w") as file:
      json.dump(report, file, indent=1)
      file.write("\n")


def compiler_figures(compiled: Any) -> dict[str, Any]:
  """Memory, aliasing, bytes accessed and instruction count of a compiled program."""
  memory = compiled.memory_analysis()
  arguments, outputs = memory.argument_size_in_bytes, memory.output_size_in_bytes
  return {
    "temp_bytes": memory.temp_size_in_bytes,
    "argument_bytes": arguments,
    "alias_bytes": memory.alias_size_in_bytes,
    "peak_bytes": arguments + outputs - memory.alias_size_in_bytes + memory.temp_size_in_bytes,
    "bytes_accessed": (compiled.cost_analysis() or {}).get("bytes accessed", 0.0),
    "ops": instructions(compiled.as_text()),
  }


def instructions(hlo: str) -> int:
  """How many instructions an optimised program has, in all its computations."""
  return len(re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = ", hlo, re.MULTILINE))


def provenance(report: dict[str, Any]) -> str:
  """How the figures of a report were made, in a line."""
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return f"`{report['command']}` on {report['device']}; {versions}."
