"""The estimated times of plans as stacked bars: by kind of work, and by module."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpjax._render.picture_style import BLUES, LIGHT, PALE, SMALL, VERMILLIONS, shades
from mpjax._render.plain_text import prefixed_unit, with_prefix
from mpjax.planner._results import TIME_PARTS, PlanFigures

if TYPE_CHECKING:
  from matplotlib.figure import FigureBase

# Blues multiply, oranges move or pass over values.
TIME_COLORS = dict(zip(TIME_PARTS, (*BLUES[:3], *VERMILLIONS[2:5], LIGHT), strict=True))

_MOST_MODULES = 8
_NAME, _LABEL = 34, 22  # letters of a module's name, and of a plan's
_REST = "other modules"


class Stacks(NamedTuple):
  """Stacked bars of seconds.

  Attributes:
    title: the title.
    colors: a colour for each part, in the order of the stacks.
    rows: for each bar its label, seconds by part, and the least possible seconds; 0 if not known.
    origin: where the seconds are from.
  """

  title: str
  colors: dict[str, str]
  rows: Sequence[tuple[str, Mapping[str, float], float]]
  origin: str

  @property
  def height(self) -> float:
    """Returns its height in inches."""
    return max(0.9 + 0.36 * len(self.rows), 0.7 + 0.19 * len(self.colors))


def by_part(plans: Sequence[PlanFigures]) -> Stacks:
  """Returns the times of plans by kind of work."""
  rows = [(p.label, p.time.parts, p.floor.seconds if p.floor else 0.0) for p in plans if p.time]
  colors = {name: color for name, color in TIME_COLORS.items() if any(name in parts for _, parts, _ in rows)}
  return Stacks("time of a step by kind of work", colors, rows, _origins(plans))


def by_module(plans: Sequence[PlanFigures]) -> Stacks:
  """Returns the times of plans by module: the modules that take the most time, and the others together."""
  total: Counter[str] = Counter()
  for plan in plans:
    total.update(plan.time.modules if plan.time else {})
  shown = [name for name, _ in total.most_common(_MOST_MODULES) if name]
  rows = []
  for plan in plans:
    if plan.time:
      parts = {name: plan.time.modules.get(name, 0.0) for name in shown}
      rows.append((plan.label, parts | {_REST: max(0.0, plan.time.seconds - sum(parts.values()))}, 0.0))
  colors = dict(zip(shown, shades(len(shown)), strict=True)) | {_REST: PALE}
  return Stacks("time of a step by module", colors, rows if shown else [], "")


def draw_stacks(figure: FigureBase, stacks: Stacks) -> None:
  """Draws stacked bars, with a legend and the sum of each."""
  axes = figure.add_subplot()
  longest = max(max(sum(parts.values()), least) for _, parts, least in stacks.rows) or 1.0
  scale, unit = prefixed_unit(longest, "s")
  for name, color in stacks.colors.items():
    label = textwrap.shorten(name, _NAME, placeholder="...") if " " in name else name[-_NAME:]
    axes.barh([0], [0], color=color, edgecolor="0.4", linewidth=0.4, label=label)
  for i, (_, parts, least) in enumerate(stacks.rows):
    left = 0.0
    for name, color in stacks.colors.items():
      size = parts.get(name, 0.0) / scale
      axes.barh(i, size, 0.7, left=left, color=color, edgecolor="white", linewidth=0.6)
      left += size
    if least:
      axes.plot([least / scale] * 2, [i - 0.45, i + 0.45], color="black", linestyle="--", linewidth=1.1)
    total = with_prefix(sum(parts.values()), "s")
    axes.text(1.03 * longest / scale, i, total, fontsize=SMALL, va="center")
  if any(least for _, _, least in stacks.rows):
    axes.plot([], [], color="black", linestyle="--", linewidth=1.1, label="no step is faster")
  axes.set_xlim(0, 1.02 * longest / scale)
  axes.set_ylim(len(stacks.rows) - 0.5, -0.5)
  labels = [textwrap.shorten(label, _LABEL, placeholder=" ...") for label, _, _ in stacks.rows]
  axes.set_yticks(range(len(labels)), labels)
  axes.tick_params(axis="y", length=0)
  axes.set_title(stacks.title)
  axes.set_xlabel(f"{unit}{stacks.origin}")
  figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper")


def _origins(plans: Sequence[PlanFigures]) -> str:
  found = dict.fromkeys(plan.time.source for plan in plans if plan.time)
  return f", an estimate by the {' or the '.join(found)}" if found else ""
