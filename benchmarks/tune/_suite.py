"""Searches for policies of the example configs, predictions beside measurements, and training beside float32.

python scripts/bench.py tune search        # what is chosen for h200, l4 and v5e
python scripts/bench.py tune predictions   # 50 random policies: the sum of single changes, and the error
python scripts/bench.py tune growth        # seconds by number of modules
python scripts/bench.py tune proof         # the policies chosen for an h200, trained beside fp32
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

import jax
import numpy as np

from benchmarks._record import origin, provenance, write
from mpjax._render.picture_style import BLUE, GREY, new_figure, picture_style
from mpjax.cli._subject import open_subject
from mpjax.cli._tune_proof import prove
from mpjax.planner import get_target
from mpjax.train import Config, Planner, load_config, load_plugins
from mpjax.tuning import TuneResult, tune
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import Module, mixed_policy
from mpjax.tuning._tune import modules_of

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples" / "llama"
CONFIGS = {
  "gpt_stdlib": "gpt_stdlib",
  "llama stdlib": str(EXAMPLES / "stdlib.yaml"),
  "vit_digits": "vit_digits",
  "resnet_digits": "resnet_digits",
}
TARGETS = ("h200", "l4", "v5e", "h200:8")
PARTS = ("search", "predictions", "growth", "proof")
_STEPS, _BATCHES = 10, 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """Adds the suite's options."""
  parser.add_argument("part", choices=PARTS, help="what to measure")
  parser.add_argument(
    "--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS), help="of `search` and `proof`"
  )
  parser.add_argument("--policies", type=int, default=50, help="of `predictions`")
  parser.add_argument("--steps", type=int, help="of `proof`, in place of each config's own")


def run(options: argparse.Namespace) -> int:
  """Runs the suite."""
  load_plugins([str(EXAMPLES / "llama.py")])
  measured = {"search": _search, "predictions": _predictions, "growth": _growth, "proof": _proof}[
    options.part
  ]
  report = {**origin(f"tune {options.part}", "flax", "optax"), **measured(options)}
  print(TABLES[options.part](report))
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


def _modules(config: Config) -> list[Module]:
  subject = open_subject(config, None)
  return modules_of(subject.step, subject.state, subject.next_batch())[0]


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


def _predictions(options: argparse.Namespace) -> dict[str, Any]:
  """Errors of random policies, and of the sum of the single changes that they are made of."""
  subject = open_subject(_float32("gpt_stdlib"), None)
  for _ in range(_STEPS):
    subject.train()
  batches = [subject.next_batch() for _ in range(_BATCHES)]
  gradients = Gradients(subject.step, subject.state, batches)
  modules, _ = modules_of(subject.step, subject.state, batches[0])
  paths = [path for module in modules for path in module.paths]
  error = lambda levels: (
    gradients.error(mixed_policy({m: levels.get(m, "fp32") for m in modules}, paths)).total
  )
  single = {}
  for module in modules:
    for level in module.levels[1:]:
      single[module, level] = error({module: level}) ** 2
      print(f"  {module.name} {level}: {single[module, level] ** 0.5:.3g}", flush=True)
  rng = np.random.default_rng(0)
  points = []
  for _ in range(options.policies):
    levels = {module: str(rng.choice(module.levels)) for module in modules}
    predicted = sum(single[m, level] for m, level in levels.items() if level != "fp32") ** 0.5
    points.append({"predicted": predicted, "measured": error(levels)})
    print(f"  {predicted:.3g} {points[-1]['measured']:.3g}", flush=True)
  logs = np.log([[p["predicted"], p["measured"]] for p in points])
  ratios = [p["measured"] / p["predicted"] for p in points]
  return {
    "points": points,
    "correlation": float(np.corrcoef(logs.T)[0, 1]),
    "ratio": {"least": min(ratios), "median": float(np.median(ratios)), "most": max(ratios)},
  }


def _growth(options: argparse.Namespace) -> dict[str, Any]:
  rows = []
  for layers in (1, 2, 4):
    config = _float32("gpt_stdlib", f"model.layers={layers}")
    result, seconds = _tuned(config, "h200")
    rows.append(
      {
        "layers": layers,
        "modules": sum(len(module.paths) for module in _modules(config)),
        "trials": len(result.table),
        "seconds": seconds,
        "chosen": result.chosen.label,
      }
    )
    print(rows[-1], flush=True)
    jax.clear_caches()
  return {"rows": rows, "cores": os.cpu_count()}


def _proof(options: argparse.Namespace) -> dict[str, Any]:
  rows = []
  for name in options.configs:
    config = _float32(name)
    result, _ = _tuned(config, "h200")
    proof = prove(
      config,
      result.policy,
      result.chosen.label,
      steps=options.steps or config.train.steps,
      seeds=range(3),
      say=lambda line: print(f"  {line}", flush=True),
    )
    rows.append({"config": name, **proof})
    jax.clear_caches()
  return {"rows": rows}


def _search_table(report: dict[str, Any]) -> str:
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


def _predictions_table(report: dict[str, Any]) -> str:
  ratio = report["ratio"]
  lines = [
    "| random policies | correlation of logarithms | measured / predicted: least | median | most |",
    "|---|---|---|---|---|",
    f"| {len(report['points'])} | {report['correlation']:.4f} | {ratio['least']:.2f} | "
    f"{ratio['median']:.2f} | {ratio['most']:.2f} |",
  ]
  return "\n".join([*lines, "", provenance(report)])


@picture_style()
def picture(report: dict[str, Any]) -> Any:
  """A scatter of the predicted and the measured error of each random policy of `predictions`."""
  predicted, measured = (
    [100 * point[key] for point in report["points"]] for key in ("predicted", "measured")
  )
  correlation = f"correlation of the logarithms {report['correlation']:.4f}"
  figure = new_figure(4.4, f"{len(predicted)} random policies: {correlation}")
  panel = figure.subplots()
  ends = [0.8 * min(predicted + measured), 1.25 * max(predicted + measured)]
  panel.loglog(ends, ends, color=GREY, linewidth=1)
  panel.plot(predicted, measured, "o", color=BLUE, alpha=0.6, markeredgewidth=0)
  panel.set(xlim=ends, ylim=ends)
  panel.set_xlabel("root of the sum of squares of single changes, %")
  panel.set_ylabel("measured error of the gradient, %")
  panel.grid()
  return figure


def _growth_table(report: dict[str, Any]) -> str:
  lines = ["| layers | modules | policies tried | seconds | each |", "|---" * 5 + "|"]
  for row in report["rows"]:
    each = row["seconds"] / row["trials"]
    lines.append(
      f"| {row['layers']} | {row['modules']} | {row['trials']} | {row['seconds']:.0f} | {each:.1f} |"
    )
  return "\n".join([*lines, "", provenance(report)])


def _proof_table(report: dict[str, Any]) -> str:
  lines = ["| config | policy | steps | eval loss | fp32 | difference | between seeds |", "|---" * 7 + "|"]
  for row in report["rows"]:
    mine, wide = (np.mean(row["eval_losses"][name]) for name in (row["label"], "fp32"))
    spread = np.std(row["eval_losses"]["fp32"], ddof=1)
    lines.append(
      f"| {row['config']} | {row['label']} | {row['steps']} | {mine:.4f} | {wide:.4f} | "
      f"{row['difference']:+.4f} | {spread:.4f} |"
    )
  return "\n".join([*lines, "", provenance(report)])


TABLES = {
  "search": _search_table,
  "predictions": _predictions_table,
  "growth": _growth_table,
  "proof": _proof_table,
}
