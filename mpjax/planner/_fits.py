"""Searches over plans: the largest batch that fits a memory, and the cheapest plan that fits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

from mpjax._render.plain_text import bytes_text
from mpjax.planner._report import Plan
from mpjax.planner.compiled._compile import CompileError

# Plans a batch size: `plan_of(batch, compile)`, with `compile` as in `mpjax.plan`.
PlanOf = Callable[[int, Any], Plan]
_MOST = 1 << 40
# Each plan of this number bisects instead of following a straight line, since bytes may grow otherwise.
_BISECTS = 3


@dataclasses.dataclass(frozen=True)
class Fit:
  """The largest batch that fits.

  Attributes:
    batch: its size.
    plan: its plan.
    next_batch: the next larger size, which does not fit; `None` if the search ended at its bound.
    next_peak: bytes that the next larger size needs; 0 if its compiler gave up.
    memory: bytes of memory to fill.
    tried: (size, peak) in the order of the search; the peak is 0 if the compiler gave up.
  """

  batch: int
  plan: Plan
  next_batch: int | None
  next_peak: int
  memory: int
  tried: tuple[tuple[int, int], ...]

  def __str__(self) -> str:
    above = ""
    if self.next_batch is not None:
      needs = f"needs {bytes_text(self.next_peak)}" if self.next_peak else "the compiler finds too large"
      above = f"; {self.next_batch} {needs}"
    return (
      f"largest batch that fits {bytes_text(self.memory)}: {self.batch} ({bytes_text(self.plan.peak)}){above}"
    )


def largest_batch(
  plan_of: PlanOf,
  memory: int,
  *,
  multiple: int = 1,
  most: int = _MOST,
  compile: bool | str = "auto",
  progress: Callable[[int, int, int], None] | None = None,
) -> Fit:
  """Finds the largest batch whose step fits a memory, from an analytic guess.

  ```python
  def plan_of(size, compile):
    rows = jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), batch)
    return mpjax.plan(step, state, rows, target="h200", compile=compile)

  print(mpjax.largest_batch(plan_of, memory=141 * 10**9, compile=False))
  ```

  Args:
    plan_of: function from a batch size and `compile` to its `Plan`.
    memory: bytes of one device's memory.
    multiple: sizes are multiples of this number (devices times micro-batches).
    most: the largest size to consider.
    compile: as in `mpjax.plan`: whether the compiler's peak decides, or only the analytic peak.
    progress: called with (batch, lower bound, upper bound) before each plan; an upper bound of 0 is not known
      yet.

  Returns:
    A `Fit` with the size, its plan, and the next larger size.

  Raises:
    ValueError: if the smallest batch does not fit; the message says what it needs.
  """
  if multiple < 1 or memory <= 0:
    raise ValueError(f"memory={memory}, multiple={multiple}: expected positive numbers")
  limit = most // multiple
  if limit < 1:
    raise ValueError(f"most={most}: expected at least one multiple of {multiple}")
  plans: dict[int, Plan] = {}

  def search(how: bool | str, units: int) -> dict[int, float]:
    """Returns the bytes of sizes, infinite if the compiler gives up, in the order of the search."""
    tried: dict[int, float] = {}
    while True:
      low, high = _bounds(tried, memory)
      if high - low == 1 or low >= limit:
        return tried
      units = min(_next(low, high, tried, memory) if tried else units, limit)
      if progress is not None:
        progress(units * multiple, low * multiple, high * multiple)
      tried[units] = math.inf
      try:
        plans[units] = plan_of(units * multiple, how)
        if how is False or not plans[units].out_of_memory:
          tried[units] = plans[units].peak
      except CompileError as error:
        if not error.out_of_memory:
          raise

  start = 1 if compile is False else max(1, _bounds(search(False, 1), memory)[0])
  tried = search(compile, start)
  low, high = _bounds(tried, memory)
  if not low:
    known = f"it needs {bytes_text(tried[1])}" if tried[1] < math.inf else "its compiler gives up"
    raise ValueError(
      f"not even a batch of {multiple} fits {bytes_text(memory)}: {known}; choose another policy, a "
      "smaller model, or recompute more"
    )
  peaks = {units: 0 if needs == math.inf else int(needs) for units, needs in tried.items()}
  return Fit(
    batch=low * multiple,
    plan=plans[low],
    next_batch=high * multiple if high else None,
    next_peak=peaks.get(high, 0),
    memory=memory,
    tried=tuple((units * multiple, needs) for units, needs in peaks.items()),
  )


def cheapest(plans: Sequence[Plan], memory: int) -> Plan:
  """Returns the plan with the shortest time among the plans that fit a memory; for equal times, the smallest.

  ```python
  plans = [
    mpjax.plan(step, state, batch, policy=policy, target="h200", compile=False)
    for policy in ("fp32", "bf16", "fp8")
  ]
  print(mpjax.cheapest(plans, memory=141 * 10**9).label)
  ```

  Args:
    plans: plans for the same target.
    memory: bytes of one device's memory.

  Returns:
    One of `plans`. Its time is the estimate if the target has published peak rates, else the FLOPs of the
    matrix products.

  Raises:
    ValueError: if no plan fits; the message says what the smallest needs.
  """
  if not plans:
    raise ValueError("no plans to choose from")
  fitting = [plan for plan in plans if plan.peak <= memory and not plan.out_of_memory]
  if not fitting:
    smallest = min(plans, key=lambda plan: plan.peak)
    raise ValueError(
      f"none of {len(plans)} choices fits {bytes_text(memory)}: the smallest, {smallest.label}, needs "
      f"{bytes_text(smallest.peak)}"
    )
  times = [plan.time.seconds for plan in fitting if plan.time is not None]
  if len(times) < len(fitting):
    times = [float(sum(plan.matrix_flops().values())) for plan in fitting]
  return min(zip(times, fitting, strict=True), key=lambda choice: (choice[0], choice[1].peak))[1]


def _bounds(tried: dict[int, float], memory: int) -> tuple[int, int]:
  """Returns the largest size that fits below the smallest that does not, and that; 0 where none is known."""
  high = min((units for units, needs in tried.items() if needs > memory), default=0)
  return max((u for u, needs in tried.items() if needs <= memory and (u < high or not high)), default=0), high


def _next(low: int, high: int, tried: dict[int, float], memory: int) -> int:
  """Returns a size in the bounds: where a line through the nearest two meets the memory, or the middle."""
  guess = (low + high) // 2 if high else low + max(1, low // 4)
  known = sorted((u for u in tried if tried[u] < math.inf), key=lambda u: abs(tried[u] - memory))[:2]
  if len(known) == 2 and (not high or (len(tried) % _BISECTS and tried[high] < math.inf)):
    first, second = sorted(known)
    slope = (tried[second] - tried[first]) / (second - first)
    if slope > 0:
      guess = second + math.floor((memory - tried[second]) / slope) + (not high)
  return max(low + 1, min(guess, high - 1 if high else 10 * low))
