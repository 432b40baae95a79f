"""The report as pictures for a page or a paper: magnitudes against the formats' ranges, error by module."""

from __future__ import annotations

import collections
import itertools
import math
import os
import pathlib
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpjax._render.picture_style import (
  BLUE,
  GREEN,
  GREY,
  ORANGE,
  PURPLE,
  SMALL,
  VERMILLION,
  draw_limit,
  new_figure,
  picture_style,
  save_figure,
)
from mpjax.formats import FORMATS
from mpjax.numerics._tensors import GRADIENTS, KINDS

if TYPE_CHECKING:
  from matplotlib.axes import Axes
  from matplotlib.figure import Figure

# The page has the same colours, in report.css.
_COLORS = {"lost": VERMILLION, "subnormal": ORANGE, "normal": BLUE, "overflow": PURPLE, "zero": GREY}
_SERIES = {
  "activation": ("o", BLUE),
  "activation gradient": ("s", VERMILLION),
  "weight gradient": ("^", GREEN),
}
_TITLE_WIDTH = 95  # letters
_LAYER = re.compile(r"\[(\d+)\]")  # of a scan, in the name of a module
_NAMES = {"lost": "becomes zero", "subnormal": "subnormal", "normal": "normal", "overflow": "overflows"}
_UPDATE_NAMES = {"lost": "leaves the weight as it is", "subnormal": "either", "normal": "changes the weight"}


@picture_style("numerics")
def save_pictures(report: Mapping[str, Any], directory: str | os.PathLike[str]) -> list[pathlib.Path]:
  """Draws a histogram for each kind of tensor, such as `histogram_activation_gradients.png`, and the errors.

  Gradients are drawn at scale 1 and at the run's loss scale. `error_by_module.png` is drawn if something was
  compared with float32.

  Args:
    report: the report from `NumericsReport.to_dict()`.
    directory: folder for the files; it is made if missing.

  Returns:
    The paths of the files, in the order of the kinds.

  Raises:
    ImportError: without matplotlib.
  """
  folder = pathlib.Path(directory)
  folder.mkdir(parents=True, exist_ok=True)
  paths = []

  def save(drawn: Figure, name: str) -> None:
    save_figure(drawn, folder / name)
    paths.append(folder / name)

  for kind in KINDS:
    tensors = [tensor for tensor in report["tensors"] if tensor["kind"] == kind]
    if tensors:
      scales = [1.0]
      if kind in GRADIENTS and float(report["loss_scale"]) != 1:
        scales.append(float(report["loss_scale"]))
      save(_histograms(report, tensors, scales), f"histogram_{kind.replace(' ', '_')}s.png")
  visits = _visits(report)
  if visits:
    save(_errors(report, visits), "error_by_module.png")
  return paths


class _Zone(NamedTuple):
  name: str
  low: float  # log2, as is `high`
  high: float


