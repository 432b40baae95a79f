"""Plans as a picture for a report: memory by part, as stacked bars beside what the device has."""

from __future__ import annotations

import os
import pathlib
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpjax._plain_text import bytes_text
from mpjax.planner._results import ARGUMENT_PARTS, TRANSIENT_PARTS, PlanFigures

if TYPE_CHECKING:
  from matplotlib.axes import Axes

_GB = 1e9

# Blues stay, oranges come and go; in each family from dark to light, so that neighbours differ in print and
# for every kind of colour vision.
_BLUES = ("#08306b", "#1c5aa5", "#3f8fc5", "#7ab6d9", "#abd0e6", "#d6e6f4")
_ORANGES = ("#6b2503", "#a63b03", "#dc5a0c", "#f98a3c", "#fdb678", "#fedfc0")
COLORS = dict(zip((*ARGUMENT_PARTS, *TRANSIENT_PARTS), (*_BLUES, *_ORANGES, "#c8c8c8"), strict=True))

_BAR, _PLAN = 0.3, 1.0  # height of a bar, and of what a plan takes, in units of the vertical axis
_FAR = 3  # a device with more than so many times the memory that is drawn would make the bars too short


def save_picture(plans: Sequence[PlanFigures], path: str | os.PathLike[str]) -> None:
  """Draws memory by part, a bar a plan and a second one where it is compiled.

  Args:
    plans: at least one.
    path: of the file, which ends in `.png` or `.svg`.

  Raises:
    ValueError: if the file's name has another ending, or there is nothing to draw.
    ImportError: without matplotlib.
  """
  suffix = pathlib.Path(path).suffix.lower()
  if suffix not in (".png", ".svg"):
    raise ValueError(f"picture {os.fspath(path)!r}: expected a name that ends in .png or .svg")
  if not plans:
    raise ValueError("no plans to draw: expected at least one")
  try:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
  except ImportError as error:
    raise ImportError('pictures need matplotlib: pip install "mpjax[plan]"') from error

  bars = [list(_bars(plan)) for plan in plans]
  heights = [_PLAN if len(of_plan) > 1 else _PLAN - _BAR for of_plan in bars]
  # Text stays text in an SVG, and the same plans give the same file.
  with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "mpjax"}):
    figure = Figure(figsize=(9, max(3.2, 1.4 + 0.95 * sum(heights))), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _draw(axes, plans, bars, heights)
    title = textwrap.fill(_title(plans), 90)
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize=9)
    figure.savefig(path, dpi=200, metadata={"Date": None} if suffix == ".svg" else None)


class _Bar(NamedTuple):
  name: str
  parts: dict[str, int]
  peak: int


def _bars(plan: PlanFigures) -> Iterator[_Bar]:
  yield _Bar("analytic", plan.memory.parts, plan.memory.peak)
  if plan.compiled:
    yield _Bar("compiled", plan.compiled.memory.parts, plan.compiled.peak)


def _draw(
  axes: Axes, plans: Sequence[PlanFigures], bars: Sequence[Sequence[_Bar]], heights: Sequence[float]
) -> None:
  longest = max(max(bar.peak, sum(bar.parts.values())) for of_plan in bars for bar in of_plan)
  near = [plan.device_memory for plan in plans if 0 < plan.device_memory <= _FAR * longest]
  right = max([longest, *near, 1]) / _GB
  axes.set_xlim(0, 1.16 * right)
  for name in COLORS:  # in the order of the legend
    if any(bar.parts.get(name) for of_plan in bars for bar in of_plan):
      axes.barh([0], [0], color=COLORS[name], edgecolor="0.4", linewidth=0.4, label=name)

  top, ticks = 0.0, []
  for plan, of_plan, height in zip(plans, bars, heights, strict=True):
    label = textwrap.shorten(plan.label, 90, placeholder=" ...")
    axes.text(0.004 * right, top + 0.16, label, fontsize=10, fontweight="bold", va="center")
    for i, bar in enumerate(of_plan):
      middle = top + 0.3 + (i + 0.5) * _BAR
      ticks.append((middle, bar.name))
      _draw_bar(axes, bar, middle, right, plan.device_memory)
    if plan.device_memory in near:
      memory = plan.device_memory / _GB
      axes.plot([memory, memory], [top, top + height], color="black", linestyle="--", linewidth=1.2)
    top += height
  if near:
    what = f"device memory\n{bytes_text(near[0])}" if len(set(near)) == 1 else "device memory"
    axes.plot([], [], color="black", linestyle="--", linewidth=1.2, label=what)

  axes.set_ylim(top, 0)
  axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks], fontsize=9)
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel("GB on one device (1 GB = 1e9 bytes)", fontsize=9)
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
  axes.spines[["top", "right"]].set_visible(False)


def _draw_bar(axes: Axes, bar: _Bar, middle: float, right: float, device_memory: int) -> None:
  left = 0.0
  for name in COLORS:
    size = bar.parts.get(name, 0) / _GB
    axes.barh(middle, size, 0.9 * _BAR, left=left, color=COLORS[name], edgecolor="white", linewidth=0.6)
    if size > 0.08 * right:  # wide enough for a number
      dark = name in (*ARGUMENT_PARTS[:3], *TRANSIENT_PARTS[:3])
      color = "white" if dark else "black"
      axes.text(left + size / 2, middle, f"{size:.3g}", color=color, fontsize=8, ha="center", va="center")
    left += size
  over = 0 < device_memory < bar.peak
  text = f"{bytes_text(bar.peak)}{', does not fit' if over else ''}"
  end = max(left, bar.peak / _GB) + 0.008 * right
  white = {"facecolor": "white", "edgecolor": "none", "pad": 0.8}
  style: dict[str, Any] = {"color": "#b00020", "fontweight": "bold"} if over else {"color": "black"}
  axes.text(end, middle, text, fontsize=9, va="center", bbox=white, zorder=3, **style)


def _title(plans: Sequence[PlanFigures]) -> str:
  devices = list(
    dict.fromkeys((plan.target, plan.device, plan.devices, plan.device_memory) for plan in plans)
  )
  if len(devices) > 1:
    return f"Memory of a training step on {', '.join(dict.fromkeys(plan.target for plan in plans))}"
  target, device, count, memory = devices[0]
  words = target if device == target else f"{target}: {device}"
  many = f", on each of {count} devices" if count > 1 else ""
  return f"Memory of a training step on {words}{f' ({bytes_text(memory)})' if memory else ''}{many}"
