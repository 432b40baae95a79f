"""The style of pictures: colours, fonts and sizes, independent of any matplotlibrc."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Okabe and Ito's colours, which every kind of colour vision can tell apart.
BLACK, BLUE, GREY = "#000000", "#0072B2", "#A0A0A0"

WIDTH = 9.0  # inches, the same for every picture, so that text has one size on a page
_DPI = 200
HEADING, TEXT, SMALL = 12, 10, 9  # points

_STYLE = {
  "font.size": TEXT,
  "figure.titlesize": HEADING,
  "figure.titleweight": "bold",
  "axes.titlesize": TEXT,
  "axes.titlelocation": "left",
  "axes.labelsize": SMALL,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "xtick.labelsize": SMALL,
  "ytick.labelsize": SMALL,
  "legend.fontsize": SMALL,
  "legend.frameon": False,
  # Keeps text as text in an SVG, and gives the same picture the same bytes.
  "svg.fonttype": "none",
  "svg.hashsalt": "mpjax",
}


@contextlib.contextmanager
def picture_style() -> Iterator[None]:
  """Applies the style inside its `with` block, or to a function that it decorates."""
  from matplotlib import style

  with style.context(["default", _STYLE]):
    yield


def new_figure(height: float, heading: str = "") -> Figure:
  """Returns an empty figure that does not belong to pyplot; `height` is in inches."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(WIDTH, height), layout="constrained")
  if heading:
    figure.suptitle(heading, x=0.01, ha="left")
  return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure as PNG; equal figures give equal files."""
  with picture_style():
    figure.savefig(path, dpi=_DPI, metadata={"Software": None})
