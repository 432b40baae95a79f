"""The report of an inspection: its data, the short answer, and the tables."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import yaml

from mpjax._render.plain_text import fold, percent, plain_data, power_of_two_text
from mpjax._render.tables import TEXT_WIDTH, Shown, Table, answer_lines
from mpjax._version import __version__
from mpjax.formats import FORMATS
from mpjax.numerics._seen import BINS, FP8, INTEREST, is_half
from mpjax.numerics._tensors import GRADIENTS, KINDS, Tensor
from mpjax.numerics.render import save_html, write_whole
from mpjax.policy import Policy

_TITLES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}
# By kind of tensor: its name in the verdict's figures, and its short name in an answer.
_NAMES = {
  "weight gradient": ("gradients of weights", "gradients of weights"),
  "activation gradient": ("gradients of activations", "gradients"),
  "activation": ("activations", "values"),
}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3 scaled", "float8_e5m2": "E5M2 scaled"}


@dataclasses.dataclass(frozen=True)
class Finding:
  """An effect of low precision.

  Attributes:
    kind: `overflow`, `gradient overflow`, `underflow`, `nonfinite`, `lost updates`, `error`,
      `gradient error`, `weight gradient`, `range`, `reference` or `fragile`.
    severity: `problem`, or `note` for an effect that does no harm now.
    module: module path or a parameter's tree path; empty for the step.
    text: one or two sentences that say what was measured.
    tensor: the parameter's tree path, or the tensor's name; empty for the step.
    order: position in the program; -1 for the step, and for a parameter that is not finite.
  """

  kind: str
  severity: str
  module: str
  text: str
  tensor: str = ""
  order: int = -1


@dataclasses.dataclass(frozen=True)
class Advice:
  """A policy to use instead, as the findings suggest it; `mpjax.tune` measures it.

  Attributes:
    policy: the policy, as `mpjax.get_policy` takes it.
    lines: (key, its benefit) for each change.
  """

  policy: Mapping[str, Any]
  lines: tuple[tuple[str, str], ...] = ()

  @property
  def unchanged(self) -> bool:
    """Returns whether there is nothing to change."""
    return not self.lines

  @property
  def yaml(self) -> str:
    """Returns the `policy` key of a config, ready to paste."""
    return yaml.safe_dump({"policy": dict(self.policy)}, sort_keys=False, default_flow_style=False)


@dataclasses.dataclass(frozen=True, repr=False)
class NumericsReport(Shown):
  """The report that `mpjax.inspect_numerics` returns; `str()` gives the short answer.

  ```python
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy="fp16")
  print(report)  # the verdict, the findings, the policy to use
  print(report.table("modules"))  # one table; report.tables has the names
  print(report.error_by_module("weight gradient"))
  ```

  Attributes:
    title: what was inspected.
    policy: the policy.
    loss_scale: the loss scale of the run; 1 without loss scaling.
    step: number of training steps before the state.
    batches, rows: numbers of inspected batches and rows.
    loss: mean loss under the policy over batches.
    reference_loss: mean loss in float32; `None` without a float32 run.
    tensors: the tensors, sorted by kind and position in the program.
    keep: share of nonzero gradients that a loss scale should keep in range.
    narrow_reference: modules that compute in less than float32 in the float32 run, by the model's own casts.
    own_scale: whether the optimiser itself scales the loss; then a policy does not change the loss scale.
    findings: the findings, problems first, then in the order of the program.
    advice: the policy to use instead; `None` if it was not asked for.
    rows_left_out: number of rows of these batches that did not fit in memory.
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
  rows_left_out: int = 0

  def of(self, kind: str, module: str | None = None) -> list[Tensor]:
    """Returns the tensors of a kind, in program order; only those of `module` if it is given."""
    return [t for t in self.tensors if t.kind == kind and module in (None, t.module)]

  def lost(self, kind: str, name: str, scale: float | None = 1.0) -> float:
    """Returns the share of the nonzero values of all tensors of a kind that a format rounds to zero.

    Args:
      kind: kind of the tensors.
      name: name of the format.
      scale: factor of the values; `None`: each tensor's own, which brings its largest value just into the
        format's range.
    """
    all_of = [t.magnitudes for t in self.of(kind)]
    gone = sum(m.shares(name, scale or m.own_scale(name)).underflow * m.count for m in all_of)
    return gone / (sum(m.there for m in all_of) or 1.0)

  def lost_updates(self) -> dict[str, float]:
    """Returns the share of the step's nonzero updates that weights of each format lose.

    The keys are `bfloat16`, `float16`, `int8` and `int16`, as in `Tensor.lost`, and `stochastic`, which loses
    nothing on average. Empty without updates.
    """
    moved = [(t.moved, t.lost) for t in self.of("update") if t.lost and t.moved]
    total = sum(count for count, _ in moved)
    shares = {
      name: sum(count * lost[name] for count, lost in moved) / total for _, one in moved for name in one
    }
    return shares | {"stochastic": 0.0} if moved else {}

  def error_by_module(self, kind: str) -> dict[str, float]:
    """Returns the largest error against float32 in each module, in program order."""
    worst: dict[str, float] = {}
    for tensor in self.of(kind):
      if tensor.error is not None:
        worst[tensor.module] = max(worst.get(tensor.module, 0.0), tensor.error)
    return worst

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data; numbers that are not finite are strings, as JSON has none."""
    edges = ("bits", "max", "smallest_normal", "smallest_subnormal")
    formats = {
      name: {"title": _TITLES.get(name, name), **{edge: getattr(FORMATS[name], edge) for edge in edges}}
      for name in INTEREST
    }
    advice = self.advice and {
      "policy": self.advice.policy,
      "yaml": self.advice.yaml,
      "lines": [{"key": key, "buys": buys} for key, buys in self.advice.lines],
      "unchanged": self.advice.unchanged,
    }
    same = ("title", "loss_scale", "step", "batches", "rows", "rows_left_out")
    return plain_data(
      {
        "version": 1,
        **{name: getattr(self, name) for name in same},
        "policy": self.policy.full_label,
        "compute_dtype": self.policy.compute_dtype.name,
        "backend": jax.default_backend(),
        "versions": {"mpjax": __version__, "jax": jax.__version__},
        "loss": {"policy": self.loss, "reference": self.reference_loss},
        "bins": BINS,
        "formats": formats,
        "lost_updates": self.lost_updates(),
        "tensors": [t.to_dict(self.loss_scale) for t in self.tensors],
        "verdict": {
          "text": verdict(self),
          "good": all(f.severity != "problem" for f in self.findings),
          "figures": [figure.to_dict() for figure in figures(self)],
        },
        "findings": [dataclasses.asdict(f) for f in self.findings],
        "advice": advice,
      }
    )

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_dict` as JSON."""
    write_whole(path, json.dumps(self.to_dict(), allow_nan=False) + "\n")

  def save_html(self, path: str | os.PathLike[str]) -> None:
    """Writes one page that needs nothing else and asks nothing of the network."""
    save_html(self.to_dict(), path)

  def _answer(self) -> list[str]:
    title = f" of {self.title}" if self.title else ""
    first = [
      f"numerics{title}, policy {self.policy.full_label}: {verdict(self)}",
      f"{_loss(self)}; {_run(self)}",
      *_figure_lines(list(figures(self))),
    ]
    policy = [] if self.advice is None or self.advice.unchanged else _policy_lines(self.advice)
    said = [_finding_line(finding) for finding in self.findings]
    return answer_lines(first, said, policy, rest="{} more in the table findings")

  def _sections(self) -> list[Table]:
    of = f" of {self.title}" if self.title else ""
    title = f"numerics{of}: policy {self.policy.full_label}, {_run(self)}\n{_loss(self)}"
    sections = [Table("kinds", title, list(_kind_rows(self)))]
    errors = [self.error_by_module(kind) for kind in ("activation", "activation gradient")]
    if modules := list(dict.fromkeys(module for found in errors for module in found)):
      cells = lambda module: (f"{found[module]:.2g}" if module in found else "" for found in errors)
      rows = [["module", "values", "gradients"], *([m or "(no module)", *cells(m)] for m in modules)]
      sections.append(Table("modules", "Error against float32, by module in program order", rows))
    if self.findings:
      said = [f"{finding.severity}: {finding.text}" for finding in self.findings]
      sections.append(Table("findings", "Findings", lines=said))
    if self.advice is not None:
      said = [f"{key}: {buys}" for key, buys in self.advice.lines] or ["no change"]
      said += self.advice.yaml.splitlines()
      sections.append(Table("advice", "Advice", lines=said))
    return sections


