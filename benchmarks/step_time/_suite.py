"""The predicted time of training steps beside published rates and measured times.

    python scripts/bench.py step_time published [--rows TEXT] [--json FILE]
    python scripts/bench.py step_time six [--measured FILE] [--json FILE]
    python scripts/bench.py step_time measure [--tiny] [--json FILE]

published: the rows of `published.yaml` whose name or target contains a text of `--rows` (all without it).
Needs the packages of `plan-tpu` and `plan-cuda`, and no device. six: six models under three policies, as
planned for an H100, beside what `measure` reported if that is given. measure: the same steps on this
machine's device; the median of 20.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
from typing import Any

if "measure" in sys.argv:
  # Triton's FP8 products take minutes to tune.
  os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_triton_gemm=false"
else:
  os.environ["JAX_PLATFORMS"] = "cpu"

from benchmarks._record import origin, write
from benchmarks.step_time import _published, _six


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("what", choices=("published", "six", "measure"))
  parser.add_argument(
    "--rows", action="append", metavar="TEXT", help="of `published`: part of a name or target"
  )
  parser.add_argument("--measured", type=pathlib.Path, metavar="FILE", help="of `six`: a report of `measure`")
  parser.add_argument("--tiny", action="store_true", help="of `measure`: sizes for a CPU")


def run(options: argparse.Namespace) -> int:
  """Measures or plans, prints as it goes, and writes the report after each row."""
  report = _report(options)
  rows = {"published": _published_rows, "six": _planned, "measure": _measured}[options.what]
  for row in rows(options):
    report["rows"].append(row)
    print(_line(row), flush=True)
    write(report, options.json)
  if options.what != "measure":
    print({"published": _published.table, "six": _six.table}[options.what](report))
  return 0


def _published_rows(options: argparse.Namespace) -> Any:
  asked = options.rows or [""]
  for row in _published.rows():
    if any(text in row.name or text in row.target.name for text in asked):
      yield _published.measure(row)


def _planned(options: argparse.Namespace) -> Any:
  rows = _six.plans()
  return _six.with_measured(rows, json.loads(options.measured.read_text())) if options.measured else rows


def _measured(options: argparse.Namespace) -> Any:
  return _six.measured(options.tiny)


def _report(options: argparse.Namespace) -> dict[str, Any]:
  given = [options.what, *(f"--rows {text!r}" for text in options.rows or ()), *["--tiny"] * options.tiny]
  described = None if options.what == "measure" else "described devices that are not there"
  packages = ("flax", "optax", *(() if options.what == "measure" else ("libtpu", "jax-cuda13-plugin")))
  return origin(f"step_time {' '.join(given)}", *packages, device=described) | {"rows": []}


def _line(row: dict[str, Any]) -> str:
  if "row" not in row:
    return f"{row['model']:8}{row['policy']:6}{row['seconds'] * 1e3:9.2f} ms"
  if "error" in row:
    return f"{row['row']:36}{row['error']}"
  return f"{row['row']:36}{row['published_seconds']:9.3f} s{row['seconds']:9.3f} s{row['ratio']:6.2f}"
