"""Peak memory of a training step by policy, and how it grows with the batch and with the model.

    python scripts/bench.py memory [--target h200|v5e|here|gpu] [--model gpt] [--policy bf16] [--quick]
      [--json FILE]

GPT, ViT and ResNet of `mpjax.zoo.models` with the optimisers of configs/. `h200`, `v5e` and other names:
what the compiler of that device says, which need not be there; `here`: of this machine's; `gpu`: what three
steps take on this machine's GPU, each in a process of its own, beside what its compiler says. Two sweeps: the
base size at several batches, whose slope is what a row costs; and several sizes at one short row, where all
that counts is the model's state. Rows that are in the JSON already are not measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import pathlib
import sys
from typing import Any

from mpjax._render.picture_style import new_figure, picture_style, policy_colour

SECONDS = 900  # of a row on a GPU
ALLOCATE = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


@dataclasses.dataclass(frozen=True)
class Sweep:
  """What is asked of a model.

  Attributes:
    title: of the model.
    unit: what a row is, in the sweep of batches.
    data: of that sweep, as `_steps.Case` takes it.
    rows: the batches.
    short: the data of the sweep of sizes, at one row.
    sizes: overrides of the model's config; the second is the base.
  """

  title: str
  unit: str
  data: dict[str, int]
  rows: tuple[int, ...]
  short: dict[str, int]
  sizes: tuple[dict[str, Any], ...]


SWEEPS = {
  "gpt": Sweep(
    "GPT",
    "1024 tokens",
    {"seq_len": 1024, "vocab_size": 50304},
    (2, 4, 8),
    {"seq_len": 128, "vocab_size": 50304},
    (
      {"dim": 384, "layers": 6, "heads": 6},
      {"dim": 768, "layers": 12, "heads": 12},
      {"dim": 1024, "layers": 24, "heads": 16},
    ),
  ),
  "vit": Sweep(
    "ViT",
    "an image of 224 x 224, patches of 16 x 16",
    {"image": 224, "classes": 1000},
    (16, 32, 64),
    {"image": 224, "classes": 1000},
    (
      {"dim": 192, "layers": 12, "heads": 3, "patch": 16},
      {"dim": 384, "layers": 12, "heads": 6, "patch": 16},
      {"dim": 768, "layers": 12, "heads": 12, "patch": 16},
    ),
  ),
  "resnet": Sweep(
    "ResNet",
    "an image of 32 x 32",
    {"image": 32, "classes": 100},
    (64, 128, 256),
    {"image": 32, "classes": 100},
    (
      {"width": 32, "stages": "[3,4,6]"},
      {"width": 64, "stages": "[3,4,6]"},
      {"width": 128, "stages": "[3,4,6]"},
    ),
  ),
}
# A TPU v5e has matrix units for neither float16 nor FP8; a CPU for none of them.
POLICIES = {
  "gpu": ("fp32", "bf16", "fp16", "bf16_pure", "fp8"),
  "tpu": ("fp32", "fp32 highest", "bf16", "bf16_pure"),
  "cpu": ("fp32", "bf16"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
  """The suite's own options."""
  parser.add_argument("--target", default="here", help="a described device, here, or gpu (measured)")
  parser.add_argument("--model", action="append", choices=SWEEPS, help="one of them, may be repeated")
  parser.add_argument("--policy", action="append", metavar="NAME", help="one of them, may be repeated")
  parser.add_argument("--sweep", choices=("rows", "sizes"), help="one of both")
  parser.add_argument("--quick", action="store_true", help="fp32 and bf16, the first and the last of a sweep")


def run(options: argparse.Namespace) -> dict[str, Any]:
  """Plans, compiles or measures, and prints what it finds; the report."""
  measured = options.target == "gpu"
  if measured:  # the memory is for the processes that measure
    os.environ.update(ALLOCATE)
  import jax

  from benchmarks._record import origin, write
  from mpjax.planner import get_target, missing

  if options.target not in (
    "here",
    "gpu",
  ):  # compiled in processes of their own
    jax.config.update("jax_platforms", "cpu")
  target = get_target("here" if measured else options.target)
  if lacks := missing(target):
    sys.exit(lacks)
  if measured and target.kind != "gpu":
    sys.exit(f"--target gpu measures on a GPU, and JAX finds {target.device} here: use --target h200 or here")
  packages = [] if target.is_here else {"tpu": ["libtpu"], "gpu": ["jax-cuda13-plugin"]}[target.kind]
  device = None if target.is_here else f"{target.device}, described and not there"
  report = origin(f"memory --target {options.target}", "flax", "optax", *packages, device=device)
  report |= {"target": options.target, "rows": _before(options, report)}
  for task in tasks(options, target.kind):
    if any(all(row[key] == value for key, value in task.items()) for row in report["rows"]):
      continue
    row = task | (_measure(task) if measured else _compile(task, target))
    report["rows"].append(row)
    print(line(row), flush=True)
    write(report, options.json)
    jax.clear_caches()
  print(f"\n{tables(report)}")
  return report


