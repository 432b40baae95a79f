"""Plans as a picture for a report: memory and time by part, and time by module, as stacked bars."""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

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
from mpjax.planner._results import ARGUMENT_PARTS, TRANSIENT_PARTS, PlanFigures
from mpjax.planner.render._time_picture import by_module, by_part, draw_stacks

if TYPE_CHECKING:
  from matplotlib.axes import Axes

# Blues stay, oranges come and go.
COLORS = dict(zip((*ARGUMENT_PARTS, *TRANSIENT_PARTS), (*BLUES, *VERMILLIONS, LIGHT), strict=True))

_BAR, _PLAN = 0.3, 1.0  # heights of a bar and of a plan, in units of the vertical axis
_SLIVER = 0.01  # parts below this share of the longest bar are drawn as one
_REST = "smaller parts"
_TITLE_WIDTH = 72  # letters, next to the legend
_FAR = 2  # a line at more than this many times the longest bar is left out: bars would be too short


@picture_style("plan")
def save_picture(plans: Sequence[PlanFigures], path: str | os.PathLike[str]) -> None:
  """Draws memory by part, a second bar if it is compiled, and the estimated time by part and by module.

  Args:
    plans: at least one plan.
    path: path of the file; its name ends in `.png` or `.svg`.

  Raises:
    ValueError: if the file's name has another ending, or there is nothing to draw.
    ImportError: without matplotlib.
  """
  if not plans:
    raise ValueError("no plans to draw: expected at least one")
  bars = _without_slivers([list(_bars(plan)) for plan in plans])
  heights = [_PLAN if len(of_plan) > 1 else _PLAN - _BAR for of_plan in bars]
  legend = len({name for of_plan in bars for bar in of_plan for name in bar.parts}) + 2
  memory = max(2.6, 0.95 + 0.95 * sum(heights), 0.7 + 0.19 * legend)
  times = [stacks for stacks in (by_part(plans), by_module(plans)) if stacks.rows]
  sizes = [memory, *(stacks.height for stacks in times)]
  figure = new_figure(sum(sizes), _title(plans))
  parts: Any = figure.subfigures(len(sizes), 1, height_ratios=sizes) if times else [figure]
  axes = parts[0].add_subplot()
  _draw(axes, plans, bars, heights)
  handles, labels = axes.get_legend_handles_labels()
  parts[0].legend(handles, labels, loc="outside right upper")
  for part, stacks in zip(parts[1:], times, strict=True):
    draw_stacks(part, stacks)
  save_figure(figure, path)


class _Bar(NamedTuple):
  name: str
  parts: dict[str, int]
  peak: int


def _bars(plan: PlanFigures) -> Iterator[_Bar]:
  yield _Bar("analytic", plan.memory.parts, plan.memory.peak)
  if plan.compiled:
    yield _Bar("compiled", plan.compiled.memory.parts, plan.compiled.peak)


def _without_slivers(bars: Sequence[Sequence[_Bar]]) -> list[list[_Bar]]:
  """Returns bars with visible parts: parts that are small in every bar become one."""
  parts = [bar.parts for of_plan in bars for bar in of_plan]
  least = _SLIVER * max(sum(sizes.values()) for sizes in parts)
  seen = {name for sizes in parts for name, size in sizes.items() if size >= least}

  def merged(bar: _Bar) -> _Bar:
    rest = sum(size for name, size in bar.parts.items() if name not in seen)
    kept = {name: size for name, size in bar.parts.items() if name in seen}
    return bar._replace(parts=kept | ({_REST: rest} if rest else {}))

  return [[merged(bar) for bar in of_plan] for of_plan in bars]


