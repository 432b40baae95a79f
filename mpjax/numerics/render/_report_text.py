"""Tables of a numerics report: kinds of tensors, modules, findings, advice."""

from __future__ import annotations

from collections.abc import Sequence

from mpjax._render.plain_text import percent, power_of_two_text
from mpjax._render.text_sections import TextSection, of_rows
from mpjax.numerics._conclusions import Advice
from mpjax.numerics._report_figures import NumericsFigures
from mpjax.numerics._seen import FP8, INTEREST
from mpjax.numerics._tensors import GRADIENTS, KINDS, Tensor, share_lost

_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3 scaled", "float8_e5m2": "E5M2 scaled"}


def sections_of(report: NumericsFigures) -> list[TextSection]:
  """Returns the tables of a report."""
  sections = [
    of_rows("\n".join(report.heading()), summary_rows(report.tensors, report.loss_scale), name="kinds")
  ]
  errors = [report.error_by_module(kind) for kind in ("activation", "activation gradient")]
  if modules := list(dict.fromkeys(module for found in errors for module in found)):
    rows = [
      [m or "(no module)", *(f"{found[m]:.2g}" if m in found else "" for found in errors)] for m in modules
    ]
    title = "Error against float32, by module in program order"
    sections.append(of_rows(title, [["module", "values", "gradients"], *rows], name="modules"))
  if report.findings:
    said = [f"{finding.severity}: {finding.text}" for finding in report.findings]
    sections.append(TextSection("Findings", lines=said, name="findings"))
  if report.advice is not None:
    said = [*_advice_lines(report.advice), *report.advice.yaml.splitlines()]
    sections.append(TextSection("Advice", lines=said, name="advice"))
  return sections


def summary_rows(
  tensors: Sequence[Tensor], loss_scale: float, formats: Sequence[str] = INTEREST
) -> list[list[str]]:
  """Returns a header row, and rows for each kind of tensor, at scale 1 and at the loss scale."""
  header = ["tensors", "number", "range", "zero", *(f"lost in {_SHORT[name]}" for name in formats), "error"]
  rows = [header]
  for kind in KINDS:
    of_kind = [t for t in tensors if t.kind == kind]
    if not of_kind:
      continue
    scales = {1.0, loss_scale} if kind in GRADIENTS else {1.0}
    for scale in sorted(scales):
      title = f"{kind}s" if scale == 1 else f"  times {power_of_two_text(scale)}"
      count = sum(t.magnitudes.count for t in of_kind)
      zero = sum(t.magnitudes.zero for t in of_kind) / count
      errors = [t.error for t in of_kind if t.error is not None]
      first = scale == 1
      rows.append(
        [
          title,
          str(len(of_kind)) if first else "",
          _range(of_kind) if first else "",
          percent(zero) if first else "",
          *(_lost(of_kind, name, scale) for name in formats),
          f"{max(errors):.2g}" if errors and first else "",
        ]
      )
  return rows


def _lost(tensors: Sequence[Tensor], name: str, scale: float) -> str:
  """Returns the share that a format loses; for FP8 at each tensor's own scale, only in the first row."""
  if name not in FP8:
    return percent(share_lost(tensors, name, scale))
  return percent(share_lost(tensors, name, None)) if scale == 1 else ""


def _range(tensors: list[Tensor]) -> str:
  ranges = [r for t in tensors if (r := t.magnitudes.range)]
  return (
    f"2^{min(r[0] for r in ranges)} to 2^{max(r[1] for r in ranges) + 1}"
    if ranges
    else "not finite"
    if any(t.magnitudes.nan + t.magnitudes.inf for t in tensors)
    else "all zero"
  )


def _advice_lines(advice: Advice) -> list[str]:
  """Returns the advised changes with their benefits, a line for each."""
  if advice.unchanged:
    return ["no change"]
  return [f"{key}: {buys}" for key, buys in advice.lines]
