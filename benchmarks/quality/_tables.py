"""The table and the picture of the quality suite, from its report alone."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any

from benchmarks._record import provenance
from mpjax._render.picture_style import GREY, PALE, SMALL, new_figure, picture_style, policy_colour

# Shares of the mean loss of what a policy is compared with.
BAR, BAR_OF_4_BITS = 0.01, 0.02


@dataclasses.dataclass(frozen=True)
class Row:
  """A policy on a task beside `base` with the same seeds; differences are shares of that one's mean loss."""

  policy: str
  base: str
  runs: list[dict[str, Any]]
  losses: list[float]
  differences: list[float]

  @property
  def mean(self) -> float:
    """Of the losses."""
    return statistics.fmean(self.losses)

  @property
  def difference(self) -> float:
    """Mean of the differences; NaN if a run diverged."""
    return statistics.fmean(self.differences)

  @property
  def error(self) -> float:
    """Standard error of `difference`; zero from a single seed."""
    if len(self.losses) < 2 or self.diverged:
      return 0.0
    return statistics.stdev(self.differences) / len(self.differences) ** 0.5

  @property
  def diverged(self) -> int:
    """Runs without a finite loss."""
    return sum(not math.isfinite(loss) for loss in self.losses)

  @property
  def verdict(self) -> str:
    """Against the bar: within one standard error or 1% (in 4 bits 2%), whichever is larger."""
    if self.diverged:
      return f"{self.diverged} of {len(self.losses)} diverged"
    if not math.isfinite(self.difference):
      return f"{self.base} diverged"
    if len(self.losses) < 2:
      return "one seed"
    if abs(self.difference) <= max(BAR_OF_4_BITS if self.policy == "nvfp4" else BAR, self.error):
      return "within"
    return "better" if self.difference < 0 else "worse"


def rows_of(report: dict[str, Any], task: str) -> list[Row]:
  """A row for each policy, of the seeds that its base has too."""
  runs = [run for run in report["runs"] if run["task"] == task]
  name = report["tasks"][task].get("base", "fp32")
  base = {run["seed"]: float(run["eval_loss"]) for run in runs if run["policy"] == name}
  rows = []
  for policy in report["policies"]:
    paired = [run for run in runs if run["policy"] == policy and run["seed"] in base]
    if paired:
      scale = statistics.fmean(base[run["seed"]] for run in paired)
      losses = [float(run["eval_loss"]) for run in paired]
      differences = [(float(run["eval_loss"]) - base[run["seed"]]) / scale for run in paired]
      rows.append(Row(policy, name, paired, losses, differences))
  return rows


def tables(report: dict[str, Any]) -> str:
  """Losses by task and policy, what float16 does to the gradients, and where the figures come from."""
  parts = []
  for task, about in report["tasks"].items():
    if rows := rows_of(report, task):
      settings = " ".join([about["config"], *about["overrides"]])
      steps = rows[0].runs[0]["steps"]
      parts += [
        f"{about['title']}, {steps} steps, evaluated on {about['evaluated']} (`{settings}`):",
        _losses(report, rows),
      ]
  if any("float16" in run for run in report["runs"]):
    parts += ["Activation gradients in float16 at the end of the fp16 run of seed 0:", _gradients(report)]
  parts += [f"Not run: {report['policies'][name]} ({why})." for name, why in report["left_out"].items()]
  return "\n\n".join([*parts, provenance(report)])


