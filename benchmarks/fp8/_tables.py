"""The tables of what compilers make of low precision, from their reports."""

from __future__ import annotations

from typing import Any

from benchmarks._record import provenance


def by_device(report: dict[str, Any]) -> str:
  """Temporaries, and products below 16 bits or cycles, by recipe on one device."""
  rows = report["policies"]
  on_tpu = "cycles" in rows["bf16"]
  last = "cycles, millions | ratio" if on_tpu else "products below 16 bits | matrix instructions in the PTX"
  lines = [f"| policy | temporaries MB | ratio | {last} |", "|---|---|---|---|---|"]
  for name, row in rows.items():
    if on_tpu:
      cells = f"{row['cycles'] / 1e6:.2f} | {row['cycles_ratio']:.3f}"
    else:
      kinds = ", ".join(f"`{kind}`" for kind in row["instructions"]) or "not read"
      cells = f"{row['share_below_16_bits']:.0%} | {kinds}"
    lines.append(f"| {name} | {row['temp_bytes'] / 1e6:.0f} | {row['temp_bytes_ratio']:.3f} | {cells} |")
  return "\n".join([*lines, "", provenance(report)])