class Figure(NamedTuple):
  """A figure of the verdict.

  Attributes:
    kind: kind of the tensors.
    what: what was measured, such as `overflow`.
    value: its value as text.
    format: the dtype; empty for an error.
    where: the tensor with the largest error, or the value without the loss scale; may be empty.
  """

  kind: str
  what: str
  value: str
  format: str = ""
  where: str = ""

  def to_dict(self) -> dict[str, str]:
    """Returns plain data, with a description in words."""
    of = _NAMES[self.kind][0]
    what = f"{of} in {self.format} that {self.what}" if self.format else f"{self.what} of {of}"
    return {"what": what, "value": self.value, "where": self.where}


def verdict(report: NumericsReport) -> str:
  """Returns whether the policy is good as it is, and else what helps."""
  problems = [finding for finding in report.findings if finding.severity == "problem"]
  count, them = ("1 problem", "it") if len(problems) == 1 else (f"{len(problems)} problems", "them")
  if not problems:
    said = [f.tensor for f in report.findings if f.kind in ("weight gradient", "gradient error")]
    see = f"; on the errors of {' and '.join(said)} see the note{'s' if said[1:] else ''}" if said else ""
    return f"the policy is good as it is{see}"
  if report.advice is None:
    return count
  if report.advice.unchanged:
    return f"{count}: no change of the policy helps"
  return f"{count}: the policy below should fix {them}"


