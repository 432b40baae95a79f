"""Weak scaling on paper: what a chip of 8 to 256 holds and sends in a training step, compiled.

The built-in GPT with 124M parameters, AdamW, 8 sequences of 1024 tokens on each chip of a TPU v5e. A mesh
divides rows over `data` and `fsdp`, and over `fsdp` parameters and state, too. Sent: about what one chip
sends for the collectives of a step, were each on a ring.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

from benchmarks._runner import Row, markdown, plan_figures
from benchmarks.gather import plan

PACKAGES = ("flax", "optax", "libtpu")
SLICES = {8: "v5e:2x4", 64: "v5e:8x8", 256: "v5e:16x16"}
MODEL = {"kind": "gpt", "dim": 768, "layers": 12, "heads": 12}
POLICIES: dict[str, Any] = {
  "bf16": "bf16",
  "fp16, reduced in float16": {"base": "fp16", "reduce_dtype": "float16"},
}
# Policy, data, fsdp.
MESHES = (
  ("bf16", 8, 1),
  ("bf16", 1, 8),
  ("fp16, reduced in float16", 1, 8),
  ("bf16", 64, 1),
  ("bf16", 8, 8),
  ("bf16", 1, 64),
  ("bf16", 256, 1),
  ("bf16", 32, 8),
  ("bf16", 1, 256),
)


def rows() -> Iterator[Row]:
  """Each mesh."""
  for policy, data, fsdp in MESHES:
    yield Row({"policy": policy, "data": data, "fsdp": fsdp}, functools.partial(figures, policy, data, fsdp))


def figures(policy: str, data: int, fsdp: int) -> dict[str, Any]:
  """What a chip holds, and its collectives."""
  chips = data * fsdp
  tokens = {"vocab_size": 50304, "seq_len": 1024, "batch_size": 8 * chips}
  mesh = {"data": data, "fsdp": fsdp}
  return plan_figures(plan(SLICES[chips], POLICIES[policy], MODEL, tokens, mesh, {}, compile=True))


def sent(row: dict[str, Any]) -> float:
  """Bytes that a chip sends in a step, were each collective on a ring.

  Gathers and scatters go over `fsdp`. What is reduced goes over the other axis, or over all chips if there is
  one.
  """
  total = 0.0
  for found in row["collectives"]:
    group = row["fsdp"] if found["operation"] in ("all-gather", "reduce-scatter") else row["data"]
    group = math.prod((row["data"], row["fsdp"])) if group == 1 else group
    share = {"all-reduce": 2 * (group - 1) / group, "reduce-scatter": group - 1.0}
    total += found["bytes"] * share.get(found["operation"], (group - 1) / group)
  return total


def table(report: dict[str, Any]) -> str:
  """State, peak and what crosses of one chip, by mesh."""
  lines = []
  for row in report["rows"]:
    # Two numbers of float16 travel in a word of 32 bits.
    crossing = ", ".join(
      f"{found['operation']} {found['dtype'].replace('uint32', 'float16')} {found['bytes'] / 1e6:.0f}"
      for found in row["collectives"]
      if found["bytes"] > 1e6
    )
    memory = [f"{row[key] / 1e6:.0f}" for key in ("arguments", "peak")]
    chips = row["data"] * row["fsdp"]
    lines.append(
      [chips, row["policy"], row["data"], row["fsdp"], *memory, crossing, f"{sent(row) / 1e6:.0f}"]
    )
  heads = ["chips", "policy", "data", "fsdp", "state MB", "peak MB", "crossing, MB", "sent MB"]
  return markdown(heads, lines)