def _losses(report: dict[str, Any], rows: list[Row]) -> str:
  accuracy = "eval_accuracy" in rows[0].runs[0]
  heads = ["policy", "eval loss by seed", "mean", "difference", "standard error", "verdict", "skipped steps"]
  shares = "low_precision" in rows[0].runs[0]
  lines = [[*heads, *["accuracy"] * accuracy, *["FLOPs below 16 bits"] * shares]]
  lines.append(["---"] * len(lines[0]))
  for row in rows:
    cells = [report["policies"][row.policy], _by_seed(row.losses), f"{row.mean:.4f}"]
    same = row.policy == row.base
    error = f"{row.error:.2%}" if len(row.losses) > 1 else "-"
    cells += ["-"] * 3 if same else [f"{row.difference:+.2%}", error, row.verdict]
    skipped = [run["skipped_steps"] for run in row.runs]
    cells.append(" ".join(map(str, skipped)) if any(skipped) else "0")
    if accuracy:
      cells.append(f"{statistics.fmean(float(run.get('eval_accuracy', 'nan')) for run in row.runs):.2%}")
    if shares:
      cells.append(f"{row.runs[0]['low_precision']:.0%}")
    lines.append(cells)
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _by_seed(losses: list[float]) -> str:
  if len(losses) <= 3:
    return ", ".join(f"{loss:.4f}" for loss in losses)
  return f"{min(losses):.4f} to {max(losses):.4f} ({len(losses)} seeds)"


def _gradients(report: dict[str, Any]) -> str:
  heads = ["task", "zero at scale 1", "of the logits", "subnormal at scale 1", "loss scale", "zero at it"]
  lines = [[*heads, "subnormal at it"], ["---"] * (len(heads) + 1)]
  for run in report["runs"]:
    if "float16" in run:
      about = run["float16"]
      cells = [
        f"{about['unscaled']['underflow']:.1%}",
        f"{about['unscaled_logits']['underflow']:.1%}",
        f"{about['unscaled']['subnormal']:.1%}",
        f"2^{math.log2(about['loss_scale']):.0f}",
        f"{about['scaled']['underflow']:.2%}",
        f"{about['scaled']['subnormal']:.1%}",
      ]
      lines.append([report["tasks"][run["task"]]["title"], *cells])
  return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@picture_style()
def pictures(report: dict[str, Any]) -> dict[str, Any]:
  """A panel for each task: seeds as dots, the mean as a bar, relative to its base with the same seed."""
  shown = {task: [row for row in rows_of(report, task) if row.policy != row.base] for task in report["tasks"]}
  shown = {task: rows for task, rows in shown.items() if rows}
  if not shown:
    return {}
  across = min(2, len(shown))
  down = -(-len(shown) // across)
  most = max(map(len, shown.values()))
  height = (0.3 * most + 0.8) * down + 0.7
  figure = new_figure(height, "Evaluation loss against fp32 with the same seed")
  panels = figure.subplots(down, across, sharex="row", squeeze=False).ravel()
  for panel in panels[len(shown) :]:
    panel.set_visible(False)
  for panel, (task, rows) in zip(panels, shown.items(), strict=False):
    panel.axvspan(-100 * BAR, 100 * BAR, color=PALE, linewidth=0)
    panel.axvline(0, color=GREY, linewidth=1)
    names = [policy for policy in report["policies"] if policy in {row.policy for row in rows}]
    for row in rows:
      _draw(panel, row, names.index(row.policy))
    panel.set_title(report["tasks"][task]["title"])
    panel.set_yticks(range(len(names)), [report["policies"][name] for name in names])
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.tick_params(axis="x", labelbottom=True)
    panel.grid(axis="x")
  figure.supxlabel("difference, % (dots: seeds; bar: mean; grey: within 1%)", fontsize=SMALL)
  return {"quality": figure}


def _draw(panel: Any, row: Row, y: int) -> None:
  finite = [100 * difference for difference in row.differences if math.isfinite(difference)]
  colour = policy_colour(row.policy)
  panel.plot(finite, [y] * len(finite), "o", color=colour, alpha=0.6, markeredgewidth=0)
  if finite:
    panel.plot([statistics.fmean(finite)] * 2, [y - 0.33, y + 0.33], color=colour, linewidth=2.5)
  if row.diverged:
    at = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "center", "fontsize": SMALL}
    panel.annotate(f"{row.diverged} diverged", (1, y), **at)
