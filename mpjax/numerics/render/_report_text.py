"""A numerics report as text: the short answer, and tables by name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import yaml

from mpjax._render.plain_text import fold, percent, power_of_two_text
from mpjax._render.text_sections import TEXT_WIDTH, TextSection, answer_lines, of_rows
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._seen import FP8, INTEREST, is_half
from mpjax.numerics._tensors import GRADIENTS, KINDS

if TYPE_CHECKING:
  from mpjax.numerics._report import NumericsReport

# By kind of tensor: its name in the verdict's figures, and its short name in an answer.
_NAMES = {
  "weight gradient": ("gradients of weights", "gradients of weights"),
  "activation gradient": ("gradients of activations", "gradients"),
  "activation": ("activations", "values"),
}
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3 scaled", "float8_e5m2": "E5M2 scaled"}
_MOST_YAML = 3  # lines of the policy


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


def answer(report: NumericsReport) -> list[str]:
  """Returns the answer of a report, in at most eleven lines."""
  title = f" of {report.title}" if report.title else ""
  first = [
    f"numerics{title}, policy {report.policy.full_label}: {verdict(report)}",
    f"{_loss(report)}; {_run(report)}",
    *_figure_lines(list(figures(report))),
  ]
  return answer_lines(
    first,
    [_finding_line(finding) for finding in report.findings],
    [] if report.advice is None or report.advice.unchanged else _policy_lines(report.advice),
    rest="{} more in the table findings",
  )


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
  lines = fold(f"policy: {text}", TEXT_WIDTH - 2).replace("\n", "\n  ").split("\n")
  return lines if len(lines) <= _MOST_YAML else ["the policy to write is in the table advice"]


def sections_of(report: NumericsReport) -> list[TextSection]:
  """Returns the tables of a report: kinds of tensors, modules, findings, advice."""
  of = f" of {report.title}" if report.title else ""
  title = f"numerics{of}: policy {report.policy.full_label}, {_run(report)}\n{_loss(report)}"
  sections = [of_rows(title, list(_kind_rows(report)), name="kinds")]
  errors = [report.error_by_module(kind) for kind in ("activation", "activation gradient")]
  if modules := list(dict.fromkeys(module for found in errors for module in found)):
    cells = lambda module: (f"{found[module]:.2g}" if module in found else "" for found in errors)
    rows = [["module", "values", "gradients"], *([m or "(no module)", *cells(m)] for m in modules)]
    sections.append(of_rows("Error against float32, by module in program order", rows, name="modules"))
  if report.findings:
    said = [f"{finding.severity}: {finding.text}" for finding in report.findings]
    sections.append(TextSection("Findings", lines=said, name="findings"))
  if report.advice is not None:
    said = [f"{key}: {buys}" for key, buys in report.advice.lines] or ["no change"]
    said += report.advice.yaml.splitlines()
    sections.append(TextSection("Advice", lines=said, name="advice"))
  return sections


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
