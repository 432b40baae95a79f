"""The short answer of a plan: whether it fits, its largest parts, its products, its time, what to change."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence

from mpjax._render.plain_text import bytes_text, table, with_prefix
from mpjax._render.text_sections import answer_lines
from mpjax.planner._results import PlanFigures, ProductGroup, Time
from mpjax.planner.render._plan_conclusions import conclusions, each_once, memory_of
from mpjax.planner.render._plan_text import NO_FIT, largest_part, percent_text

_MOST_PARTS, _MOST_MISSES, _MOST_COLLECTIVES, _MOST_PLANS = 3, 2, 2, 7
_ROOMY = 0.5  # a larger batch is suggested below this share of the memory
_ALIKE = 1e-3  # relative difference of equal times
_SHOWN = 1e-3  # share of the time from which a part is named
_LARGE = 0.2  # outputs are mentioned above this share of the peak
_MISSES = 0.01  # products below the full rate are mentioned above this share of the FLOPs
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8": "fp8", "tensorfloat32": "tf32", "float32": "fp32"}
_WIDE = ("float32", "tensorfloat32")
_PADDING = "pad "  # the beginning of notes on padding
_WAYS_OUT = {
  "activations": "jax.checkpoint around a block (train.recompute=blocks) keeps fewer of them, a smaller "
  "batch or accumulate=2 halves them",
  "workspace": "a smaller batch or accumulate=2 halves it",
  "temporaries": "a smaller batch or accumulate=2 halves them",
  "compute copies": "a mesh with fsdp divides them",
  "gradients": "a mesh with fsdp divides them",
  "optimizer state": "optimizer_dtype: int8 in the policy takes a quarter of it, a mesh with fsdp divides it",
  "master weights": "the policy bf16_lean takes 3 bytes a weight, a mesh with fsdp divides them",
}


def answer(plan: PlanFigures, *, rates: bool = False) -> list[str]:
  """Returns the answer of one plan, in at most eleven lines.

  Args:
    plan: the plan.
    rates: also say tokens, images or rows a second, and the model FLOPs utilisation.
  """
  first = [_title([plan], plan.label), *_memory(plan), *_products(plan), *_fp8([plan])]
  first += [*_kernels(plan), *_collectives(plan), *_time(plan), *(_rates(plan) if rates else ())]
  return answer_lines(first, _notes([plan]), [f"advice: {line}" for line in _advice(plan)], rest=_MORE_NOTES)


def answer_beside(
  plans: Sequence[PlanFigures], first: Sequence[str] = (), *, rates: bool = False
) -> list[str]:
  """Returns the answer for several plans, with a row for each, in at most eleven lines.

  Args:
    plans: the plans, the most important first.
    first: sentences before the table; by default, the plan with the shortest time among those that fit.
    rates: show tokens, images or rows a second and the model FLOPs utilisation, in place of the products.
  """
  products, rate = ["products", "full rate"], [f"{next((p.item for p in plans if p.item), 'rows')}/s", "MFU"]
  names = [*([] if rates else products), "time", "mostly", "at least", *(rate if rates else [])]
  rows = [["policy", "needs", "of memory", *names]]
  rows += [_row(plan, rates=rates) for plan in plans[:_MOST_PLANS]]
  left = {"policy", "products", "mostly"}
  lines = [line for row in table(rows, left=[rows[0].index(n) for n in rows[0] if n in left]) for line in row]
  if plans[_MOST_PLANS:]:
    lines.append(f"{len(plans) - _MOST_PLANS} more in the table summary")
  said = [*_fp8(plans), *conclusions(plans), *_notes(plans)]
  return answer_lines([*(first or _fastest(plans)), _title(plans), *lines], said, rest=_MORE_NOTES)


_MORE_NOTES = "notes left out: {}"


def _fastest(plans: Sequence[PlanFigures]) -> Iterator[str]:
  """Yields a line on the plans with the shortest time among those that fit."""
  fitting = [plan for plan in plans if not plan.room or plan.peak <= plan.room]
  if not fitting:
    yield f"none of {len(plans)} fits"
    return
  times = {plan.label: plan.time for plan in fitting if plan.time}
  if not times:
    return
  least = min(times.values(), key=lambda time: time.seconds)
  best = [name for name, t in times.items() if math.isclose(t.seconds, least.seconds, rel_tol=_ALIKE)]
  yield f"shortest time: {', '.join(best)}, {_about(least)} by the {least.source}"


def _title(plans: Sequence[PlanFigures], label: str = "") -> str:
  """Returns the step that is planned, and the device."""
  subjects = "; ".join(dict.fromkeys(plan.subject for plan in plans if plan.subject))
  counts = dict.fromkeys((plan.target, plan.devices) for plan in plans)
  where = ", ".join(_name_of(name) + (f", {n} devices" if n > 1 else "") for name, n in counts)
  count = plans[0].parameters
  subject = subjects or ("a step" if not count else f"a step of {count:,} parameters")
  return f"{f'plan of {label}' if label else 'plans'} on {where}: {subject}"


def _name_of(target: str) -> str:
  return "this machine" if target == "here" else target


def _memory(plan: PlanFigures) -> Iterator[str]:
  """Yields whether a plan fits, and its largest parts."""
  needs = bytes_text(plan.peak)
  if plan.room:
    whose = "that JAX takes" if plan.room < plan.device_memory else "of a device"
    fits = NO_FIT if plan.peak > plan.room else "fits"
    needs = f"{fits}: {needs} of the {bytes_text(plan.room)} {whose}, {percent_text(plan.peak / plan.room)}"
  else:
    needs += "; the size of the device's memory is not known"
  yield f"memory: {needs} ({'by the compiler' if plan.compiled else 'analytic'})"
  largest = sorted(memory_of(plan).parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
  yield f"  largest: {', '.join(f'{name} {bytes_text(size)}' for name, size in largest)}"
  if host := plan.host:
    each = f"{bytes_text(host.to_device)} to the device and {bytes_text(host.to_host)} back in each step"
    yield f"  on the host: {bytes_text(host.held)}; {each}"


def _products(plan: PlanFigures) -> Iterator[str]:
  """Yields the shares of the matrix FLOPs by dtype, and the products below the full rate."""
  flops = plan.matrix_flops()
  whole = sum(flops.values())
  if not whole:
    return
  shares = ", ".join(f"{dtype} {percent_text(count / whole)}" for dtype, count in flops.items())
  rate = (
    "all at the full rate of the units"
    if plan.eligible == 1
    else f"{percent_text(1 - plan.eligible)} below the full rate of the units"
  )
  yield f"products: {shares} of {with_prefix(whole, 'FLOP')}; {rate}"
  misses = _misses(plan)
  if 1 - plan.eligible < _MISSES or not misses:
    return
  said = []
  for why, modules in list(misses.items())[:_MOST_MISSES]:
    others = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
    said.append(f"{next(iter(modules))}{others} {percent_text(sum(modules.values()) / whole)} ({why})")
  more = len(misses) - _MOST_MISSES
  yield f"  below the full rate: {'; '.join(said)}{f'; {more} more reasons' if more > 0 else ''}"


def _misses(plan: PlanFigures) -> dict[str, Counter[str]]:
  """Returns the FLOPs below the full rate by reason and module, the most first."""
  found: dict[str, Counter[str]] = {}
  for product in sorted(plan.products, key=lambda product: -product.flops):
    if not product.eligible:
      found.setdefault(product.why, Counter())[_name(product)] += product.flops
  return dict(sorted(found.items(), key=lambda item: -item[1].total()))


def _name(product: ProductGroup) -> str:
  return product.path or product.source or product.operation


def _kernels(plan: PlanFigures) -> Iterator[str]:
  if plan.fused:
    names = dict.fromkeys(kernel.name for kernel in plan.fused)
    yield f"fused kernels: {', '.join(list(names)[:_MOST_PARTS])}; not in the products or the least time"


def _collectives(plan: PlanFigures) -> Iterator[str]:
  if not plan.collectives:
    return
  shown = [f"{c.operation} {c.dtype} {bytes_text(c.nbytes)}" for c in plan.collectives[:_MOST_COLLECTIVES]]
  more = len(plan.collectives) - _MOST_COLLECTIVES
  yield f"between devices: {', '.join(shown)}{f', {more} more' if more > 0 else ''}"


def _time(plan: PlanFigures) -> Iterator[str]:
  floor = plan.floor
  if floor is None:
    yield f"time: not known, because {_name_of(plan.target)} has no published peak rates"
    return
  least = f"at least {with_prefix(floor.seconds, 's')} ({floor.bound})"
  if plan.time is None:
    yield f"time: {least}"
    return
  parts = sorted(plan.time.parts.items(), key=lambda part: -part[1])[:_MOST_PARTS]
  parts = [part for part in parts if part[1] >= _SHOWN * plan.time.seconds]
  shown = ", ".join(f"{name} {with_prefix(seconds, 's')}" for name, seconds in parts)
  yield f"time: {_about(plan.time)} by the {plan.time.source}; {least}"
  if shown:
    yield f"  largest: {shown}"


def _about(time: Time) -> str:
  return f"about {with_prefix(time.seconds, 's')} (+-{100 * time.error:.0f}%)"


def _rates(plan: PlanFigures) -> Iterator[str]:
  """Yields the items a second on all devices and on one, and the model FLOPs utilisation."""
  if not plan.throughput:
    yield "rate: not known, because the time is not known"
    return
  one = f", {plan.throughput / plan.devices:,.0f} of each device" if plan.devices > 1 else ""
  of = f"{percent_text(plan.utilisation)} of {with_prefix(plan.peak_flops, 'FLOP/s')}"
  yield f"rate: {plan.throughput:,.0f} {plan.item}/s{one}; model FLOPs utilisation (MFU) {of}"


def _rate_cells(plan: PlanFigures) -> list[str]:
  if not plan.throughput:
    return ["-", "-"]
  return [f"{plan.throughput:,.0f}", percent_text(plan.utilisation)]


def _fp8(plans: Sequence[PlanFigures]) -> list[str]:
  """Returns a line on each FP8 recipe in force."""
  found = each_once(plans, lambda plan: [plan.fp8] if plan.fp8 else [])
  return [f"{whose or 'fp8: '}{text}" for text, whose in found]


def _notes(plans: Sequence[PlanFigures]) -> list[str]:
  """Returns the notes that are not advice: failures first, missing packages last."""
  rank = lambda said: (
    not said[0].startswith("the compiler failed"),
    said[0].startswith("analytic only"),
  )
  found = each_once(plans, lambda plan: [note for note in plan.notes if not note.startswith(_PADDING)])
  return [f"note: {whose}{note}" for note, whose in sorted(found, key=rank)]


def _advice(plan: PlanFigures) -> list[str]:
  """Returns what to change, in at most two sentences."""
  found = [*_for_room(plan), *_for_outputs(plan), *_for_time(plan)]
  if not found and plan.room:
    found = ["nothing to change: it fits, and its products run at the full rate of the matrix units"]
  return found[:2]


def _for_room(plan: PlanFigures) -> Iterator[str]:
  if not plan.room:
    return
  if plan.peak > plan.room:
    if said := conclusions([plan]):
      yield said[0]
    parts = sorted(memory_of(plan).parts.items(), key=lambda part: -part[1])
    name, size = next((part for part in parts if part[0] in _WAYS_OUT), ("", 0))
    if name:
      yield f"{name} {bytes_text(size)}: {_WAYS_OUT[name]}; --fit (mpjax.largest_batch) finds what fits"


def _for_outputs(plan: PlanFigures) -> Iterator[str]:
  outputs = memory_of(plan).parts.get("outputs", 0)
  if plan.memory.optimizer and outputs > _LARGE * plan.peak:
    yield f"outputs {bytes_text(outputs)}: jax.jit(step, donate_argnums=...) writes them where the inputs lie"


def _for_time(plan: PlanFigures) -> Iterator[str]:
  padding = [note for note in plan.notes if note.startswith(_PADDING)]
  flops = plan.matrix_flops()
  first = next(iter(flops), "")
  if plan.floor and (first in _WIDE or " x" in first):
    yield "a policy in half precision (bf16 or fp16) multiplies at a higher rate"
  if padding:
    more = f" ({len(padding) - 1} more in the table notes)" if padding[1:] else ""
    yield padding[0] + more
  if (plan.time and largest_part(plan.time) == "collectives") or (
    plan.floor and plan.floor.bound == "interconnect"
  ):
    yield "reduce_dtype: bfloat16 or gather_dtype: float8_e4m3fn in the policy sends fewer bytes"
  if plan.room and plan.peak < _ROOMY * plan.room:
    yield "a larger batch fits: --fit (mpjax.largest_batch) finds the largest"


def _row(plan: PlanFigures, *, rates: bool) -> list[str]:
  room = "not known"
  if plan.room:
    room = percent_text(plan.peak / plan.room) + (f"  {NO_FIT}" if plan.peak > plan.room else "")
  time, mostly = "-", ""
  if plan.time:
    time, mostly = with_prefix(plan.time.seconds, "s"), largest_part(plan.time)
  floor = with_prefix(plan.floor.seconds, "s") if plan.floor else "-"
  row = [plan.label, bytes_text(plan.peak), room, *([] if rates else _product_cells(plan))]
  return [*row, time, mostly, floor, *(_rate_cells(plan) if rates else [])]


def _product_cells(plan: PlanFigures) -> list[str]:
  flops: dict[str, int] = {}
  for dtype, count in plan.matrix_flops().items():
    dtype, _, passes = dtype.partition(" ")
    name = next((short for full, short in _SHORT.items() if dtype.startswith(full)), dtype)
    name = f"{name} {passes}".rstrip()
    flops[name] = flops.get(name, 0) + count
  whole = max(1, sum(flops.values()))
  first = max(flops, key=lambda name: flops[name], default="-")
  products = first if len(flops) < 2 else f"{first} {percent_text(flops[first] / whole)}"
  return [products, percent_text(plan.eligible) if plan.products else "-"]
