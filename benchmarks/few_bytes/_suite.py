"""Optimiser state and weights in few bytes: how stored moments follow, what an update costs.

    python scripts/bench.py few_bytes tracking [--json FILE]
    python scripts/bench.py few_bytes time [--rounds N] [--torch-python PATH] [--json FILE]
    python scripts/bench.py few_bytes memory cuda|tpu [--json FILE]
    python scripts/bench.py few_bytes step cuda|tpu [--json FILE]

`tracking` runs Adam's moments for 4000 steps, and for 4000 more in which all gradients, or those of every
second entry, are ten times smaller, and divides the stored second moment by the float32 one. Gradients are
normal, and their sizes spread log-normally. Beside the formats of mpjax are bfloat16 rounded to the nearest,
and square roots in 8 bits with a float16 scale for 32 entries, as published.
`time` runs updates of 16.8 million parameters on this machine; with an interpreter that has torch, also those
of torchao and bitsandbytes. `memory` compiles the update of 201 million parameters for an H200 or a TPU v5e,
without the device; bytes accessed are operands and results of its kernels in the device's main memory.
`step` compiles the whole step of a GPT of 101 million parameters for one of them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.autocast._suite import target_device  # isort: skip (sets JAX up for its target)

from benchmarks.few_bytes import _memory, _step, _time, _tracking


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what is measured, and what that takes."""
  parser.add_argument("measure", choices=("tracking", "time", "memory", "step"))
  parser.add_argument(
    "target", choices=("cuda", "tpu"), nargs="?", help="of memory and step: a device to compile for"
  )
  parser.add_argument("--rounds", type=int, default=15, help="of time (15)")
  parser.add_argument("--torch-python", help="of time: an interpreter with torch, torchao and bitsandbytes")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the report."""
  if options.measure == "tracking":
    return _tracking.measure()
  if options.measure == "time":
    return _time.measure(options.rounds, options.torch_python)
  if options.target is None:
    sys.exit(
      f"{options.measure} needs the device to compile for: {options.measure} cuda, or {options.measure} tpu"
    )
  if options.measure == "step":
    return _step.measure(options.target)
  return _memory.measure(options.target, target_device(options.target))
