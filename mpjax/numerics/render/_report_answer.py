"""The short answer of a numerics report: verdict, figures, findings, and the policy to use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import yaml

from mpjax._render.plain_text import fold, percent
from mpjax._render.text_sections import TEXT_WIDTH, answer_lines
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._report_figures import NumericsFigures
from mpjax.numerics._seen import is_half
from mpjax.patterns import component_regex

_PLURALS = {
  "activation gradient": "gradients of activations",
  "activation": "activations",
  "weight gradient": "gradients of weights",
}
_IN_SHORT = {"gradients of activations": "gradients", "activations": "values"}  # as tables have them
_UNDERFLOW = "underflow to zero"
_ERROR = "largest error against float32"
_MOST_FINDING = 2 * TEXT_WIDTH - 16  # letters
_MOST_YAML = 3  # lines of the policy
_OVERRIDES = "overrides: "  # the beginning of a change of overrides
# The policy keys that fix a kind of finding; the first one in the advice counts.
_MENDED_BY = {
  "overflow": (_OVERRIDES,),
  "gradient overflow": (_OVERRIDES, "loss_scaling"),
  "underflow": (_OVERRIDES, "loss_scaling"),
  "error": (_OVERRIDES,),
  "gradient error": (_OVERRIDES,),
  "lost updates": ("param_dtype", "master_weights"),
}


class Figure(NamedTuple):
  """A figure of the verdict.

  Attributes:
    of: the tensors, such as `gradients of weights`.
    what: what was measured, such as `overflow`.
    value: its value as text.
    format: the dtype; empty for an error.
    where: the tensor with the largest error, or the value without the loss scale; may be empty.
  """

  of: str
  what: str
  value: str
  format: str = ""
  where: str = ""

  def to_dict(self) -> dict[str, str]:
    """Returns plain data, with a description in words."""
    what = f"{self.of} in {self.format} that {self.what}" if self.format else f"{self.what} of {self.of}"
    return {"what": what, "value": self.value, "where": self.where}


def verdict(findings: Sequence[Finding], advice: Advice | None) -> str:
  """Returns whether the policy is good as it is, and else what helps."""
  problems = [finding for finding in findings if finding.severity == "problem"]
  count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
  if not problems:
    if advice is None:
      return "no problem was found"
    return f"the policy is good as it is{_see_notes(findings)}"
  if advice is None:
    return count
  if advice.unchanged:
    return f"{count}: no change of the policy helps"
  return f"{count}: the policy below should fix {'it' if len(problems) == 1 else 'them'}"


def _see_notes(findings: Sequence[Finding]) -> str:
  said = [finding for finding in findings if finding.kind in ("weight gradient", "gradient error")]
  names = " and ".join(finding.text.partition(":")[0] for finding in said)
  return f"; on the errors of {names} see the note{'s' if said[1:] else ''}" if said else ""


def figures(report: NumericsFigures) -> list[Figure]:
  """Returns the shares that underflow and overflow under the policy, and the largest errors."""
  return [*_shares(report), *_errors(report)]


def _shares(report: NumericsFigures) -> Iterator[Figure]:
  dtype = report.policy.compute_dtype.name
  if is_half(dtype):
    yield from _of_format(report, "activation gradient", dtype, report.loss_scale)
    yield from _of_format(report, "activation", dtype, 1.0)
  if report.policy.fp8:
    for kind, name in (("activation gradient", "float8_e5m2"), ("activation", "float8_e4m3fn")):
      if report.of(kind):
        yield Figure(_PLURALS[kind], _UNDERFLOW, _percent(report.lost(kind, name, None)), name)


def _of_format(report: NumericsFigures, kind: str, dtype: str, scale: float) -> Iterator[Figure]:
  tensors = report.of(kind)
  count = sum(t.magnitudes.count for t in tensors)
  if not count:
    return
  where = f"{_percent(report.lost(kind, dtype))} at scale 1" if scale != 1 else ""
  yield Figure(_PLURALS[kind], _UNDERFLOW, _percent(report.lost(kind, dtype, scale)), dtype, where)
  over = sum(t.magnitudes.shares(dtype, scale).overflow * t.magnitudes.count for t in tensors)
  yield Figure(_PLURALS[kind], "overflow", _percent(over / count), dtype)


def _percent(share: float) -> str:
  return percent(share) if share else "0%"


def _errors(report: NumericsFigures) -> Iterator[Figure]:
  for kind in ("weight gradient", "activation gradient", "activation"):
    known = [
      (math.inf if math.isnan(t.error) else t.error, t) for t in report.of(kind) if t.error is not None
    ]
    if not known:
      continue
    error, worst = max(known, key=lambda found: found[0])
    value = f"{error:.2g}" if error < math.inf else "not finite"
    yield Figure(_PLURALS[kind], _ERROR, value, where=worst.path or worst.module)


def answer(report: NumericsFigures) -> list[str]:
  """Returns the answer of a report, in at most eleven lines."""
  title = f" of {report.title}" if report.title else ""
  first = [
    f"numerics{title}, policy {report.policy.full_label}: {verdict(report.findings, report.advice)}",
    report.heading()[1] + f"; {report.batches_text()}, step {report.step}",
    *_figure_lines(figures(report)),
  ]
  return answer_lines(
    first,
    [_finding_line(finding, report.advice) for finding in report.findings],
    [] if report.advice is None or report.advice.unchanged else _policy_lines(report.advice),
    rest="{} more in the table findings",
  )


def _figure_lines(found: Sequence[Figure]) -> Iterator[str]:
  """Yields a line for each format, and one for the errors."""
  for name in dict.fromkeys(figure.format for figure in found):
    said: dict[str, list[str]] = {}
    for figure in found:
      if figure.format != name:
        continue
      # "underflow to zero" the first time, then "underflow".
      what = figure.what.removesuffix(" to zero") if said else figure.what
      where = f" ({figure.where})" if figure.where else ""
      said.setdefault(_IN_SHORT.get(figure.of, figure.of), []).append(
        f"{figure.value} {what}{where}" if name else f"{figure.value}{where}"
      )
    parts = [f"{of} {', '.join(figures_of)}" for of, figures_of in said.items()]
    yield f"{name or 'largest errors'}: {'; '.join(parts)}"


def _finding_line(finding: Finding, advice: Advice | None) -> str:
  return _clipped(f"{finding.severity}: {finding.text}") + _to_write(finding, advice)


def _clipped(text: str) -> str:
  """Returns a text that fits two lines, without its last clauses; the table has the whole text."""
  while len(text) > _MOST_FINDING:
    end = max(text.rfind(sign) for sign in ("; ", ". "))
    if end < 0:
      break
    text = text[:end]
  return text


def _to_write(finding: Finding, advice: Advice | None) -> str:
  """Returns the change of the advice that fixes a problem; empty without one."""
  if finding.severity != "problem" or advice is None:
    return ""
  for key in _MENDED_BY.get(finding.kind, ()):
    for change, _ in advice.lines:
      if change.startswith(key) and (key != _OVERRIDES or _matches(change, finding.module)):
        return f" -> {change}"
  return ""


def _matches(change: str, module: str) -> bool:
  pattern = change.removeprefix(_OVERRIDES).rpartition(": ")[0]
  return bool(component_regex(pattern).search(module.partition("[")[0]))


def _policy_lines(advice: Advice) -> list[str]:
  """Returns the policy to use, in few lines of YAML."""
  text = yaml.safe_dump(dict(advice.policy), default_flow_style=True, width=10**6, sort_keys=False).strip()
  lines = fold(f"policy: {text}", TEXT_WIDTH - 2).replace("\n", "\n  ").split("\n")
  if len(lines) > _MOST_YAML:
    lines = ["the policy to write is in the table advice"]
  return lines