def _before(options: argparse.Namespace, report: dict[str, Any]) -> list[dict[str, Any]]:
  """Rows of a report that is there already."""
  path = getattr(options, "json", None)
  if not path or not pathlib.Path(path).exists():
    return []
  before = json.loads(pathlib.Path(path).read_text())
  same = all(before.get(key) == report[key] for key in ("versions", "device"))
  same &= before.get("target") == options.target
  return [row for row in before["rows"] if "error" not in row] if same else []


def tasks(options: argparse.Namespace, kind: str) -> list[dict[str, Any]]:
  """What is asked, step by step."""
  found: list[dict[str, Any]] = []
  for model in options.model or SWEEPS:
    sweep = SWEEPS[model]
    policies = options.policy or (("fp32", "bf16") if options.quick else POLICIES[kind])
    rows, sizes = _ends_first(sweep.rows, options.quick), _ends_first(sweep.sizes, options.quick)
    by_rows = [("rows", sweep.sizes[1], sweep.data, n) for n in rows]
    by_size = [("sizes", size, sweep.short, 1) for size in sizes]
    found += [
      {"model": model, "sweep": name, "sizes": size, "data": data, "policy": policy, "rows": n}
      for name, size, data, n in (*by_rows, *by_size)
      if options.sweep in (None, name)
      for policy in policies
      if policy != "fp8" or model != "resnet"  # convolutions are never FP8
    ]
  return found


def _ends_first(points: tuple[Any, ...], only: bool) -> tuple[Any, ...]:
  """The first and the last, which make a line, before or without those between."""
  return (points[0], points[-1], *(() if only else points[1:-1]))


def _compile(task: dict[str, Any], target: Any) -> dict[str, Any]:
  from benchmarks.memory._steps import case, figures

  return figures(case(task, target), task["rows"])


def _measure(task: dict[str, Any]) -> dict[str, Any]:
  from benchmarks._worker import Worker

  with contextlib.closing(Worker(sys.executable, "benchmarks.memory._steps", task, ALLOCATE)) as worker:
    return worker.read(SECONDS)


def line(row: dict[str, Any]) -> str:
  """A row as it is printed while others are still to come."""
  start = f"{row['model']:8}{row['policy']:14}{row['rows']:4} rows"
  if "error" in row:
    return f"{start}  {row['error']}"
  if "measured" in row and row["measured"]["before"] >= row["measured"]["peak"]:
    start += " (less than what came before the step)"
  figures = ", ".join(f"{key} {row[key]['peak'] / 1e9:.3f}" for key in FIGURES if key in row)
  return f"{start}{row['parameters'] / 1e6:8.1f}M  state {row['state'] / 1e9:.3f} GB, peak {figures} GB"


FIGURES = ("measured", "compiled", "analytic")


def peak(row: dict[str, Any]) -> int:
  """Bytes: measured, or else what the compiler says."""
  return next(row[key]["peak"] for key in FIGURES if key in row)


def fit(points: dict[float, float]) -> tuple[float, float]:
  """Slope and value at zero of the line of least squares."""
  import numpy as np

  slope, zero = np.polyfit(list(points), list(points.values()), 1)
  return float(slope), float(zero)


def series(report: dict[str, Any], model: str, sweep: str) -> dict[str, list[dict[str, Any]]]:
  """Rows of a sweep by policy, in the order of its axis."""
  axis = "rows" if sweep == "rows" else "parameters"
  found: dict[str, list[dict[str, Any]]] = {}
  for row in report["rows"]:
    if row["model"] == model and row["sweep"] == sweep and "error" not in row:
      found.setdefault(row["policy"], []).append(row)
  order = [name for names in POLICIES.values() for name in names]
  chosen = sorted(found.items(), key=lambda item: order.index(item[0]) if item[0] in order else len(order))
  return {name: sorted(rows, key=lambda row: row[axis]) for name, rows in chosen}


def tables(report: dict[str, Any]) -> str:
  """By model: peaks by batch with the cost of a row, and peaks by size with the bytes of a parameter."""
  from benchmarks._record import provenance

  parts: list[str] = []
  for model, sweep in SWEEPS.items():
    by_rows, by_size = series(report, model, "rows"), series(report, model, "sizes")
    if by_rows:
      count = next(iter(by_rows.values()))[0]["parameters"] / 1e6
      parts += [f"{sweep.title} of {count:.0f}M parameters; a row is {sweep.unit}. Peak, GB:"]
      parts += [_rows_table(by_rows)]
    if by_size:
      parts += [f"{sweep.title} by size, one {_short(sweep)}. Peak, GB:", _sizes_table(by_size)]
  return "\n\n".join([*parts, provenance(report)])


def _short(sweep: Sweep) -> str:
  return f"row of {sweep.short['seq_len']} tokens" if "seq_len" in sweep.short else "image"


