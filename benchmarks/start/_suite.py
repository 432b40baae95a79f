"""Seconds from `mpjax train` to its first step and to its end, here and in another checkout.

    python -m benchmarks start --beside ../before [--rounds 9] [--json FILE]

The checkouts take turns, in a new order each round, each in a process of its own without a compilation
cache. Ratios are of the median round. The first step is over when its record is in `metrics.jsonl`.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks._record import origin, provenance

_HERE = pathlib.Path(__file__).parents[2]
_ARGUMENTS = ("gpt_stdlib", "train.steps=20", "train.log_every=1", "data.eval_batches=2")
_TICK_S = 0.002


def add_arguments(parser: argparse.ArgumentParser) -> None:
  parser.add_argument("--beside", type=pathlib.Path, required=True, metavar="DIR", help="another checkout")
  parser.add_argument("--rounds", type=int, default=9)


def run(options: argparse.Namespace) -> dict[str, Any]:
  folders = {"before": options.beside.resolve(), "after": _HERE}
  times: dict[str, list[tuple[float, float]]] = {name: [] for name in folders}
  for number in range(options.rounds + 1):
    for name in random.Random(number).sample(list(folders), len(folders)):
      found = _start(folders[name])
      if number:  # the first round reads files from the disk
        times[name].append(found)
  rows = {
    name: {"first_step_s": statistics.median(a), "end_s": statistics.median(b)}
    for name, (a, b) in ((name, tuple(zip(*found, strict=True))) for name, found in times.items())
  }
  ratios = [after[0] / before[0] for before, after in zip(times["before"], times["after"], strict=True)]
  cores = f"{len(os.sched_getaffinity(0))} cores"
  command = f"start --beside BEFORE --rounds {options.rounds}"
  for name, row in rows.items():
    print(f"{name}: first step after {row['first_step_s']:.2f} s, end after {row['end_s']:.2f} s")
  print(f"ratio of the median round: {statistics.median(ratios):.3f}")
  return origin(command, "jaxlib", device=cores) | {"rows": rows, "ratio": statistics.median(ratios)}


def _start(checkout: pathlib.Path) -> tuple[float, float]:
  """Returns the seconds to the record of the first step, and to the end."""
  with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "run"
    command = [sys.executable, "-m", "mpjax", "train", *_ARGUMENTS, f"out={out}"]
    environment = os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    begun, first = time.monotonic(), 0.0
    process = subprocess.Popen(
      command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and not first:
      metrics = out / "metrics.jsonl"
      if metrics.exists() and b"\n" in metrics.read_bytes():
        first = time.monotonic() - begun
      time.sleep(_TICK_S)
    _, said = process.communicate()
    if process.returncode:
      raise RuntimeError(f"{checkout}: status {process.returncode}: {said.decode(errors='replace')[-500:]}")
    return first, time.monotonic() - begun


def table(report: dict[str, Any]) -> str:
  """Seconds to the first step and to the end of 20 steps."""
  lines = ["| checkout | first step | end of 20 steps |", "|---|---|---|"]
  for name, row in report["rows"].items():
    lines.append(f"| {name} | {row['first_step_s']:.2f} s | {row['end_s']:.2f} s |")
  return "\n".join([*lines, "", f"First step: {report['ratio']:.3f} of before.", "", provenance(report)])
