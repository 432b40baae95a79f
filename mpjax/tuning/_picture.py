"""The picture of a search: cost and error of every policy that was tried."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

from mpjax.tuning._trials import Trial

_COLOURS = {
  "preset": "#1f77b4",
  "candidate": "#1f77b4",
  "module": "#bbbbbb",
  "mixed": "#2ca02c",
  "option": "#9467bd",
  "recompute": "#9467bd",
}


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
  """Writes a scatter of cost and error with the tolerance, and the front as a line."""
  import matplotlib

  matplotlib.use("Agg")
  import matplotlib.pyplot as plt

  by_time = objective == "time" and chosen.cost.seconds is not None
  unit = 1e3 if by_time else 1e-6
  cost = lambda trial: trial.cost.figures(objective)[0] * unit
  finite = [t for t in table if math.isfinite(t.error.total)]
  least = min((t.error.total for t in finite if t.error.total), default=1e-6) / 3
  figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
  for kind, colour in _COLOURS.items():
    some = [t for t in finite if t.kind == kind]
    if some:
      axes.scatter([cost(t) for t in some], [max(t.error.total, least) for t in some], c=colour, label=kind)
  axes.plot([cost(t) for t in front], [max(t.error.total, least) for t in front], c="#888888", lw=1)
  for trial in finite:
    if trial.kind in ("preset", "candidate") or trial == chosen:
      axes.annotate(trial.label, (cost(trial), max(trial.error.total, least)), fontsize=8)
  axes.axhline(tolerance, c="#d62728", ls="--", lw=1, label="tolerance")
  axes.set_yscale("log")
  axes.set_xlabel(f"time floor on {target}, ms" if by_time else f"peak memory on {target}, MB")
  axes.set_ylabel("error of the gradient against float32")
  axes.legend(fontsize=8)
  figure.savefig(path)
  plt.close(figure)
