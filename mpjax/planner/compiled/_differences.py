"""Sentences that say why the compiler's memory differs from the analytic plan's."""

from __future__ import annotations

from mpjax import _compat
from mpjax._render.plain_text import bytes_text
from mpjax.planner._results import Memory
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import Program

# Below this share of the peak a difference is not worth a sentence.
_WORTH = 0.01

_OLDER_REASONS = {
  (
    "cpu",
    "activations",
  ): "XLA on a CPU computes half precision in float32 and keeps that, and merges what is "
  "recomputed with what was computed before",
  ("cpu", "compute copies"): "XLA on a CPU keeps float32 copies of half-precision operands",
}
_REASONS = ({} if _compat.has_newer_xla() else _OLDER_REASONS) | {
  ("cpu", "temporaries"): "XLA on a CPU fuses less than on an accelerator",
  ("gpu", "activations"): "fusions decide which values are stored and which are computed again",
  ("gpu", "compute copies"): "convolutions read their weights in another layout, of which there is a copy",
  (
    "tpu",
    "activations",
  ): "likely that the TPU compiler stores what only products read in bfloat16, keeps small "
  "values on the chip, and recomputes when memory is short",
  ("tpu", "temporaries"): "the TPU compiler keeps small values on the chip",
}


def differences(
  analytic: Memory, compiled: Memory, program: Program, arguments: int, target: Target
) -> tuple[str, ...]:
  """Returns the sentences on every part in which the two differ by more than a hundredth of the peak.

  Args:
    analytic: the plan without a compiler.
    compiled: the compiler's memory, by part.
    program: what it compiled.
    arguments: analytic bytes of all arguments.
    target: of the compiler.
  """
  out = []
  if program.arguments != arguments:
    out.append(
      f"arguments: {arguments:,} B analytic, {program.arguments:,} B compiled: the compiler lays them out "
      "otherwise"
    )
  for part in dict.fromkeys((*analytic.parts, *compiled.parts)):
    ours, theirs = analytic.parts.get(part, 0), compiled.parts.get(part, 0)
    if abs(ours - theirs) <= _WORTH * compiled.peak:
      continue
    if part == "allocator":
      why = "alignment and gaps between buffers"
    elif part == "workspace" and theirs:
      why = "room that the library's calls asked for"
    elif part == "gradients":
      late = "something needs all of them before the first is used"
      why = late if theirs > ours else "the compiler's schedule uses each up as it comes"
    else:
      why = _REASONS.get((target.kind, part), "another schedule")
    out.append(f"{part}: {bytes_text(ours)} analytic, {bytes_text(theirs)} compiled: {why}")
  return tuple(out)