def figures(report: NumericsReport) -> Iterator[Figure]:
  """Yields the shares that underflow and overflow under the policy, and the largest errors."""
  dtype, underflow = report.policy.compute_dtype.name, "underflow to zero"
  share = lambda part: percent(part) if part else "0%"
  for kind, scale in (("activation gradient", report.loss_scale), ("activation", 1.0)):
    tensors = report.of(kind)
    count = sum(t.magnitudes.count for t in tensors)
    if is_half(dtype) and count:
      where = f"{share(report.lost(kind, dtype))} at scale 1" if scale != 1 else ""
      yield Figure(kind, underflow, share(report.lost(kind, dtype, scale)), dtype, where)
      over = sum(t.magnitudes.shares(dtype, scale).overflow * t.magnitudes.count for t in tensors)
      yield Figure(kind, "overflow", share(over / count), dtype)
  for kind, name in (("activation gradient", "float8_e5m2"), ("activation", "float8_e4m3fn")):
    if report.policy.fp8 and report.of(kind):
      yield Figure(kind, underflow, share(report.lost(kind, name, None)), name)
  for kind in _NAMES:
    known = [
      (math.inf if math.isnan(t.error) else t.error, t) for t in report.of(kind) if t.error is not None
    ]
    if known:
      error, worst = max(known, key=lambda found: found[0])
      value = f"{error:.2g}" if error < math.inf else "not finite"
      yield Figure(kind, "largest error against float32", value, where=worst.path or worst.module)


def _loss(report: NumericsReport) -> str:
  against = "" if report.reference_loss is None else f" (float32: {report.reference_loss:.6g})"
  scale = f"loss scale {power_of_two_text(report.loss_scale)}" if report.loss_scale != 1 else "no loss scale"
  return f"loss {report.loss:.6g}{against}, {scale}"


def _run(report: NumericsReport) -> str:
  batches = "1 batch" if report.batches == 1 else f"{report.batches} batches"
  rows = f"{report.rows} of {report.rows + report.rows_left_out}" if report.rows_left_out else report.rows
  return f"{batches} ({rows} rows), step {report.step}"


def _figure_lines(found: Sequence[Figure]) -> Iterator[str]:
  """Yields a line for each format, and one for the errors."""
  for name in dict.fromkeys(figure.format for figure in found):
    said: dict[str, list[str]] = {}
    for figure in found:
      if figure.format == name:
        # "underflow to zero" the first time, then "underflow".
        what = f" {figure.what.removesuffix(' to zero') if said else figure.what}" if name else ""
        where = f" ({figure.where})" if figure.where else ""
        said.setdefault(_NAMES[figure.kind][1], []).append(f"{figure.value}{what}{where}")
    parts = [f"{of} {', '.join(of_kind)}" for of, of_kind in said.items()]
    yield f"{name or 'largest errors'}: {'; '.join(parts)}"


def _finding_line(finding: Finding) -> str:
  """Returns a finding in two lines, if necessary without its last clauses."""
  text = f"{finding.severity}: {finding.text}"
  while len(text) > 2 * TEXT_WIDTH and (end := max(text.rfind("; "), text.rfind(". "))) > 0:
    text = text[:end]
  return text


def _policy_lines(advice: Advice) -> list[str]:
  """Returns the policy to use, in few lines of YAML."""
  text = yaml.safe_dump(dict(advice.policy), default_flow_style=True, width=10**6, sort_keys=False).strip()
  return fold(f"policy: {text}", TEXT_WIDTH - 2).replace("\n", "\n  ").split("\n")


def _kind_rows(report: NumericsReport) -> Iterator[list[str]]:
  """Yields a heading, and rows for each kind of tensor, at scale 1 and at the loss scale."""
  yield ["tensors", "number", "range", "zero", *(f"lost in {_SHORT[name]}" for name in INTEREST), "error"]
  for kind in KINDS:
    tensors = report.of(kind)
    if not tensors:
      continue
    # FP8 scales each tensor by its own largest value.
    lost = [percent(report.lost(kind, name, None if name in FP8 else 1.0)) for name in INTEREST]
    zero = sum(t.magnitudes.zero for t in tensors) / sum(t.magnitudes.count for t in tensors)
    ranges = [t.magnitudes.range for t in tensors if t.magnitudes.range]
    between = (
      f"2^{min(low for low, _ in ranges)} to 2^{max(high for _, high in ranges) + 1}" if ranges else ""
    )
    broken = any(t.magnitudes.nan + t.magnitudes.inf for t in tensors)
    between = between or ("not finite" if broken else "all zero")
    errors = [t.error for t in tensors if t.error is not None]
    error = f"{max(errors):.2g}" if errors else ""
    yield [f"{kind}s", str(len(tensors)), between, percent(zero), *lost, error]
    if kind in GRADIENTS and report.loss_scale != 1:
      scaled = [
        "" if name in FP8 else percent(report.lost(kind, name, report.loss_scale)) for name in INTEREST
      ]
      yield [f"  times {power_of_two_text(report.loss_scale)}", "", "", "", *scaled, ""]