def _draw(
  axes: Axes, plans: Sequence[PlanFigures], bars: Sequence[Sequence[_Bar]], heights: Sequence[float]
) -> None:
  longest = max(max(bar.peak, sum(bar.parts.values())) for of_plan in bars for bar in of_plan)
  lines = {size for plan in plans for size in _limits(plan) if 0 < size <= _FAR * longest}
  scale, unit = prefixed_unit(longest, "B")
  right = max([longest, *lines, 1]) / scale
  axes.set_xlim(0, 1.02 * right)
  for name, color in _colors():  # in the order of the legend
    if any(bar.parts.get(name) for of_plan in bars for bar in of_plan):
      axes.barh([0], [0], color=color, edgecolor="0.4", linewidth=0.4, label=name)

  top, ticks = 0.0, []
  for plan, of_plan, height in zip(plans, bars, heights, strict=True):
    label = textwrap.shorten(plan.label, 90, placeholder=" ...")
    axes.text(0.004 * right, top + 0.16, label, fontweight="bold", va="center")
    for i, bar in enumerate(of_plan):
      middle = top + 0.3 + (i + 0.5) * _BAR
      ticks.append((middle, bar.name))
      _draw_bar(axes, bar, middle, right, scale, plan.room)
    for size, style in _limits(plan).items():
      if size in lines:
        axes.plot([size / scale] * 2, [top, top + height], color="black", linestyle=style, linewidth=1.1)
    top += height
  for style, what, size_of in (("--", "JAX takes", _taken), ("-", "device memory", _whole)):
    found = {size_of(plan) for plan in plans} & lines
    if found:
      text = f"{what}\n{bytes_text(*found)}" if len(found) == 1 else what
      axes.plot([], [], color="black", linestyle=style, linewidth=1.1, label=text)

  axes.set_ylim(top, 0)
  axes.set_yticks([at for at, _ in ticks], [name for _, name in ticks])
  axes.tick_params(axis="y", length=0)
  axes.set_xlabel(f"{unit} on one device (1 {unit} = {scale:g} bytes)".replace("e+0", "e"))
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _taken(plan: PlanFigures) -> int:
  """Returns what JAX takes of a device's memory if that is not all of it; else 0."""
  return plan.room if plan.room < plan.device_memory else 0


def _whole(plan: PlanFigures) -> int:
  return plan.device_memory


def _limits(plan: PlanFigures) -> dict[int, str]:
  """Returns the sizes at which lines are drawn, with the style of each."""
  return {_taken(plan): "--", _whole(plan): "-"}


def _colors() -> Iterator[tuple[str, str]]:
  yield from COLORS.items()
  yield _REST, GREY


def _draw_bar(axes: Axes, bar: _Bar, middle: float, right: float, scale: float, room: int) -> None:
  """Draws a bar, with its total in a separate column that no line crosses."""
  left = 0.0
  for name, color in _colors():
    size = bar.parts.get(name, 0) / scale
    axes.barh(middle, size, 0.9 * _BAR, left=left, color=color, edgecolor="white", linewidth=0.6)
    if size > 0.08 * right:  # wide enough for a number
      dark = name in (*ARGUMENT_PARTS[:3], *TRANSIENT_PARTS[:3], _REST)
      text = "white" if dark else "black"
      axes.text(left + size / 2, middle, f"{size:.3g}", color=text, fontsize=SMALL, ha="center", va="center")
    left += size
  over = 0 < room < bar.peak
  text = f"{bytes_text(bar.peak)}{chr(10) + 'does not fit' if over else ''}"
  style: dict[str, Any] = {"color": ALARM, "fontweight": "bold"} if over else {"color": "black"}
  axes.text(1.03 * right, middle, text, fontsize=SMALL, va="center", linespacing=0.95, **style)


def _title(plans: Sequence[PlanFigures]) -> str:
  """Returns two lines: what is trained, and the device."""
  subjects = "; ".join(dict.fromkeys(plan.subject for plan in plans if plan.subject)) or "a training step"
  devices = dict.fromkeys((plan.target, plan.device, plan.devices) for plan in plans)
  if len(devices) > 1:
    where = ", ".join(dict.fromkeys(plan.target for plan in plans))
  else:
    [(target, device, count)] = devices
    # A vendor's 141 GB are 150.75e9 bytes, which next to the axis looks like another size.
    name = re.sub(r" \d+ GB$", "", device)
    where = target if name == target else f"{target}, {name}"
    where += f", each of {count} devices" if count > 1 else ""
  what = "Memory and time" if any(plan.time for plan in plans) else "Memory"
  return textwrap.fill(f"{what} of {subjects}", _TITLE_WIDTH) + "\n" + textwrap.fill(where, _TITLE_WIDTH)
