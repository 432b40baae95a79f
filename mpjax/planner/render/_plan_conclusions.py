"""Sentences that compare plans: what does not fit and how to make room, what needs more memory and why."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from mpjax._render.plain_text import bytes_text
from mpjax.formats import narrow_bits
from mpjax.planner._results import TRANSIENT_PARTS, Memory, PlanFigures

_MOST_SHARE = 0.97  # the most of a GPU's memory for a process; the driver and the runtime keep the rest
_WORTH_SAYING = 1e-3  # the least difference, as a share of the peak
_MOST_PARTS = 2
_OF_MORE = 0.1  # the least share of a part in the difference between two plans


def conclusions(plans: Sequence[PlanFigures]) -> list[str]:
  """Returns sentences on what fits where, and on FP8 plans that need more memory than 16-bit ones."""
  return [*_fits(plans), *_fp8(plans)]


def _fits(plans: Sequence[PlanFigures]) -> Iterator[str]:
  for plan in plans:
    if plan.room == plan.device_memory or not plan.room < plan.peak <= plan.device_memory:
      continue
    share = math.ceil(100 * plan.peak / plan.device_memory) / 100
    says = f"{plan.label} fits the device, but not the share of it that JAX takes by default"
    if share <= _MOST_SHARE:
      yield f"{says}: XLA_PYTHON_CLIENT_MEM_FRACTION={share:g} in the environment gives it room."
    else:
      yield f"{says}; a larger share would leave too little for the driver."


def _fp8(plans: Sequence[PlanFigures]) -> Iterator[str]:
  """Yields why an FP8 plan needs more memory than a 16-bit plan of the same step, a surprise to many."""
  for narrow, plan in itertools.product(plans, plans):
    same = (narrow.subject, narrow.target, narrow.devices) == (plan.subject, plan.target, plan.devices)
    if not same or not 0 < _width(narrow) <= 8 or _width(plan) != 16:
      continue
    more = narrow.peak - plan.peak
    if more < _WORTH_SAYING * plan.peak:
      continue
    ours, theirs = _memory(narrow, plan)
    grown = {part: ours.parts.get(part, 0) - theirs.parts.get(part, 0) for part in TRANSIENT_PARTS}
    counts = [part for part in grown if grown[part] > _OF_MORE * more]
    largest = sorted(counts, key=lambda part: -grown[part])[:_MOST_PARTS]
    parts = " and ".join(f"{bytes_text(grown[part])} of {part}" for part in largest)
    more_of = f", with {parts} more" if parts else ""
    yield f"{narrow.label} needs {bytes_text(more)} more than {plan.label}{more_of}: {_reason(narrow, plan)}."


def _reason(narrow: PlanFigures, plan: PlanFigures) -> str:
  less = plan.memory.peak - narrow.memory.peak
  if narrow.compiled and plan.compiled and less > 0:
    return f"because of the compiler's order of operations; the analytic plan needs {bytes_text(less)} less"
  says = (
    "FP8 makes products faster, but activations for the backward pass stay in 16 bits, and FP8 copies of "
    "operands are added to them"
  )
  of_tensors = not narrow.fp8.startswith(("mx", "nvfp4", "per_channel"))
  if not of_tensors or any(narrow_bits(saved.dtype) for saved in narrow.memory.saved):
    return says
  return f"{says}. policy.fp8.saved_activations=fp8 keeps activations in 8 bits"


def _width(plan: PlanFigures) -> int:
  """Returns the bits of the narrowest dtype in which a plan multiplies matrices; 0 without any."""
  widths = {"bfloat16": 16, "float16": 16}
  return min((narrow_bits(dtype) or widths.get(dtype, 32) for dtype in plan.matrix_flops()), default=0)


def memory_of(plan: PlanFigures) -> Memory:
  """Returns the parts of a plan's peak, the compiler's if it has them."""
  return plan.compiled.memory if plan.compiled else plan.memory


def _memory(one: PlanFigures, other: PlanFigures) -> tuple[Memory, Memory]:
  """Returns the parts of both plans, the compiler's if both have them."""
  if one.compiled and other.compiled:
    return memory_of(one), memory_of(other)
  return one.memory, other.memory


def each_once(
  plans: Sequence[PlanFigures], of: Callable[[PlanFigures], Iterable[str]]
) -> Iterator[tuple[str, str]]:
  """Yields each text of the plans once, and the labels of its plans as a lead, empty if all have it."""
  found: dict[str, list[str]] = {}
  for plan in plans:
    for text in dict.fromkeys(of(plan)):
      found.setdefault(text, []).append(plan.label)
  for text, labels in found.items():
    yield text, "" if len(labels) == len(plans) else f"{', '.join(labels)}: "
