"""The style of all pictures: colours, fonts and sizes, independent of any matplotlibrc."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from mpjax._render.plain_text import pip_install

if TYPE_CHECKING:
  from matplotlib.figure import Figure

# Okabe and Ito's colours, which every kind of colour vision can tell apart.
BLACK, BLUE, VERMILLION = "#000000", "#0072B2", "#D55E00"
GREY, LIGHT = "#A0A0A0", "#C8C8C8"
ALARM = "#B00020"  # for words only

# From dark to light, so that neighbours also differ in print.
BLUES = ("#003553", BLUE, "#3E95C9", "#7AB6D9", "#ABD0E6", "#D6E6F4")
VERMILLIONS = ("#632C00", "#9C4500", VERMILLION, "#F18A3E", "#FAB57C", "#FDDDC1")

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
  """Applies the style inside its `with` block, or to a function that it decorates.

  Raises:
    ImportError: if matplotlib is not installed.
  """
  try:
    from matplotlib import style
  except ImportError as error:
    raise ImportError(f"pictures need matplotlib: {pip_install('plan')}") from error
  with style.context(["default", _STYLE]):
    yield


def new_figure(height: float, heading: str = "") -> Figure:
  """Returns an empty figure that does not belong to pyplot; `height` is in inches."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(WIDTH, height), layout="constrained")
  if heading:
    figure.suptitle(heading, x=0.01, ha="left")
  return figure


def require_picture(path: str | os.PathLike[str]) -> str:
  """Returns the ending of a picture's name.

  Raises:
    ValueError: if it is neither `.png` nor `.svg`.
  """
  suffix = pathlib.Path(path).suffix.lower()
  if suffix not in (".png", ".svg"):
    raise ValueError(f"picture {os.fspath(path)!r}: expected a name that ends in .png or .svg")
  return suffix


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> None:
  """Writes a figure; equal figures give equal files.

  Raises:
    ValueError: if the name does not end in `.png` or `.svg`.
  """
  suffix = require_picture(path)
  metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
  with picture_style():
    figure.savefig(path, dpi=_DPI, metadata=metadata)
