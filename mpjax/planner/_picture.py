"""Plans as a picture for a report: memory by part, as stacked bars."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

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


@picture_style()
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
    bars.append((f"{plan.label}, analytic", plan.memory.parts, plan.room))
    if plan.compiled:
      bars.append((f"{plan.label}, compiled", plan.compiled.memory.parts, plan.room))
  longest = max(sum(parts.values()) for _, parts, _ in bars)
  scale, unit = prefixed_unit(longest, "B")
  shown = [n for n in COLORS if any(parts.get(n, 0) >= _SLIVER * longest for _, parts, _ in bars)]
  figure = new_figure(max(2.6, 1.2 + 0.36 * len(bars), 0.7 + 0.19 * (len(shown) + 3)), _title(plans))
  axes = figure.add_subplot()
  limits = {room for _, _, room in bars if 0 < room <= _FAR * longest}
  right = max(longest, *limits, 1) / scale
  for row, (_, parts, room) in enumerate(bars):
    left = 0.0
    drawn = {name: parts.get(name, 0) / scale for name in shown}
    drawn[_REST] = sum(size for name, size in parts.items() if name not in shown) / scale
    for name, size in drawn.items():
      label, color = "" if row else name, COLORS.get(name, GREY)
      axes.barh(row, size, 0.8, left=left, color=color, edgecolor="white", linewidth=0.6, label=label)
      left += size
    over = 0 < room < left * scale
    text = f"{bytes_text(left * scale)}{chr(10) + 'does not fit' if over else ''}"
    # In a column that no line crosses.
    axes.text(1.03 * right, row, text, fontsize=SMALL, va="center", color=ALARM if over else "black")
  for room in limits:
    axes.axvline(room / scale, color="black", linewidth=1.1, label=f"memory for JAX\n{bytes_text(room)}")
  axes.set_xlim(0, 1.02 * right)
  axes.set_ylim(len(bars) - 0.5, -0.5)
  axes.set_yticks(range(len(bars)), [textwrap.fill(name, _NAME) for name, *_ in bars])
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(f"{unit} on one device")
  figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")
  save_figure(figure, path)


def _title(plans: Sequence[Plan]) -> str:
  """Returns two lines: what is trained, and the device."""
  subjects = dict.fromkeys(plan.subject for plan in plans if plan.subject)
  where = dict.fromkeys(f"{plan.target}, {plan.device}, {plan.devices} devices" for plan in plans)
  lines = (f"Memory of {'; '.join(subjects) or 'a training step'}", "; ".join(where))
  return "\n".join(textwrap.fill(line, _TITLE_WIDTH) for line in lines)
