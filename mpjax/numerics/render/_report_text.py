"""Text of a numerics report: a table by kind of tensor, and what is advised; the same in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mpjax._render.plain_text import percent, power_of_two_text, table
from mpjax._render.text_sections import TextSection, of_rows
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._stored_state import StoredSlot
from mpjax.numerics._tensors import FP8, GRADIENTS, INTEREST, KINDS, Tensor, share_lost

_MOST_MODULES = 12
_SHORT = {"float16": "f16", "bfloat16": "bf16", "float8_e4m3fn": "E4M3 scaled", "float8_e5m2": "E5M2 scaled"}


def sections_of(
  heading: Sequence[str],
  tensors: Sequence[Tensor],
  loss_scale: float,
  stored: Sequence[StoredSlot],
  errors: Mapping[str, Mapping[str, float]],
  findings: Sequence[Finding],
  advice: Advice | None,
) -> list[TextSection]:
  """Returns what `str` of a report says as tables for a notebook, with the largest errors by module.

  Args:
    heading: its first lines.
    tensors: that were looked at.
    loss_scale: of the run.
    stored: slots of the optimiser's state.
    errors: by module, of activations and of their gradients.
    findings: about them.
    advice: what follows, if it was asked for.
  """
  sections = [TextSection("\n".join(heading)), of_rows("Tensors", summary_rows(tensors, loss_scale))]
  if stored:
    sections.append(of_rows("State as it is stored", stored_rows(stored)))
  worst = {m: max(found.get(m, 0.0) for found in errors.values()) for found in errors.values() for m in found}
  largest = sorted(worst, key=lambda module: -worst[module])[:_MOST_MODULES]
  if largest:
    figures = [[f"{found[m]:.2g}" if m in found else "" for found in errors.values()] for m in largest]
    rows = [[m or "(no module)", *row] for m, row in zip(largest, figures, strict=True)]
    sections.append(of_rows("Largest errors against float32", [["module", "values", "gradients"], *rows]))
  said = [f"{finding.severity}: {finding.text}" for finding in findings]
  if advice is not None:
    said += [*advice_lines(advice, findings), *advice.yaml.splitlines()]
  return [*sections, TextSection("Findings", lines=said)] if said else sections


def summary_lines(tensors: Sequence[Tensor], loss_scale: float) -> list[str]:
  """Returns the table of `summary_rows` as text."""
  return [line for (line,) in table(summary_rows(tensors, loss_scale))]


def summary_rows(
  tensors: Sequence[Tensor], loss_scale: float, formats: Sequence[str] = INTEREST
) -> list[list[str]]:
  """Returns the cells of a header, and of a row for each kind of tensor, at scale 1 and at the loss scale."""
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


def stored_lines(stored: Sequence[StoredSlot]) -> list[str]:
  """Returns the table of `stored_rows` as text."""
  return [line for (line,) in table(stored_rows(stored))]


def stored_rows(stored: Sequence[StoredSlot]) -> list[list[str]]:
  """Returns the cells of a header, and of a row for each slot of an optimiser's state in few bytes."""
  header = ["stored state", "dtype", "arrays", "median error", "largest", "became zero", "scales not finite"]
  return [
    header,
    *(
      [
        s.slot,
        s.dtype,
        str(s.arrays),
        f"{s.median:.2g}",
        f"{s.largest:.2g}",
        percent(s.became_zero),
        percent(s.not_finite) if s.groups else "",
      ]
      for s in stored
    ),
  ]


def _lost(tensors: Sequence[Tensor], name: str, scale: float) -> str:
  """Returns the share that a format loses; of FP8 at each tensor's own scale, in the first row alone."""
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


def advice_lines(advice: Advice, findings: Sequence[Finding]) -> list[str]:
  """Returns what is advised and what it buys, a line each, before the YAML."""
  if advice.unchanged:
    if any(finding.severity == "problem" for finding in findings):
      return ["advice: no change of the policy helps"]
    said = [f for f in findings if f.kind in ("weight gradient", "gradient error")]
    names = " and ".join(f.text.partition(":")[0] for f in said)
    why = f"; on the errors of {names} see the note{'s' if len(said) > 1 else ''}" if said else ""
    return [f"advice: the policy is good as it is{why}"]
  return [
    "advice:",
    *(f"  {key}: {buys}" for key, buys in advice.lines),
    *(f"  measured: {m.what}: {m.before:.3g} -> {m.after:.3g}" for m in advice.measured),
    *(f"  not mended: {finding.text}" for finding in advice.left),
  ]
