"""What an inspection found, as data, as text, as JSON and as a page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import yaml

from mpjax.formats import FORMATS
from mpjax.numerics._tensors import BINS, INTEREST, KINDS, Tensor
from mpjax.policy import Policy, get_policy, presets

_TITLES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}


@dataclasses.dataclass(frozen=True)
class Finding:
  """Something that low precision did.

  Attributes:
    kind: `overflow`, `gradient overflow`, `underflow`, `nonfinite`, `lost updates`, `error`,
      `gradient error` or `range`.
    severity: `problem`, or `note` for what does no harm as it is.
    module: module path, or a parameter's tree path; empty for the whole.
    text: what was seen, in a sentence or two.
  """

  kind: str
  severity: str
  module: str
  text: str


@dataclasses.dataclass(frozen=True)
class Measured:
  """What the advice changes, as it was measured.

  Attributes:
    what: the figure.
    before: under the policy.
    after: under the advised one.
  """

  what: str
  before: float
  after: float


@dataclasses.dataclass(frozen=True)
class Advice:
  """A policy to use instead.

  Attributes:
    policy: as `mpjax.get_policy` takes it.
    lines: (key, what it buys) for each change.
    measured: figures before and after, where the policy was tried.
    left: problems that were still there when it was tried.
  """

  policy: Mapping[str, Any]
  lines: tuple[tuple[str, str], ...] = ()
  measured: tuple[Measured, ...] = ()
  left: tuple[Finding, ...] = ()

  @property
  def unchanged(self) -> bool:
    """Whether the policy is good as it is."""
    return not self.lines

  @property
  def yaml(self) -> str:
    """The `policy` key of a config, to paste."""
    return yaml.safe_dump({"policy": dict(self.policy)}, sort_keys=False, default_flow_style=False)


@dataclasses.dataclass(frozen=True)
class NumericsReport:
  """What `mpjax.inspect_numerics` returns; `str()` of it is a text.

  Attributes:
    title: what was inspected.
    policy: the policy.
    loss_scale: in force; 1 without loss scaling.
    step: training steps behind the state.
    batches, rows: that were looked at.
    loss: under the policy, mean over batches.
    reference_loss: in float32; `None` if that was not run.
    tensors: sorted by kind and position in the program.
    keep: the share of gradients that a loss scale should keep in range.
    narrow_reference: where the float32 run computes in less, by the model's own casts.
    own_scale: whether the loss scale is one of the optimiser's own, which no policy changes.
    findings: problems first.
    advice: what to use instead; `None` before there is any.
  """

  title: str
  policy: Policy
  loss_scale: float
  step: int
  batches: int
  rows: int
  loss: float
  reference_loss: float | None
  tensors: tuple[Tensor, ...]
  keep: float = 0.999
  narrow_reference: tuple[str, ...] = ()
  own_scale: bool = False
  findings: tuple[Finding, ...] = ()
  advice: Advice | None = None

  def __post_init__(self) -> None:
    place = {kind: i for i, kind in enumerate(KINDS)}
    ordered = sorted(self.tensors, key=lambda t: (place[t.kind], t.order))
    object.__setattr__(self, "tensors", tuple(ordered))

  def of(self, kind: str, module: str | None = None) -> list[Tensor]:
    """The tensors of a kind, in the order of the program; those of one module, if it is named."""
    return [t for t in self.tensors if t.kind == kind and module in (None, t.module)]

  def lost(self, kind: str, name: str, scale: float | None = 1.0) -> float:
    """The share of a kind's values (of those that are not zero) that a format rounds to zero.

    Args:
      kind: of tensors.
      name: of a format.
      scale: what they are multiplied by; `None`: each tensor by its own, which brings its largest value just
        into the format's range.
    """
    all_of = [t.magnitudes for t in self.of(kind)]
    there = sum(m.above[0] for m in all_of)
    at = lambda m: m.own_scale(name) if scale is None else scale
    gone = sum(m.shares(name, at(m)).underflow * m.count for m in all_of)
    return gone / there if there else 0.0

  def error_by_module(self, kind: str) -> dict[str, float]:
    """The largest error against float32 in each module, in the order of the program."""
    worst: dict[str, float] = {}
    for tensor in self.of(kind):
      if tensor.error is not None:
        worst[tensor.module] = max(worst.get(tensor.module, 0.0), tensor.error)
    return worst

  def with_advice(self, found: tuple[tuple[Finding, ...], Advice]) -> NumericsReport:
    """The same with findings and advice."""
    return dataclasses.replace(self, findings=found[0], advice=found[1])

  def to_dict(self) -> dict[str, Any]:
    """Plain data; numbers that are not finite are strings, as JSON has none."""
    from mpjax import __version__

    formats = {
      name: {
        "title": _TITLES.get(name, name),
        "bits": FORMATS[name].bits,
        "max": FORMATS[name].max,
        "smallest_normal": FORMATS[name].smallest_normal,
        "smallest_subnormal": FORMATS[name].smallest_subnormal,
      }
      for name in INTEREST
    }
    advice = None
    if self.advice is not None:
      advice = {
        "policy": dict(self.advice.policy),
        "yaml": self.advice.yaml,
        "lines": [{"key": key, "buys": buys} for key, buys in self.advice.lines],
        "measured": [dataclasses.asdict(m) for m in self.advice.measured],
        "left": [dataclasses.asdict(f) for f in self.advice.left],
        "unchanged": self.advice.unchanged,
      }
    return _plain(
      {
        "version": 1,
        "title": self.title,
        "policy": policy_name(self.policy),
        "compute_dtype": self.policy.compute_dtype.name,
        "backend": jax.default_backend(),
        "versions": {"mpjax": __version__, "jax": jax.__version__},
        "loss_scale": self.loss_scale,
        "step": self.step,
        "batches": self.batches,
        "rows": self.rows,
        "loss": {"policy": self.loss, "reference": self.reference_loss},
        "bins": list(BINS),
        "formats": formats,
        "tensors": [t.to_dict(self.loss_scale) for t in self.tensors],
        "findings": [dataclasses.asdict(f) for f in self.findings],
        "advice": advice,
      }
    )

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_dict` as JSON."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n")
    temporary.replace(path)

  def save_html(self, path: str | os.PathLike[str]) -> None:
    """Writes one page that needs nothing else and asks nothing of the network."""
    from mpjax.numerics.render._report_html import save_html

    save_html(self.to_dict(), path)

  def save_pictures(self, directory: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Writes PNG files into a directory: histograms by kind, and the error by module.

    Raises:
      ImportError: without matplotlib.
    """
    from mpjax.numerics.render._report_picture import save_pictures

    return save_pictures(self.to_dict(), directory)

  def __str__(self) -> str:
    return "\n".join(_text(self))


