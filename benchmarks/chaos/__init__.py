"""Training runs that are killed, interrupted and damaged end as those that are left alone, bit for bit.

    python -m benchmarks.chaos --hours 1 [--seed 0] [--json FILE]
    python -m benchmarks.chaos --compare DIR DIR

Small runs of the three example configs, and one of two processes, get signals at any moment, damaged files
between their starts, and another mesh. The same command goes on each time. In the end the records, the
summary and the arrays of the last checkpoint have to be those of an undisturbed twin. Only times may differ,
and a record that was destroyed in its file may be missing.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import random
import shutil
import sys
import tempfile
import time
from typing import Any

from benchmarks._runner import markdown, origin, write
from benchmarks.chaos._contents import contents, differences
from benchmarks.chaos._run import CHECKPOINT, MESH, METRICS, SIGNALS, SUMMARY, Example, Run

_FP16 = "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 20}}"
_SMALL = ("model.layers=1", "model.heads=2", "data.batch_size=8")
_GPT = (_FP16, *_SMALL, "model.dim=32", "model.dropout=0.1", "data.seq_len=32", "data.eval_batches=2")
EXAMPLES = (
  Example("gpt_stdlib", _GPT),
  Example("vit_digits", ("policy=bf16", *_SMALL, "model.dim=16")),
  Example("resnet_digits", (_FP16, "model.stages=[1]", "model.width=4", "data.batch_size=8")),
  Example("gpt_stdlib", (*_GPT, "distributed.start_timeout_s=100"), processes=2),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds what the soak takes."""
  parser.add_argument("--hours", type=float, default=0.05, help="how long runs are begun")
  parser.add_argument("--seed", type=int, default=0)
  parser.add_argument("--compare", nargs=2, type=pathlib.Path, metavar="DIR", help="only compare two runs")


def run(options: argparse.Namespace) -> int:
  """Makes runs until the time is over, each beside its twin, or compares two; returns the exit status."""
  if options.compare:
    found, expected = map(contents, options.compare)
    lines = differences(found, expected)
    print("\n".join(lines) or "the same bit for bit")
    return 1 if lines else 0
  scratch = pathlib.Path(tempfile.mkdtemp(prefix="mpjax-chaos-"))
  report = origin(f"chaos --hours {options.hours:g} --seed {options.seed}", "jaxlib", "orbax-checkpoint")
  start, report["runs"] = time.monotonic(), []
  twins: dict[Example, dict[str, str]] = {}
  while time.monotonic() - start < options.hours * 3600:
    number = len(report["runs"])
    example, folder = EXAMPLES[number % len(EXAMPLES)], scratch / str(number)
    if example not in twins:
      alone = Run(example, scratch / f"twin-{number}", scratch)
      twins[example] = alone.end()
      if alone.problems:
        sys.exit(f"the undisturbed run of {example.name}: {alone.problems[0]}")
    made = Run(example, folder, scratch, twins[example], random.Random(f"{options.seed}/{number}"))
    made.go()
    problems = [text.partition("\n")[0] for text in made.problems]
    report["runs"].append({"example": example.name, "faults": made.faults, "problems": problems})
    outcome = "\n  ".join(made.problems[:9]) or "as its twin"
    print(f"{number} {example.name}: {'; '.join(made.faults)}\n  {outcome}", flush=True)
    if not made.problems:
      shutil.rmtree(folder)
  write(report, options.json)
  print(f"\n{table(report)}")
  if any(made["problems"] for made in report["runs"]):
    print(f"runs that did not end as their twins are in {scratch}")
    return 1
  shutil.rmtree(scratch)
  return 0


def table(report: dict[str, Any]) -> str:
  """Faults by kind and example, and how many runs ended as their twins."""
  kinds = [*SIGNALS, CHECKPOINT, METRICS, SUMMARY, MESH]
  columns = []
  for example in EXAMPLES:
    runs = [run for run in report["runs"] if run["example"] == example.name]
    counts = collections.Counter(fault.partition(":")[0] for run in runs for fault in run["faults"])
    good = sum(not run["problems"] for run in runs)
    columns.append([*(counts[kind] for kind in kinds), f"{good} of {len(runs)}"])
  heads = ["fault", *(example.name for example in EXAMPLES)]
  return markdown(heads, zip([*kinds, "runs that ended as their twins"], *columns, strict=True))
