"""What the rows of the gpu suite say: medians, ratios and shares, the targets, tables and pictures."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.gpu._rows import REFERENCE
from benchmarks.gpu._stage import paired
from mpjax._render.picture_style import BLACK, SMALL, draw_limit, new_figure, picture_style, policy_colour

FUSED = "bf16, fused attention"
LEAST_BF16, LEAST_SHARE, LEAST_FP8, MOST_ACTIVATIONS = 3.0, 0.5, 1.25, 0.55


def merge(old: dict[str, Any] | None, new: dict[str, Any]) -> dict[str, Any]:
  """A row that has been measured twice."""
  if not old or not old.get("rounds_s"):
    return dict(new)
  if not new.get("rounds_s"):
    return old
  before = len(old["rounds_s"])
  groups = old["groups"] | {group: first + before for group, first in new["groups"].items()}
  # Its peak of memory and compile time are those of the first time, when no program was there yet.
  return new | old | {"rounds_s": old["rounds_s"] + new["rounds_s"], "groups": groups}


def summarise(report: dict[str, Any], model: dict[str, Any]) -> None:
  """Adds to the rows of a model what follows from their rounds."""
  rows, peaks = model["rows"], report.get("peaks")
  base = rows.get(REFERENCE, {})
  for name, row in rows.items():
    if not row.get("rounds_s"):
      continue
    seconds = row["seconds"] = statistics.median(row["rounds_s"])
    row["q25"], row["q75"] = _quartiles(row["rounds_s"])
    row["units_per_s"] = model["units"] / seconds
    if base.get("rounds_s"):
      ratios = paired(row, base)
      row["ratio"] = statistics.median(ratios)
      row["ratio_q25"], row["ratio_q75"] = _quartiles(ratios)
    fp8 = model["fp8_share"].get(name, 0.0)
    parts = {"float8": fp8, "bfloat16" if row["peak"] == "float8" else row["peak"]: 1 - fp8}
    parts = {dtype: part for dtype, part in parts.items() if part}
    if peaks and {*parts} <= {*peaks}:
      row["share_of_peak"] = (
        sum(model["flops"] * part / peaks[dtype] for dtype, part in parts.items()) / seconds
      )
    whole = row.get("peak_bytes") or row.get("step_bytes")
    if whole and "state_bytes" in row:
      row["activation_bytes"] = whole - row["state_bytes"]
  full = rows.get("fp32", {}).get("activation_bytes")
  for row in rows.values():
    if full and "activation_bytes" in row:
      row["activation_ratio"] = row["activation_bytes"] / full


def _quartiles(values: list[float]) -> tuple[float, float]:
  if len(values) < 2:
    return values[0], values[0]
  low, _, high = statistics.quantiles(values, n=4, method="inclusive")
  return low, high


def speed(model: dict[str, Any], row: str, other: str) -> float | None:
  """How many times as fast as another a row is; `None` if one of them has not been measured."""
  both = [model["rows"].get(name, {}) for name in (row, other)]
  if not all(r.get("rounds_s") for r in both):
    return None
  return statistics.median(paired(both[1], both[0]))


def targets(report: dict[str, Any]) -> list[dict[str, Any]]:
  """The targets: what is asked, the figure, whether it is met (`None`: not measured)."""
  models = report["models"]
  small, large = models.get("gpt-124m"), models.get("gpt-1b")
  found = []

  def add(asked: str, figures: dict[str, float], least: float, form: str, most: bool = False) -> None:
    worst = (max if most else min)(figures.values()) if figures else None
    met = None if worst is None else worst <= least if most else worst >= least
    text = "; ".join(f"{name} {figure:{form}}" for name, figure in figures.items())
    found.append({"asked": asked, "figure": worst, "figures": text or "not measured", "met": met})

  def speeds(pairs: dict[str, tuple[Any, str, str]]) -> dict[str, float]:
    known = {name: speed(model, row, other) for name, (model, row, other) in pairs.items() if model}
    return {name: ratio for name, ratio in known.items() if ratio is not None}

  add("bf16 at least 3x fp32, GPT-124M", speeds({"bf16": (small, "bf16", "fp32")}), LEAST_BF16, ".2f")
  shares = {
    f"{model['title']}, {row}": model["rows"][row]["share_of_peak"]
    for model in models.values()
    for row in (FUSED, "bf16")
    if "share_of_peak" in model["rows"].get(row, {})
  }
  best = max(shares, key=shares.__getitem__, default="")
  add(
    "at least 50% of the bf16 peak, largest share", {best: shares[best]} if best else {}, LEAST_SHARE, ".1%"
  )
  eight = speeds({row: (large, row, "bf16") for row in ("fp8, current", "fp8, delayed")})
  best = max(eight, key=eight.__getitem__, default="")
  add("fp8 at least 1.25x bf16, GPT-1B", {best: eight[best]} if best else {}, LEAST_FP8, ".2f")
  beside = {}
  for model in models.values():
    ours = [row for row in (FUSED, "bf16") if model["rows"].get(row, {}).get("rounds_s")]
    fastest = min(ours, key=lambda row: model["rows"][row]["seconds"], default="bf16")
    beside[f"{model['title']}, {fastest}"] = (model, fastest, "torch, bf16")
    beside[f"{model['title']}, fp16"] = (model, "fp16", "torch, fp16")
  add("at least as fast as torch, autocast + compile", speeds(beside), 1.0, ".2f")
  memory = {
    f"{model['title']}, {row}": model["rows"][row]["activation_ratio"]
    for model in models.values()
    for row in ("bf16", "fp16")
    if "activation_ratio" in model["rows"].get(row, {})
  }
  add("activations at most 0.55x of fp32's", memory, MOST_ACTIVATIONS, ".3f", most=True)
  return found


def verdict(target: dict[str, Any]) -> str:
  """In a word or two."""
  return {True: "met", False: "missed", None: "not measured"}[target["met"]]


def target_lines(report: dict[str, Any]) -> list[str]:
  """The targets as they are printed."""
  tiny = " (sizes and a device that say nothing about them)" if report["size"] == "tiny" else ""
  lines = [f"targets{tiny}:"]
  return lines + [f"  {t['asked']}: {verdict(t)}: {t['figures']}" for t in report["targets"]]


def lines(model: dict[str, Any]) -> list[str]:
  """The table of a model as it is printed."""
  titles = ("ms", "ratio", f"{model['unit']}/s", "peak %", "peak GB", "act. GB", "ratio")
  out = [f"{model['title']:28}" + "".join(f"{title:>11}" for title in titles)]
  for name, row in model["rows"].items():
    if "seconds" not in row:
      out.append(f"  {name:26} {_reason(row)}")
      continue
    cells = [
      _cell(row, key, form, times)
      for key, form, times in (
        ("seconds", ".2f", 1e3),
        ("ratio", ".3f", 1),
        ("units_per_s", ".0f", 1),
        ("share_of_peak", ".1f", 100),
        ("peak_bytes", ".2f", 1e-9),
        ("activation_bytes", ".2f", 1e-9),
        ("activation_ratio", ".3f", 1),
      )
    ]
    out.append(f"  {name:26}" + "".join(f"{cell:>11}" for cell in cells))
  return out


def _cell(row: dict[str, Any], key: str, form: str, times: float) -> str:
  return f"{row[key] * times:{form}}" if row.get(key) is not None else "-"


def _reason(row: dict[str, Any]) -> str:
  return str(row.get("error") or row.get("skipped") or "not measured")


def tables(report: dict[str, Any]) -> str:
  """Markdown: the peaks, a table a model, the targets, what was not measured, and where all this is from."""
  parts = []
  if report.get("peaks"):
    peaks = [f"| {name} | {flops / 1e12:.0f} |" for name, flops in report["peaks"].items()]
    parts.append("\n".join(["| large square products | TFLOP/s |", "|---|---|", *peaks]))
  for model in report["models"].values():
    length = f" of {model['seq']} tokens" if "seq" in model else " images"
    parts += [f"**{model['title']}**, batch {model['batch']}{length}:", "\n".join(_table(model))]
  lines = ["| target | measured | |", "|---|---|---|"]
  lines += [f"| {t['asked']} | {t['figures']} | {verdict(t)} |" for t in report.get("targets", ())]
  parts.append("\n".join(lines))
  missing = [
    f"{model['title']}, {name}: {_reason(row)}"
    for model in report["models"].values()
    for name, row in model["rows"].items()
    if "seconds" not in row
  ]
  if missing:
    parts.append("Not measured: " + "; ".join(missing) + ".")
  versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
  return "\n\n".join([*parts, f"`{report['command']}` on {report['device']}; {versions}."])


def _table(model: dict[str, Any]) -> list[str]:
  lines = [
    f"| step | ms (quartiles) | of hand-written bf16 | {model['unit']}/s | of peak | peak GB | "
    "activations GB | of fp32's |",
    "|---|---|---|---|---|---|---|---|",
  ]
  for name, row in model["rows"].items():
    if "seconds" in row:
      spread = f"{row['q25'] * 1e3:.1f} to {row['q75'] * 1e3:.1f}"
      cells = [
        name,
        f"{row['seconds'] * 1e3:.1f} ({spread})",
        _cell(row, "ratio", ".3f", 1),
        _cell(row, "units_per_s", ".0f", 1),
        _cell(row, "share_of_peak", ".0f", 100) + "%",
        _cell(row, "peak_bytes", ".1f", 1e-9),
        _cell(row, "activation_bytes", ".1f", 1e-9),
        _cell(row, "activation_ratio", ".2f", 1),
      ]
      lines.append("| " + " | ".join(cells).replace("-%", "-") + " |")
  return lines


@picture_style()
def pictures(report: dict[str, Any]) -> dict[str, Any]:
  """`gpu_step_time` (over the hand-written step's) and `gpu_share_of_peak`: bars by row, a panel a model."""
  return {
    "gpu_step_time": _bars(
      report, "ratio", 1, "Time of a step over that of the hand-written bf16 one (grey: not mpjax)", 1.0
    ),
    "gpu_share_of_peak": _bars(
      report, "share_of_peak", 100, "Share of the measured matrix peak, % (grey: not mpjax)", None
    ),
  }


def _bars(report: dict[str, Any], key: str, times: float, heading: str, line: float | None) -> Any:
  models = {
    model["title"]: {name: row for name, row in model["rows"].items() if row.get(key) is not None}
    for model in report["models"].values()
  }
  models = {title: rows for title, rows in models.items() if rows}
  down = -(-len(models) // 2)
  clear = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}  # of the line
  figure = new_figure(3.2 * max(down, 1), heading)
  for i, (title, rows) in enumerate(models.items()):
    axes = figure.add_subplot(down, min(2, len(models)), i + 1)
    order = sorted(rows, key=lambda name: rows[name][key], reverse=line is not None)
    values = [rows[name][key] * times for name in order]
    bars = axes.barh(order, values, color=[policy_colour(name) for name in order])  # others than mpjax: grey
    if line is not None:
      low = [max(0.0, rows[name][key] - rows[name]["ratio_q25"]) for name in order]
      high = [max(0.0, rows[name]["ratio_q75"] - rows[name][key]) for name in order]
      axes.errorbar(values, order, xerr=[low, high], fmt="none", ecolor=BLACK, elinewidth=1, capsize=2)
      draw_limit(axes, line)
    axes.bar_label(bars, fmt="%.2f" if line is not None else "%.0f", padding=5, fontsize=SMALL, bbox=clear)
    axes.margins(x=0.15)
    axes.set_title(title)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
  return figure