def is_half(dtype: str) -> bool:
  """Whether values of a dtype have fewer than 19 bits, and so fewer digits than any float32 computation."""
  return dtype in FORMATS and FORMATS[dtype].bits < 19


def policy_name(policy: Policy) -> str:
  """Its own name, that of the preset it equals, or its dtypes."""
  same = (name for name in presets() if name != "auto" and get_policy(name) == policy)
  return policy.name or next(same, str(policy))


def percent(share: float) -> str:
  """`0`, `12.3%`, `0.012%`, `<0.001%`."""
  if not share:
    return "0"
  if share < 1e-5:
    return "<0.001%"
  return f"{100 * share:.3g}%" if share >= 1e-4 else f"{100 * share:.1g}%"


def power(scale: float) -> str:
  """`2^16` for a power of two, the number otherwise."""
  exponent = math.log2(scale) if scale > 0 else math.nan
  return f"2^{int(exponent)}" if exponent.is_integer() else f"{scale:g}"


def _plain(tree: Any) -> Any:
  if isinstance(tree, Mapping):
    return {str(key): _plain(value) for key, value in tree.items()}
  if isinstance(tree, (list, tuple)):
    return [_plain(value) for value in tree]
  if isinstance(tree, float) and not math.isfinite(tree):
    return str(tree)
  return tree


def heading(report: NumericsReport) -> list[str]:
  """What was inspected, in two lines."""
  title = f"numerics of {report.title}" if report.title else "numerics"
  batches = "1 batch" if report.batches == 1 else f"{report.batches} batches"
  against = "" if report.reference_loss is None else f" (float32: {report.reference_loss:.6g})"
  return [
    f"{title}: policy {policy_name(report.policy)}, {batches} ({report.rows} rows), step {report.step}",
    f"loss {report.loss:.6g}{against}, loss scale {power(report.loss_scale)}",
  ]


def advice_lines(report: NumericsReport) -> list[str]:
  """What is advised and what it buys, a line each, before the YAML."""
  advice = report.advice
  if advice is None:
    return []
  if advice.unchanged:
    problems = any(finding.severity == "problem" for finding in report.findings)
    return [f"advice: {'no change of the policy helps' if problems else 'the policy is good as it is'}"]
  return [
    "advice:",
    *(f"  {key}: {buys}" for key, buys in advice.lines),
    *(f"  measured: {m.what}: {m.before:.3g} -> {m.after:.3g}" for m in advice.measured),
    *(f"  not mended: {finding.text}" for finding in advice.left),
  ]


def _text(report: NumericsReport) -> Iterator[str]:
  from mpjax.numerics.render._report_text import summary_rows

  yield from (*heading(report), "")
  header, *body = summary_rows(report)
  widths = [max(len(row[i]) for row in (header, *body)) for i in range(len(header))]
  for row in (header, *body):
    first, *rest = (
      cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
    )
    yield "  ".join((first, *rest)).rstrip()
  yield ""
  for finding in report.findings:
    yield f"{finding.severity}: {finding.text}"
  if report.advice is not None:
    yield from ("", *advice_lines(report), report.advice.yaml.rstrip())