def _rows_table(by_policy: dict[str, list[dict[str, Any]]]) -> str:
  counts = sorted({row["rows"] for rows in by_policy.values() for row in rows})
  slopes = {
    name: fit({row["rows"]: peak(row) for row in rows}) for name, rows in by_policy.items() if len(rows) > 1
  }
  bases = [name for name in slopes if name.startswith("fp32")]
  header = ["policy", *(f"{n} rows" for n in counts), "MB a row", *(f"over {name}" for name in bases)]
  lines = []
  for name, rows in by_policy.items():
    at = {row["rows"]: f"{peak(row) / 1e9:.2f}" for row in rows}
    slope = slopes.get(name)
    cells = [name, *(at.get(n, "-") for n in counts), f"{slope[0] / 1e6:.1f}" if slope else "-"]
    cells += [f"{slope[0] / slopes[base][0]:.2f}" if slope else "-" for base in bases]
    beside = [row["state"] / row["parameters"] for row in rows]
    cells += [f"{beside[0]:.1f}", f"{slope[1] / rows[0]['parameters']:.1f}" if slope else "-", _against(rows)]
    lines.append(cells)
  return _markdown(
    [*header, "state, B a parameter", "line at 0 rows, B a parameter", _against_title(by_policy)], lines
  )


def _sizes_table(by_policy: dict[str, list[dict[str, Any]]]) -> str:
  sizes = sorted({row["parameters"] for rows in by_policy.values() for row in rows})
  lines = []
  for name, rows in by_policy.items():
    at = {row["parameters"]: f"{peak(row) / 1e9:.3f}" for row in rows}
    cells = [name, *(at.get(n, "-") for n in sizes)]
    for figure in (lambda row: row["state"], peak):
      points = {row["parameters"]: figure(row) for row in rows}
      cells.append(f"{fit(points)[0]:.2f}" if len(points) > 1 else "-")
    lines.append([*cells, _against(rows)])
  header = ["policy", *(f"{n / 1e6:.1f}M" for n in sizes), "state, B a parameter", "peak, B a parameter"]
  return _markdown([*header, _against_title(by_policy)], lines)


def _against(rows: list[dict[str, Any]]) -> str:
  """The least and the most of the analytic peak by the compiled one, or of that by the measured one."""
  key = "compiled" if "measured" in rows[0] else "analytic"
  ratios = [f"{row[key]['peak'] / peak(row):.2f}" for row in rows if key in row]
  low, high = min(ratios, default="-"), max(ratios, default="-")
  return low if low == high else f"{low} to {high}"


def _against_title(by_policy: dict[str, list[dict[str, Any]]]) -> str:
  measured = any("measured" in row for rows in by_policy.values() for row in rows)
  return "compiled over measured" if measured else "analytic over compiled"


def _markdown(header: list[str], lines: list[list[str]]) -> str:
  rows = [header, ["---"] * len(header), *lines]
  return "\n".join(f"| {' | '.join(row)} |" for row in rows)


MARKERS = {"fp32": "o", "fp32 highest": "P", "bf16": "s", "fp16": "^", "bf16_pure": "D", "fp8": "v"}


@picture_style()
def pictures(report: dict[str, Any]) -> dict[str, Any]:
  """Peak against batch and against parameters: points and the lines that fit them, a panel a model."""
  found = {}
  for sweep, label in (("rows", "rows of a batch"), ("sizes", "parameters, millions")):
    panels = {model: series(report, model, sweep) for model in SWEEPS}
    panels = {model: lines for model, lines in panels.items() if lines}
    if panels:
      found[f"memory_{sweep}_{report['target'].partition(':')[0]}"] = _figure(panels, sweep, label)
  return found


def _figure(panels: dict[str, dict[str, list[dict[str, Any]]]], sweep: str, label: str) -> Any:
  figure = new_figure(3.6, "Peak memory of a training step, GB")
  axes = figure.subplots(1, len(panels), squeeze=False)[0]
  for ax, (model, lines) in zip(axes, panels.items(), strict=True):
    for name, rows in lines.items():
      x = [row["rows"] if sweep == "rows" else row["parameters"] / 1e6 for row in rows]
      y = [peak(row) / 1e9 for row in rows]
      # Hollow, since policies of as many bytes lie on one another.
      style = {"color": policy_colour(name), "fillstyle": "none", "markersize": 7}
      ax.plot(x, y, MARKERS.get(name, "x"), label=name, **style)
      if len(x) > 1:
        slope, zero = fit(dict(zip(x, y, strict=True)))
        ends = [0.0, max(x)]
        ax.plot(ends, [zero + slope * end for end in ends], color=policy_colour(name))
    ax.set(title=SWEEPS[model].title, xlabel=label, xlim=(0, None), ylim=(0, None))
    ax.grid()
  handles: dict[str, Any] = {}
  for ax in axes:
    handles |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
  figure.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles))
  return figure
