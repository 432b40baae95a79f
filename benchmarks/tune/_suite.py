"""What a search for a policy chooses for the example configs on an H200, an L4, a TPU v5e and eight H200s.

python scripts/bench.py tune [--configs NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import os
import pathlib
import tempfile
import time
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from benchmarks._record import origin, provenance, write
from mpjax.cli._subject import open_subject
from mpjax.planner import get_target
from mpjax.train import Config, Planner, load_config, load_plugins
from mpjax.tuning import TuneResult, tune

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "llama"
CONFIGS = {
  "gpt_stdlib": "gpt_stdlib",
  "llama stdlib": str(EXAMPLES / "stdlib.yaml"),
  "vit_digits": "vit_digits",
  "resnet_digits": "resnet_digits",
}
TARGETS = ("h200", "l4", "v5e", "h200:8")
_STEPS, _BATCHES = 10, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the suite's options."""
  parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="these alone")


def run(options: argparse.Namespace) -> int:
  """Runs the suite."""
  load_plugins([str(EXAMPLES / "llama.py")])
  report = {**origin("tune", "flax", "optax"), **_search(options)}
  print(table(report))
  write(report, options.json)
  return 0


def _tuned(config: Config, target: str, trials: pathlib.Path | None = None) -> tuple[TuneResult, float]:
  """Returns what a search finds after ten steps in float32, and its seconds."""
  subject = open_subject(config, None)
  for _ in range(_STEPS):
    subject.train()
  batches = [subject.next_batch() for _ in range(_BATCHES)]
  planner = Planner(config, get_target(target))
  began = time.perf_counter()
  result = tune(
    subject.step.with_layout(planner.layout),
    subject.state,
    batches,
    target=target,
    trials=trials,
    plan_of=lambda policy, recompute: planner.plan(policy, recompute=recompute, compile=False),
    progress=lambda line: print(f"  {line}", flush=True),
  )
  return result, time.perf_counter() - began


def _float32(name: str, *overrides: str) -> Config:
  return load_config(CONFIGS[name], ["policy=fp32", *overrides])


def _search(options: argparse.Namespace) -> dict[str, Any]:
  rows = []
  folder = pathlib.Path(tempfile.mkdtemp())
  for name, target in itertools.product(options.configs, TARGETS):
    print(name, target, flush=True)
    result, seconds = _tuned(_float32(name), target, folder / f"{name}.jsonl")
    of = {trial.label: trial.cost for trial in result.table}
    chosen = result.chosen.cost
    rows.append(
      {
        "config": name,
        "target": target,
        "chosen": result.chosen.label,
        "yaml": result.yaml,
        "trials": len(result.table),
        "seconds": seconds,
        "noise": result.noise.total if result.noise else None,
        "tolerance": result.tolerance,
        "error": result.chosen.error.total,
        "time_floor_s": chosen.seconds,
        "peak_bytes": chosen.peak,
        "time_of_bf16": _ratio(chosen.seconds, of["bf16"].seconds),
        "time_of_fp32": _ratio(chosen.seconds, of["fp32"].seconds),
        "peak_of_fp32": chosen.peak / of["fp32"].peak,
      }
    )
  return {"rows": rows}


def _ratio(mine: float | None, other: float | None) -> float | None:
  return None if mine is None or other is None else mine / other


def table(report: dict[str, Any]) -> str:
  lines = [
    "| config | target | chosen | error (may be) | time of bf16's, of fp32's | tried | s |",
    "|---" * 7 + "|",
  ]
  for row in report["rows"]:
    ratios = [row["time_of_bf16"], row["time_of_fp32"]]
    times = ", ".join("-" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
    lines.append(
      f"| {row['config']} | {row['target']} | {row['chosen']} | {row['error']:.2%} "
      f"({row['tolerance']:.2%}) | {times} | {row['trials']} | {row['seconds']:.0f} |"
    )
  return "\n".join([*lines, "", provenance(report)])
