"""Sentences that say why the compiler's memory differs from the analytic plan's."""

from __future__ import annotations

from mpjax import _compat
from mpjax._render.plain_text import bytes_text
from mpjax.planner._results import ARGUMENT_PARTS, Memory
from mpjax.planner._targets import Target

# Below this share of the peak a difference is not worth a sentence.
_WORTH = 0.01

_OLDER_REASONS = {
  (
    "cpu",
    "activations",
  ): "XLA on a CPU computes half precision in float32 and keeps that, and does not recompute what "
  "it has computed before",
  ("cpu", "compute copies"): "XLA on a CPU keeps float32 copies of half-precision operands",
}
_REASONS = ({} if _compat.has_newer_xla() else _OLDER_REASONS) | {
  ("cpu", "temporaries"): "XLA on a CPU fuses less than on an accelerator",
  ("gpu", "activations"): "fusions decide which values are stored and which are computed again",
  ("gpu", "compute copies"): "convolutions read a copy of their weights in another layout",
  (
    "tpu",
    "activations",
  ): "the TPU compiler probably stores in bfloat16 what only products read, keeps small "
  "values on the chip, and recomputes when memory is short",
  ("tpu", "temporaries"): "the TPU compiler keeps small values on the chip",
}


def differences(analytic: Memory, compiled: Memory, arguments: int, target: Target) -> tuple[str, ...]:
  """Returns a sentence for every part in which the two differ by more than a hundredth of the peak.

  Args:
    analytic: the plan without a compiler.
    compiled: the compiler's memory, by part.
    arguments: bytes of all arguments, by the compiler.
    target: the target of the compiler.
  """
  out = []
  ours, theirs = sum(analytic.parts.get(part, 0) for part in ARGUMENT_PARTS), arguments
  if ours != theirs:
    out.append(f"arguments: {ours:,} B analytic, {theirs:,} B compiled: the compiler chooses another layout")
  for part in dict.fromkeys((*analytic.parts, *compiled.parts)):
    ours, theirs = analytic.parts.get(part, 0), compiled.parts.get(part, 0)
    if abs(ours - theirs) <= _WORTH * compiled.peak:
      continue
    if part == "allocator":
      why = "alignment and gaps between buffers"
    elif part == "workspace" and theirs:
      why = "the library's calls asked for this much"
    elif part == "gradients":
      late = "something needs all of them before the first is used"
      why = late if theirs > ours else "the compiler's schedule uses each gradient at once"
    else:
      why = _REASONS.get((target.kind, part), "another schedule")
    out.append(f"{part}: {bytes_text(ours)} analytic, {bytes_text(theirs)} compiled: {why}")
  return tuple(out)
