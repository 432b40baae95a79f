"""Tables of what was measured once on an H100 and an H200: their reports stay with their date."""

from __future__ import annotations

import math
from typing import Any

from benchmarks._runner import markdown, one


def speed(report: dict[str, Any]) -> str:
  """A GPT's steps beside each other."""
  (model,) = report["models"].values()
  lines = [
    [name, f"{1e3 * row['seconds']:.1f}", f"{row['units_per_s']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"]
    for name, row in model["rows"].items()
    if "seconds" in row
  ]
  return markdown([model["title"], "ms", "tokens/s", "peak GB"], lines)


def training(report: dict[str, Any]) -> str:
  """Evaluation loss by policy, from one seed."""
  runs = report["runs"]
  shares = {name: run["eval_loss"] / runs["fp32"]["eval_loss"] - 1 for name, run in runs.items()}
  lines = [[name, f"{runs[name]['eval_loss']:.4f}", f"{share:+.2%}"] for name, share in shares.items()]
  return markdown(["policy", "eval loss", "against fp32"], lines)


def plans(report: dict[str, Any]) -> str:
  """Peaks that were measured, and over them those of plans; and times."""
  lines = []
  for row in report["rows"]:
    ratios = [f"{row[key] / row['measured_peak']:.3f}" for key in ("described", "analytic")]
    times = [f"{row[key]:.1f}" for key in ("measured_ms", "floor_ms")]
    lines.append([row["name"], f"{row['measured_peak'] / 1e9:.2f}", *ratios, *times])
  return markdown(["step", "measured GB", "compiled", "analytic", "measured ms", "at least ms"], lines)


def step_times(report: dict[str, Any]) -> str:
  """Planned and measured milliseconds of six models by policy."""
  models, policies = (list(dict.fromkeys(row[key] for row in report["rows"])) for key in ("model", "policy"))
  cell = lambda row: f"{1e3 * row['seconds']:.1f} / {1e3 * row['measured']:.1f}"
  row_of = lambda model: [cell(one(report, model=model, policy=policy)) for policy in policies]
  lines = [[model, *row_of(model)] for model in models]
  return markdown(["planned / measured ms", *policies], lines)


def rates(report: dict[str, Any]) -> str:
  """What square products reach by dtype, and what passes over much memory do."""
  found: dict[int, dict[str, float]] = {}
  for row in report["rows"]:
    if row["what"] == "product" and row["shape"] == [1, *row["shape"][1:2] * 3]:
      found.setdefault(row["shape"][1], {})[row["dtype"]] = 2e-12 * math.prod(row["shape"]) / row["seconds"]
  dtypes = list(dict.fromkeys(dtype for rates in found.values() for dtype in rates))
  lines = [[side, *(f"{of.get(dtype, math.nan):.0f}" for dtype in dtypes)] for side, of in found.items()]
  moved = [row for row in report["rows"] if row.get("bytes", 0) > 1e8]
  passes = {row["what"]: row["bytes"] / row["seconds"] / 1e9 for row in moved}
  words = ", ".join(f"{what} {rate:.0f}" for what, rate in passes.items())
  text = markdown(["side of a product, TFLOP/s", *dtypes], lines).replace("nan", "-")
  return f"{text}\n\nPasses over 100 MB and more, GB/s: {words}."


TABLES = {"gpu_h200_124m": speed, "gpu_h200_1b": speed, "train_h200": training, "plan_h200_gpu_suite": plans}
TABLES |= {"step_time_six_h100": step_times, "rates_h100": rates}
