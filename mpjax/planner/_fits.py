"""Searches over plans: the largest batch that fits a memory, and the cheapest plan that fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from mpjax._render.plain_text import bytes_text
from mpjax.planner._plan import Plan
from mpjax.planner.compiled import CompileError

# Plans a batch size: `plan_of(batch, compile)`, with `compile` as in `mpjax.plan`.
PlanOf = Callable[[int, Any], Plan]
_MOST = 1 << 40
# The analytic guess ends when it is this close, or after this many plans.
_CLOSE, _SECANTS = 0.01, 6
# After this many plans the search bisects instead of following a straight line.
_BENT = 6


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
  """Finds the largest batch whose step fits a memory, by bisection from an analytic guess.

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
  tried: dict[int, tuple[int, Plan | None]] = {}
  guessed: dict[int, tuple[int, Plan | None]] = tried if compile is False else {}

  def peak(units: int, how: bool | str, known: dict[int, tuple[int, Plan | None]]) -> int:
    """Returns the peak of a batch, planned only once; above `memory` if the compiler gave up."""
    if units not in known:
      if progress is not None:
        progress(units * multiple, low * multiple, (high or 0) * multiple)
      try:
        found = plan_of(units * multiple, how)
      except CompileError as error:
        if not error.out_of_memory:
          raise
        known[units] = (memory + 1, None)
        return memory + 1
      gave_up = how is not False and found.compiled is None and _too_large(found)
      known[units] = (memory + 1 if gave_up else found.peak, found)
    return known[units][0]

  low, high = 0, 0
  limit = most // multiple
  if limit < 1:
    raise ValueError(f"most={most}: expected at least one multiple of {multiple}")
  units = _guess(lambda units: peak(units, False, guessed), memory, limit)
  while high - low != 1:
    peak(units, compile, tried)
    high = min((u for u, (size, _) in tried.items() if size > memory), default=0)
    low = max((u for u in tried if tried[u][0] <= memory and (u < high or not high)), default=0)
    if high == 1:
      needs, found = tried[1]
      known = f"it needs {bytes_text(needs)}" if not _is_gave_up(found, needs) else "its compiler gives up"
      raise ValueError(
        f"not even a batch of {multiple} fits {bytes_text(memory)}: {known}; choose another policy, a "
        "smaller model, or recompute more"
      )
    if low >= limit:
      break
    units = min(_next(low, high, tried, memory), limit)
  plan = tried[low][1]
  assert plan is not None
  above = tried.get(high)
  sizes = tuple((u * multiple, p if not _is_gave_up(found, p) else 0) for u, (p, found) in tried.items())
  return Fit(
    batch=low * multiple,
    plan=plan,
    next_batch=high * multiple if high else None,
    next_peak=0 if above is None or _is_gave_up(above[1], above[0]) else above[0],
    memory=memory,
    tried=sizes,
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
  fitting = [plan for plan in plans if plan.peak <= memory and not _too_large(plan)]
  if not fitting:
    smallest = min(plans, key=lambda plan: plan.peak)
    raise ValueError(
      f"none of {len(plans)} choices fits {bytes_text(memory)}: the smallest, {smallest.label}, needs "
      f"{bytes_text(smallest.peak)}"
    )
  timed = all(plan.time is not None for plan in fitting)

  def cost(plan: Plan) -> tuple[float, int]:
    if timed and plan.time is not None:
      return plan.time.seconds, plan.peak
    return float(sum(product.flops for product in plan.products)), plan.peak

  return min(fitting, key=cost)


def _guess(peak: Callable[[int], int], memory: int, limit: int) -> int:
  """Returns how many multiples fit by the analytic peak, which is nearly linear in the batch."""
  low, high = 1, min(2, limit)
  below, above = peak(low), peak(high)
  for _ in range(_SECANTS if high > low else 0):
    units = (
      low + int((memory - below) / max(1e-9, (above - below) / (high - low))) if above > below else 2 * high
    )
    units = min(max(1, units), limit)
    if units in (low, high):
      break
    low, below, high = high, above, units
    above = peak(high)
    if abs(above - memory) < _CLOSE * memory:
      break
  return high


def _next(low: int, high: int, tried: dict[int, tuple[int, Plan | None]], memory: int) -> int:
  """Returns the next size to try: where a line through the two bounds meets the memory, or the middle."""
  if not high:
    return _beyond(low, tried, memory)
  above = tried[high][0]
  if not low:
    return _below(high, tried, memory)
  if above <= memory + 1 or len(tried) > _BENT:  # no figure from the compiler, or no straight line
    return (low + high) // 2
  at = low + round((memory - tried[low][0]) / max(1, above - tried[low][0]) * (high - low))
  return min(max(at, low + 1), high - 1)


def _beyond(low: int, tried: dict[int, tuple[int, Plan | None]], memory: int) -> int:
  """Returns a larger size than all that fit so far: where a line through the last two meets the memory."""
  smaller = max((units for units in tried if units < low), default=0)
  if not smaller or tried[low][0] <= tried[smaller][0]:
    return low + max(1, low // 4 if not smaller else low)
  each = (tried[low][0] - tried[smaller][0]) / (low - smaller)
  return low + max(1, min(int((memory - tried[low][0]) / each) + 1, 8 * low))


def _below(high: int, tried: dict[int, tuple[int, Plan | None]], memory: int) -> int:
  """Returns a smaller size than all that did not fit: on a line through the two smallest, or half."""
  above, larger = tried[high][0], min((units for units in tried if units > high), default=0)
  if above <= memory + 1 or len(tried) > _BENT:
    return max(1, high // 2)
  if not larger or tried[larger][0] <= above:
    return max(1, min(high - 1, int(high * memory / above)))
  each = (tried[larger][0] - above) / (larger - high)
  return max(1, min(high - 1, high - int((above - memory) / each) - 1))


def _too_large(plan: Plan) -> bool:
  return any(note.startswith("the compiler failed, out of memory") for note in plan.notes)


def _is_gave_up(plan: Plan | None, peak: int) -> bool:
  return plan is None or plan.peak != peak
