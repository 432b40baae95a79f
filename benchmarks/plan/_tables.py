"""Tables of plans: beside what a compiler says, and beside what steps took."""

from __future__ import annotations

from typing import Any

from benchmarks._record import provenance


def accuracy(report: dict[str, Any]) -> str:
  """The analytic peak over the compiled one, and what the compiled one's parts account for."""
  lines = [
    "| step | compiled peak | analytic / compiled | explained by parts | compile s |",
    "|---|---|---|---|---|",
  ]
  lines += [
    f"| {row['model']} {row['size']} {row['policy']} | {row['peak']['compiled'] / 1e9:.2f} GB | "
    f"{row['peak_ratio']:.3f} | {row['explained']:.1%} | {row['compile_seconds']:.0f} |"
    for row in report["rows"]
  ]
  equal = sum(
    row[what]["analytic"] == row[what]["compiled"]
    for row in report["rows"]
    for what in ("arguments", "outputs")
  )
  rows = len(report["rows"])
  lines += [
    "",
    f"Argument and result bytes equal, analytic and compiled, in {equal} of {2 * rows} comparisons.",
  ]
  return "\n".join([*lines, "", provenance(report)])


def beside_steps(report: dict[str, Any]) -> str:
  """Returns a table of planned memory and least time beside what steps took."""
  lines = [
    "| step | measured peak GB | compiled for the described H200 | compiled on the card | analytic | "
    "measured ms | planned least ms | of that |",
    "|---" * 8 + "|",
  ]
  for row in report["rows"]:
    peak, cells = row["measured_peak"], []
    for key in ("described", "compiled_on_device", "analytic"):
      cells.append(f"{row[key] / 1e9:.2f} ({row[key] / peak:.3f})")
    lines.append(
      f"| {row['name']} | {peak / 1e9:.2f} | {' | '.join(cells)} | {row['measured_ms']:.1f} | "
      f"{row['floor_ms']:.1f} | {row['measured_ms'] / row['floor_ms']:.2f}x |"
    )
  return "\n".join([*lines, "", provenance(report)])
