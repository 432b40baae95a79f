"""Plans as a picture for a report: memory by part, as stacked bars."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

import numpy as np

from mpjax._render.picture_style import (
  ALARM,
  BLUES,
  GREY,
  LIGHT,
  SMALL,
  VERMILLIONS,
  new_figure,
  picture_style,
  save_figure,
)
from mpjax._render.plain_text import bytes_text, prefixed_unit
from mpjax.planner._report import Plan
from mpjax.planner._results import ARGUMENT_PARTS, TRANSIENT_PARTS

# Blues stay, oranges come and go.
COLORS = dict(zip((*ARGUMENT_PARTS, *TRANSIENT_PARTS), (*BLUES, *VERMILLIONS, LIGHT), strict=True))

_SLIVER = 0.01  # parts below this share of the longest bar are drawn as one
_REST = "smaller parts"
_NAME, _TITLE_WIDTH = 24, 72  # letters
_FAR = 2  # a line at more than this many times the longest bar is left out: bars would be too short


@picture_style("plan")
def save_picture(plans: Sequence[Plan], path: str | os.PathLike[str]) -> None:
  """Draws memory by part, and a second bar of each plan that is compiled.

  Args:
    plans: at least one plan.
    path: path of the file; its name ends in `.png` or `.svg`.

  Raises:
    ValueError: if the file's name has another ending, or there is nothing to draw.
    ImportError: without matplotlib.
  """
  if not plans:
    raise ValueError("no plans to draw: expected at least one")
  bars = []
  for plan in plans:
    bars.append((f"{plan.label}, analytic", plan.memory.parts, plan.memory.peak, plan.room))
    if plan.compiled:
      bars.append((f"{plan.label}, compiled", plan.compiled.memory.parts, plan.compiled.peak, plan.room))
  longest = max(max(peak, sum(parts.values())) for _, parts, peak, _ in bars)
  scale, unit = prefixed_unit(longest, "B")
  shown = {name for _, parts, _, _ in bars for name, size in parts.items() if size >= _SLIVER * longest}
  limits = {plan.device_memory: ("-", "device memory") for plan in plans}
  limits |= {plan.room: ("--", "JAX takes") for plan in plans if plan.room < plan.device_memory}
  figure = new_figure(max(2.6, 1.2 + 0.36 * len(bars), 0.7 + 0.19 * (len(shown) + 3)), _title(plans))
  axes = figure.add_subplot()
  left = np.zeros(len(bars))
  for name, color in {**COLORS, _REST: GREY}.items():
    stands_for = COLORS.keys() - shown if name == _REST else shown & {name}
    sizes = np.array([sum(parts.get(part, 0) for part in stands_for) / scale for _, parts, _, _ in bars])
    if any(sizes):
      axes.barh(
        range(len(bars)), sizes, 0.8, left=left, color=color, edgecolor="white", linewidth=0.6, label=name
      )
    left = left + sizes
  limits = {size: style for size, style in limits.items() if 0 < size <= _FAR * longest}
  for size, (style, what) in limits.items():
    axes.axvline(
      size / scale, color="black", linestyle=style, linewidth=1.1, label=f"{what}\n{bytes_text(size)}"
    )
  right = max(longest, *limits, 1) / scale
  for i, (_, _, peak, room) in enumerate(bars):  # in a column that no line crosses
    over = 0 < room < peak
    text = f"{bytes_text(peak)}{chr(10) + 'does not fit' if over else ''}"
    axes.text(1.03 * right, i, text, fontsize=SMALL, va="center", color=ALARM if over else "black")
  axes.set_xlim(0, 1.02 * right)
  axes.set_ylim(len(bars) - 0.5, -0.5)
  axes.set_yticks(range(len(bars)), [textwrap.fill(name, _NAME) for name, *_ in bars])
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(f"{unit} on one device")
  figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
  save_figure(figure, path)


def _title(plans: Sequence[Plan]) -> str:
  """Returns two lines: what is trained, and the device."""
  subjects = "; ".join(dict.fromkeys(plan.subject for plan in plans if plan.subject)) or "a training step"
  where = ", ".join(dict.fromkeys(plan.target for plan in plans))
  devices = dict.fromkeys((plan.device, plan.devices) for plan in plans)
  if len(devices) == 1:
    [(device, count)] = devices
    where = where if where == device else f"{where}, {device}"
    where += f", each of {count} devices" if count > 1 else ""
  lines = (f"Memory of {subjects}", where)
  return "\n".join(textwrap.fill(line, _TITLE_WIDTH) for line in lines)
