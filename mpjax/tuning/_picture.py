"""The picture of a search: cost and error of every policy that was tried."""

from __future__ import annotations

import math
import os
import textwrap
from collections.abc import Sequence
from typing import Any

from mpjax._render.picture_style import (
  BLACK,
  GREY,
  LIGHT,
  SKY,
  draw_limit,
  new_figure,
  picture_style,
  policy_colour,
  save_figure,
)
from mpjax._render.plain_text import prefixed_unit
from mpjax.tuning._trials import Trial

# Marker, colour and size of kinds without a policy's colour; later ones are drawn over earlier ones.
_KINDS = {
  "module": ("o", LIGHT, 5),
  "recompute": ("P", GREY, 7),
  "option": ("X", GREY, 7),
  "mixed": ("D", SKY, 6),
}
_MARKERS = "os^vDP"  # of presets and candidates in turn
_TITLE_WIDTH = 72  # letters, next to the legend


def save_picture(
  path: str | os.PathLike[str],
  table: Sequence[Trial],
  front: Sequence[Trial],
  chosen: Trial,
  *,
  objective: str,
  target: str,
  tolerance: float,
) -> None:
  """Writes a scatter of cost and error with the tolerance, and the front as a line.

  Names are in a legend, because points of similar policies overlap.

  Raises:
    ValueError: if the file's name does not end in `.png` or `.svg`.
    ImportError: without matplotlib.
  """
  by_time = objective == "time" and chosen.cost.seconds is not None
  finite = [t for t in table if math.isfinite(t.error.total)]
  least = min((t.error.total for t in finite if t.error.total), default=1e-6) / 3

  # As in the table: the unit of the most expensive policy, and errors in per cent.
  scale, unit = prefixed_unit(max(t.cost.figures(objective)[0] for t in table), "s" if by_time else "B")

  def places(trials: Sequence[Trial]) -> tuple[list[float], list[float]]:
    costs = [trial.cost.figures(objective)[0] / scale for trial in trials]
    return costs, [100 * max(trial.error.total, least) for trial in trials]

  with picture_style():
    from matplotlib.ticker import LogLocator, NullFormatter

    heading = textwrap.wrap(f"Cost and error on {target}; chosen: {chosen.label}", _TITLE_WIDTH)
    figure = new_figure(4.6, "\n".join(heading))
    axes = figure.add_subplot()
    axes.plot(*places(front), color=GREY, linewidth=1, label="front", zorder=1)
    for kind, (marker, colour, size) in _KINDS.items():
      some = [t for t in finite if t.kind == kind]
      if some:
        style: dict[str, Any] = {
          "color": colour,
          "markersize": size,
          "markeredgecolor": "white",
          "markeredgewidth": 0.5,
        }
        axes.plot(*places(some), marker, label=kind, **style)
    named = [t for t in finite if t.kind in ("preset", "candidate")]
    for i, trial in enumerate(named):
      label = textwrap.shorten(trial.label, 30, placeholder=" ...")
      label += ", error 0" if trial.error.total == 0 else ""
      marker = _MARKERS[i % len(_MARKERS)]
      axes.plot(*places([trial]), marker, color=policy_colour(trial.label), markersize=7, label=label)
    if math.isfinite(chosen.error.total):
      ring: dict[str, Any] = {"markersize": 12, "markerfacecolor": "none", "markeredgewidth": 1.2}
      axes.plot(*places([chosen]), "o", color=BLACK, label="chosen", **ring)
    draw_limit(axes, 100 * tolerance, "y", label="tolerance")
    axes.set_yscale("log")
    axes.set_xlabel(f"{'time' if by_time else 'peak memory'} on {target}, {unit}")
    axes.set_ylabel("error of the gradient against float32, %")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid()
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    save_figure(figure, path)
