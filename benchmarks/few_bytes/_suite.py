"""Optimiser state and weights in few bytes: what an update and a step take, compiled.

    python scripts/bench.py few_bytes memory cuda|tpu [--json FILE]
    python scripts/bench.py few_bytes step cuda|tpu [--json FILE]

`memory` compiles the update of 201 million parameters for an H200 or a TPU v5e, without the device; bytes
accessed are operands and results of its kernels in the device's main memory. `step` compiles the whole step
of a GPT of 101 million parameters for one of them.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.autocast._suite import target_device  # isort: skip (sets JAX up for its target)

from benchmarks.few_bytes import _memory, _step


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what is measured, and what that takes."""
  parser.add_argument("measure", choices=("memory", "step"))
  parser.add_argument("target", choices=("cuda", "tpu"), help="a device to compile for")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Returns the report."""
  if options.measure == "step":
    return _step.measure(options.target)
  return _memory.measure(options.target, target_device(options.target))