def _histograms(
  report: Mapping[str, Any], tensors: Sequence[Mapping[str, Any]], scales: Sequence[float]
) -> Figure:
  kind, formats = tensors[0]["kind"], report["formats"]
  updates = kind == "update"
  name = report["compute_dtype"] if report["compute_dtype"] in formats else next(iter(formats))
  zones = _update_zones(name) if updates else _zones(name)
  words = _UPDATE_NAMES if updates else _NAMES
  bins = np.asarray([report["bins"][0] - 1, *report["bins"]])
  total = sum(tensor["count"] for tensor in tensors) or 1
  shares = np.asarray([[tensor["below"], *tensor["counts"]] for tensor in tensors], np.float64).sum(0) / total

  there = bins[shares > 0] if shares.any() else np.asarray([-8])
  left = min(float(np.min(there)), -14 if updates else -28) - 1
  right = max(float(np.max(there)) + 1 + math.log2(max(scales)), 2 if updates else 22) + 1
  of = f": {report['title']}" if report["title"] else ""
  heading = textwrap.fill(f"{kind.capitalize()}s in {formats[name]['title']}{of}", _TITLE_WIDTH)
  figure = new_figure(1.9 + 2.5 * len(scales), heading)
  panels = figure.subplots(len(scales), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
  for axes, scale in zip(panels, scales, strict=True):
    axes.set(xlim=(left, right), ylim=(0, 1.25 * max(float(np.max(shares)), 1e-9)))
    _draw_zones(axes, zones, words)
    _draw_bars(axes, bins + math.log2(scale), shares, zones)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.set_ylabel("share of the values")
    found = {"zero already": sum(tensor["zero"] for tensor in tensors) / total}
    found |= {words[zone]: share for zone, share in _shares(tensors, name, scale).items()}
    text = ",  ".join(f"{word} {_percent(share)}" for word, share in found.items())
    at = (
      f"times the loss scale, {_power(scale)}:  "
      if scale != 1
      else "at scale 1:  "
      if len(scales) > 1
      else ""
    )
    axes.set_title(at + text, fontsize=SMALL)
  step = 8 if right - left > 30 else 4
  ticks = range(math.ceil(left / step) * step, int(right) + 1, step)
  panels[-1].set_xticks(ticks, [_power(2.0**tick) for tick in ticks])
  panels[-1].set_xlabel("|update / weight|" if updates else "magnitude")
  if not updates:
    _draw_ranges(panels[-1], formats, name)
  return figure


def _draw_zones(axes: Axes, zones: Sequence[_Zone], words: Mapping[str, str]) -> None:
  left, right = axes.get_xlim()
  for zone in zones:
    low, high = max(zone.low, left), min(zone.high, right)
    if low >= high:
      continue
    if zone.name != "normal":
      axes.axvspan(low, high, color=_COLORS[zone.name], alpha=0.1, linewidth=0)
    if low > left:
      draw_limit(axes, low, linewidth=0.9)
    word = words[zone.name]
    if high - low > 0.0095 * len(word) * (right - left):  # wide enough for its name
      axes.text(
        (low + high) / 2, 0.93, word, transform=axes.get_xaxis_transform(), fontsize=SMALL, ha="center"
      )


def _draw_bars(axes: Axes, edges: np.ndarray, shares: np.ndarray, zones: Sequence[_Zone]) -> None:
  left, right = axes.get_xlim()
  for zone in zones:
    starts, ends = np.clip(edges, zone.low, zone.high), np.clip(edges + 1, zone.low, zone.high)
    keep = (ends > starts) & (shares > 0) & (edges >= left) & (edges < right)
    color = _COLORS[zone.name]
    # Lost values are pale in a dark outline, so that the picture can be read without colour.
    style = {"alpha": 0.35, "edgecolor": color} if zone.name == "lost" else {"edgecolor": "white"}
    wide = (ends - starts)[keep]
    axes.bar(starts[keep], shares[keep], wide, align="edge", color=color, linewidth=0.6, **style)


def _draw_ranges(axes: Axes, formats: Mapping[str, Any], chosen: str) -> None:
  """Draws a line for each format under the axis: thick for normal numbers, thin for subnormal ones."""
  from matplotlib.transforms import blended_transform_factory, offset_copy

  left, right = axes.get_xlim()
  for row, (name, form) in enumerate(formats.items()):
    points: dict[str, Any] = {"fig": axes.figure, "y": -28 - 14 * row, "units": "points"}
    place = offset_copy(blended_transform_factory(axes.transData, axes.transAxes), **points)
    style: dict[str, Any] = {"transform": place, "clip_on": False, "solid_capstyle": "butt"}
    for zone in _zones(name)[1:3]:
      low, high = max(zone.low, left), min(zone.high, right)
      if low < high:
        width = 6 if zone.name == "normal" else 2
        axes.plot([low, high], [0, 0], color=_COLORS[zone.name], linewidth=width, **style)
    weight = "bold" if name == chosen else "normal"
    beside = offset_copy(axes.transAxes, **points)
    text: dict[str, Any] = {"fontsize": SMALL, "fontweight": weight, "ha": "right", "va": "center"}
    axes.text(-0.012, 0, form["title"], transform=beside, **text)
  axes.xaxis.labelpad = 8 + 14 * len(formats)


def _zones(name: str) -> list[_Zone]:
  form = FORMATS[name]
  top = math.log2(form.overflow_edge)
  end = round(top) if abs(top - round(top)) < 0.01 else top
  edges = [-math.inf, math.log2(form.underflow_edge), math.log2(form.smallest_normal), end, math.inf]
  return [_Zone(*zone) for zone in zip(_NAMES, edges[:-1], edges[1:], strict=True)]


def _update_zones(name: str) -> list[_Zone]:
  """Returns zones of |update / weight|: half a step of a weight is between a quarter and half an epsilon."""
  low = math.log2(FORMATS[name].epsilon) - 2
  return [
    _Zone("lost", -math.inf, low),
    _Zone("subnormal", low, low + 1),
    _Zone("normal", low + 1, math.inf),
  ]


def _shares(tensors: Sequence[Mapping[str, Any]], name: str, scale: float) -> dict[str, float]:
  """Returns the counted share of all values in each zone."""
  total = sum(tensor["count"] for tensor in tensors) or 1
  if tensors[0]["kind"] == "update":
    if any(name not in (tensor["lost"] or {}) for tensor in tensors):
      return {}
    there = [tensor["count"] - tensor["zero"] for tensor in tensors]  # `lost` is a share of these
    lost = sum(tensor["lost"][name] * count for tensor, count in zip(tensors, there, strict=True))
    return {"lost": lost / total, "normal": (sum(there) - lost) / total}
  key = "shares" if scale == 1 else "scaled_shares"
  of = lambda what: sum(float(tensor[key][name][what]) * tensor["count"] for tensor in tensors) / total
  found = {"lost": of("underflow"), "subnormal": of("subnormal"), "overflow": of("overflow")}
  rest = 1 - sum(found.values()) - sum(tensor["zero"] for tensor in tensors) / total
  return {zone: found.get(zone, max(0.0, rest)) for zone in _NAMES}


class _Visit(NamedTuple):
  """A visit of the program to a module, with the largest error of each kind; infinite for NaN."""

  module: str
  order: float
  errors: dict[str, float]
  name: str = ""  # name of the first tensor there, to tell several visits to one module apart


def _visits(report: Mapping[str, Any]) -> list[_Visit]:
  """Returns the visits to modules in program order; a module may have several."""
  tensors = [t for t in report["tensors"] if t["kind"] in _SERIES and t["error"] is not None]
  placed = [
    t for t in tensors if t["kind"] != "weight gradient"
  ]  # a weight's place in the tree is not a place in the program
  visits: list[_Visit] = []
  for tensor in _by_layer(sorted(placed, key=lambda t: t["order"])):
    if not visits or visits[-1].module != tensor["module"]:
      visits.append(_Visit(tensor["module"], tensor["order"], {}, tensor["name"]))
  for module in dict.fromkeys(t["module"] for t in tensors):
    if all(visit.module != module for visit in visits):
      visits.append(_Visit(module, math.inf, {}))
  for tensor in tensors:
    of_module = [visit for visit in visits if visit.module == tensor["module"]]
    before = [visit for visit in of_module if tensor in placed and visit.order <= tensor["order"]]
    errors = (before[-1] if before else of_module[0]).errors
    error = float(tensor["error"])
    errors[tensor["kind"]] = max(errors.get(tensor["kind"], 0.0), math.inf if math.isnan(error) else error)
  return visits


def _by_layer(tensors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
  """Returns the tensors with the layers of a scan one after the other; a scan's body is one program."""
  found: list[dict[str, Any]] = []
  for layered, some in itertools.groupby(tensors, lambda tensor: bool(_LAYER.search(tensor["module"]))):
    run = list(some)
    found += sorted(run, key=lambda tensor: int(_LAYER.findall(tensor["module"])[0])) if layered else run
  return found


def _errors(report: Mapping[str, Any], visits: Sequence[_Visit]) -> Figure:
  of = f" of {report['title']}" if report["title"] else ""
  figure = new_figure(5.8, textwrap.fill(f"Error by module{of}, policy {report['policy']}", _TITLE_WIDTH))
  axes = figure.add_subplot()
  every = [error for visit in visits for error in visit.errors.values()]
  finite = [error for error in every if 0 < error < math.inf] or [1.0]
  room = 3.0 if math.inf in every else 1.5  # a mark at the top stands for errors that are not finite
  floor, ceiling = min(finite) / 1.5, max(finite) * room
  for kind, (marker, color) in _SERIES.items():
    errors = {i: visit.errors[kind] for i, visit in enumerate(visits) if kind in visit.errors}
    if not errors:
      continue
    there = [i for i, error in errors.items() if 0 < error < math.inf]  # a logarithmic axis cannot show 0
    heights = [errors[i] for i in there]
    axes.plot(there, heights, color=color, marker=marker, markersize=4, linewidth=0.9, label=f"{kind}s")
    gone = [i for i, error in errors.items() if error == math.inf]
    axes.plot(gone, [ceiling] * len(gone), color=color, marker="x", linestyle="none", clip_on=False)
  if math.inf in every:
    axes.plot([], [], color="black", marker="x", linestyle="none", label="not finite")
  for row, (i, words) in enumerate(_marked(report, visits).items()):
    draw_limit(axes, i)
    side = "right" if i > len(visits) / 2 else "left"
    style: dict[str, Any] = {"fontsize": SMALL, "fontweight": "bold", "ha": side, "va": "bottom"}
    text = f"{words} grows at {visits[i].module}"
    axes.text(i, 1.02 + 0.08 * row, text, transform=axes.get_xaxis_transform(), **style)

  axes.set_yscale("log")
  axes.set_ylim(floor, ceiling)
  axes.set_ylabel("relative error against float32")
  step = math.ceil(len(visits) / 45)
  often = collections.Counter(visit.module for visit in visits)
  names = [f"{v.module}: {v.name}" if often[v.module] > 1 and v.name else v.module for v in visits[::step]]
  axes.set_xticks(range(0, len(visits), step), names, rotation=90)
  axes.set_xlim(-0.8, len(visits) - 0.2)
  axes.grid(axis="y")
  handles, labels = axes.get_legend_handles_labels()
  figure.legend(handles, labels, loc="outside lower center", ncols=4)
  return figure


def _marked(report: Mapping[str, Any], visits: Sequence[_Visit]) -> dict[int, str]:
  """Returns the visits at which an error grows by the findings, each with the name of the error."""
  marked: dict[int, str] = {}
  for found, kind, words in (
    ("error", "activation", "error"),
    ("gradient error", "activation gradient", "gradients' error"),
  ):
    for module in [finding["module"] for finding in report["findings"] if finding["kind"] == found]:
      errors = {i: visit.errors.get(kind, 0.0) for i, visit in enumerate(visits) if visit.module == module}
      large = [i for i, error in errors.items() if error and error >= max(errors.values()) / 2]
      if large:
        marked.setdefault(large[0], words)
  return marked


def _percent(share: float) -> str:
  return "0%" if share <= 0 else "<0.001%" if share < 1e-5 else f"{100 * share:.3g}%"


def _power(scale: float) -> str:
  exponent = math.log2(scale)
  return f"$2^{{{int(exponent)}}}$" if exponent.is_integer() else f"{scale:g}"
