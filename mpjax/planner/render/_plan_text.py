"""Plans as named tables, with one column for each plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from mpjax._render.plain_text import bytes_text, with_prefix
from mpjax._render.text_sections import (
  TEXT_WIDTH,
  TextColumn,
  TextRow,
  TextSection,
  beside,
  of_each,
)
from mpjax.planner._results import (
  ARGUMENT_PARTS,
  TIME_PARTS,
  TRANSIENT_PARTS,
  PlanFigures,
  ProductGroup,
  Time,
)
from mpjax.planner.render._plan_conclusions import conclusions, each_once

NO_FIT = "DOES NOT FIT"

_WIDE = 100  # tables of at least this width show all columns
_FIGURES = frozenset({"devices", "count", "bytes", "extra", "FLOPs", "needs", "share", "time", "floor"})
_PROSE = frozenset({"module", "why", "plan", "from"})
_MOST_ACTIVATIONS = 8
_MOST_PRODUCTS = 10
_MOST_MODULES = 10


class _Room(NamedTuple):
  """The widths of columns: long figures also show bytes per parameter."""

  first: int  # width of the names of rows
  cell: int
  long: bool


_LONG = _Room(26, 21, True)  # `123.45 GB   16.00 B/p`
_SHORT = _Room(18, 12, False)  # `123.45 GB`, `matrix units`
_GAP = 2  # between columns


def sections_of(plans: Sequence[PlanFigures], width: int = TEXT_WIDTH) -> Iterator[TextSection]:
  """Yields the tables of plans: first the memory that they need, then the parts."""
  room = _LONG if len(plans) * (_LONG.cell + _GAP) <= width - _LONG.first else _SHORT
  word = max((len(word) for plan in plans for word in plan.label.split()), default=0)
  abreast = max(1, (width - room.first) // (max(room.cell, word) + _GAP))
  groups = [plans[i : i + abreast] for i in range(0, len(plans), abreast)]
  labels = [plan.label for plan in plans]
  if plans:
    yield _lead(plans)
  yield from (_memory(some, room) for some in groups)
  yield from of_each(labels, [_activations(plan, width) for plan in plans])
  yield from filter(None, (_matrix_units(some, room) for some in groups))
  yield from of_each(labels, map(_products, plans))
  yield from of_each(labels, map(_fused, plans))
  yield from filter(None, [_collectives(plans)])
  yield from filter(None, map(_time, groups))
  yield from filter(None, map(_time_by_module, groups))
  if notes := _said(plans, lambda plan: (*([f"fp8: {plan.fp8}"] if plan.fp8 else []), *plan.notes)):
    yield TextSection("Notes", lines=notes, name="notes")


def _lead(plans: Sequence[PlanFigures]) -> TextSection:
  """Returns the first table: the step and the target, what each plan needs, and whether it fits."""
  subjects = list(dict.fromkeys(plan.subject for plan in plans if plan.subject))
  floors = any(plan.floor for plan in plans)
  columns = _columns("plan needs share" + " time mostly floor" * floors)
  columns[2] = columns[2]._replace(heading=f"of {_whose(plans)}")
  rows = []
  for plan in plans:
    time = [_seconds(plan.time.seconds), largest_part(plan.time)] if plan.time else ["-", ""]
    time += [_seconds(plan.floor.seconds) if plan.floor else "-"]
    rows.append(TextRow([plan.label, bytes_text(plan.peak), _fit(plan), *(time if floors else ())]))
  names = "; ".join(subjects) or ", ".join(plan.label for plan in plans)
  facts = _said(plans, lambda plan: [_facts(plan)])
  said = conclusions(plans)
  return TextSection(f"Plan of a step: {names}", columns, [rows], [*facts, *said], "summary")


def _facts(plan: PlanFigures) -> str:
  """Returns the target of a plan, its memory, and the number of trained parameters."""
  device = f"target {plan.target}: {plan.device}" if plan.device != plan.target else f"target {plan.target}"
  has = f"with {bytes_text(plan.device_memory)} of memory" if plan.device_memory else "of unknown memory"
  count = f"{plan.devices} devices {has} each" if plan.devices > 1 else f"1 device {has}"
  takes = ""
  if plan.room < plan.device_memory:
    share = f"{percent_text(plan.room / plan.device_memory)}, XLA_PYTHON_CLIENT_MEM_FRACTION"
    takes = f", of which JAX takes {bytes_text(plan.room)} ({share})"
  return f"{device}; {count}{takes}; {plan.parameters:,} parameters"


def _whose(plans: Sequence[PlanFigures]) -> str:
  """Returns the name of the memory that shares refer to."""
  return "JAX's memory" if any(p.room < p.device_memory for p in plans) else "device memory"


def _memory(plans: Sequence[PlanFigures], room: _Room) -> TextSection:
  per_parameter = any(plan.parameters for plan in plans)

  def row(name: str, counts: Iterable[int | None], strong: bool = False) -> TextRow:
    cells = [_bytes_cell(count, plan, room.long) for count, plan in zip(counts, plans, strict=True)]
    return TextRow([name, *cells], strong)

  def total(name: str, counts: Sequence[int | None]) -> Iterator[TextRow]:
    yield row(name, counts, strong=True)
    if per_parameter and not room.long:
      shares = [
        None if count is None or not plan.parameters else count / plan.parameters
        for count, plan in zip(counts, plans, strict=True)
      ]
      yield _row("  per parameter", shares, _per_parameter)

  def parts(names: Iterable[str]) -> Iterator[TextRow]:
    for name in names:
      if any(name in plan.memory.parts for plan in plans):
        yield row(name, [plan.memory.parts.get(name) for plan in plans])
      if name == "optimizer state":
        for slot in _names(plan.memory.optimizer for plan in plans):
          yield row(f"  {slot}", [plan.memory.optimizer.get(slot) for plan in plans])

  state = [part for part in ARGUMENT_PARTS if part != "batch"]
  persistent = [sum(plan.memory.parts.get(part, 0) for part in state) for plan in plans]
  gathered = [plan.memory.gathered for plan in plans]
  groups = [
    [*parts(state), *total("persistent (state)", persistent)],
    [*parts(("batch", *TRANSIENT_PARTS)), *total("peak, analytic", [p.memory.peak for p in plans])],
    _compiled(plans, row, total),
    _at_once(plans, row, total),
    [
      _row(f"peak of {_whose(plans)}", plans, _fit, strong=True),
      *([row("gathered at once", gathered)] if any(gathered) else ()),
      *_on_host(plans, row),
      row("inference weights", [plan.inference for plan in plans]),
      row("checkpoint", [plan.checkpoint for plan in plans]),
    ],
  ]
  lines = ["B/p: bytes per parameter."] if per_parameter and room.long else []
  lines += _said(plans, lambda plan: plan.compiled.difference if plan.compiled else ())
  return beside("Memory of one device", [plan.label for plan in plans], groups, lines, name="memory")


_Row = Callable[..., TextRow]
_Rows = Callable[..., Iterator[TextRow]]


def _on_host(plans: Sequence[PlanFigures], row: _Row) -> list[TextRow]:
  """Returns the rows of what is in the host's memory, and of what each step copies; empty if nothing is."""
  hosts = [plan.host for plan in plans]
  names = {"held": "on the host", "to_device": "  to the device", "to_host": "  to the host"}
  return [row(name, [h and getattr(h, key) for h in hosts]) for key, name in names.items() if any(hosts)]


def _at_once(plans: Sequence[PlanFigures], row: _Row, total: _Rows) -> list[TextRow]:
  """Returns the rows that rules of thumb count: all weights, copies, gradients and optimiser state."""
  states = [plan.memory.training_state for plan in plans]
  names = _names(states)
  if not names:
    return []
  parts = [row(f"  {name}", [state.get(name) for state in states]) for name in names]
  return [*total("training state, all at once", [sum(state.values()) for state in states]), *parts]


def _compiled(plans: Sequence[PlanFigures], row: _Row, total: _Rows) -> list[TextRow]:
  """Returns the compiler's rows; empty if no plan is compiled."""
  compiled = [plan.compiled for plan in plans]
  if not any(compiled):
    return []
  rows = [
    _row("by the compiler", [""] * len(plans)),
    row("  arguments", [c and c.arguments for c in compiled]),
    row("  outputs", [c and c.outputs for c in compiled]),
    row("  less aliases", [c and -c.aliases for c in compiled]),
    row("  temporaries", [c and c.temporaries for c in compiled]),
    *total("peak, compiled", [c and c.peak for c in compiled]),
    _row("  explained by parts", [c and c.explained for c in compiled], percent_text),
  ]
  for part in TRANSIENT_PARTS:
    counts = [c and c.memory.parts.get(part) for c in compiled]
    if any(counts):
      rows.append(row(f"    {part}", counts))
  rows.append(_row("  time to compile", [c and c.seconds for c in compiled], _seconds))
  return rows


def _activations(plan: PlanFigures, width: int) -> TextSection | None:
  saved = plan.memory.saved
  if not saved:
    return None
  operations = width >= _WIDE
  columns = _columns(f"module line {'operation ' * operations}dtype shape count bytes")
  rows = [
    TextRow(
      [
        s.path,
        s.source,
        *([s.operation] if operations else []),
        *(s.dtype, _by(s.shape), str(s.count), bytes_text(s.nbytes)),
      ]
    )
    for s in saved[:_MOST_ACTIVATIONS]
  ]
  line = f"All saved activations, at their maximum: {bytes_text(plan.memory.saved_bytes)}."
  at_peak = plan.memory.parts.get("activations", 0)
  if bytes_text(at_peak) != bytes_text(plan.memory.saved_bytes):
    line += f" The peak of all memory is at another moment, with {bytes_text(at_peak)} of them (analytic)."
  return TextSection("Largest saved activations", columns, [rows], [line], "activations")


def _matrix_units(plans: Sequence[PlanFigures], room: _Room) -> TextSection | None:
  flops = [plan.matrix_flops() for plan in plans]
  kernels = [plan.compiled.kernels if plan.compiled else {} for plan in plans]
  if not any(flops) and not any(kernels):
    return None

  def rows(by_name: list[dict[str, int]], prefix: str = "") -> list[TextRow]:
    return [
      TextRow([prefix + name, *(_flops_cell(had.get(name), sum(had.values()), room.long) for had in by_name)])
      for name in _names(by_name)
    ]

  shares = [plan.eligible if plan.products else None for plan in plans]
  whole = _row("all", [sum(had.values()) for had in flops], lambda count: with_prefix(count, "FLOP"))
  groups = [
    [
      *([] if room.long else [whole]),
      *rows(flops),
      _row("eligible at full rate", shares, percent_text, strong=True),
    ],
    [_row("by the compiler", [""] * len(plans)), *rows(kernels, "  ")] if any(kernels) else [],
  ]
  title = "Matrix products: FLOPs of one step on one device"
  return beside(title, [p.label for p in plans], groups, name="products")


def _products(plan: PlanFigures) -> TextSection | None:
  rest = sorted((p for p in plan.products if not p.eligible), key=lambda p: -p.flops)
  if not rest:
    return None
  title = "Products below the full rate of the matrix units"
  if len(rest) == len(plan.products) and all(p.padded == p.shape for p in rest):
    # Padding does not help: no product has matrix units, and each row would repeat that.
    lines = [f"all of them: {why}" for why in dict.fromkeys(p.why for p in rest)]
    return TextSection(title, lines=lines, name="products")
  whole = max(1, sum(p.flops for p in plan.products))
  rows = []
  for p in rest[:_MOST_PRODUCTS]:
    module = f"{p.path} ({p.phase})" if p.phase else p.path
    shape = f"{p.batch} of {_by(p.shape)}" if p.batch > 1 else _by(p.shape)
    rows.append(TextRow([module, p.source, shape, *_padding(p), percent_text(p.flops / whole), p.why]))
  others = rest[_MOST_PRODUCTS:]
  lines = [f"{len(others)} more have {percent_text(sum(p.flops for p in others) / whole)} of the FLOPs."]
  columns = _columns("module line MxNxK padded extra FLOPs why")
  return TextSection(title, columns, [rows], lines if others else (), "products")


def _fused(plan: PlanFigures) -> TextSection | None:
  rows = []
  for kernel in plan.fused[:_MOST_PRODUCTS]:
    module = f"{kernel.path} ({kernel.phase})".lstrip() if kernel.phase else kernel.path
    stated = with_prefix(kernel.flops, "FLOP") if kernel.flops else "not stated"
    rows.append(
      TextRow([module, kernel.source, kernel.name, ", ".join(kernel.operands), str(kernel.count), stated])
    )
  others = plan.fused[_MOST_PRODUCTS:]
  lines = [f"{len(others)} more."] if others else []
  lines.append("The FLOPs of kernels are not in the figures of products, nor in the time floor.")
  columns = _columns("module line kernel operands count FLOPs")
  return TextSection("Fused kernels", columns, [rows], lines, "kernels") if rows else None


def _collectives(plans: Sequence[PlanFigures]) -> TextSection | None:
  columns = _columns("plan operation dtype devices count bytes from")
  cells = lambda c: [
    c.operation,
    c.dtype,
    str(c.group or "-"),
    str(c.count),
    bytes_text(c.nbytes),
    ", ".join(c.sources),
  ]
  groups = [[TextRow([plan.label, *cells(c)]) for c in plan.collectives] for plan in plans]
  if not any(groups):
    return None
  stated = any(plan.collectives and plan.compiled is None for plan in plans)
  said = ["Without the compiler: what the step states itself, not what a compiler adds to it."]
  title = "Collectives of one step on one device"
  return TextSection(title, columns, groups, said if stated else [], "collectives")


def _time(plans: Sequence[PlanFigures]) -> TextSection | None:
  """Returns the estimated time by part, the rates, and the floor."""
  floors, times = [plan.floor for plan in plans], [plan.time for plan in plans]
  if not any(floors):
    return None
  groups = []
  if any(times):
    rows = [_row("time", [t and t.seconds for t in times], _seconds, strong=True)]
    for name in TIME_PARTS:
      if any(t and name in t.parts for t in times):
        rows.append(_row(f"  {name}", [t and t.parts.get(name) for t in times], _seconds))
    if any(t and t.hidden for t in times):
      rows.append(_row("hidden by other work", [t and t.hidden for t in times], _seconds))
    groups.append(rows + _rates(plans))
  rows = [_row("no step is faster than", [f and f.seconds for f in floors], _seconds, strong=True)]
  for name in _names(floor.parts for floor in floors if floor):
    rows.append(_row(f"  {name}", [f and f.parts.get(name) for f in floors], _seconds))
  rows.append(_row("bound by", [f and f.bound for f in floors]))
  rows.append(_row("bytes read and written", [f and f.touched_bytes for f in floors], bytes_text))
  rows.append(_row("bytes moved at least", [f and f.moved_bytes for f in floors], bytes_text))
  groups.append(rows)
  origins = _said(plans, lambda p: [f"by the {p.time.source}, +-{100 * p.time.error:.0f}%"] if p.time else [])
  lines = [f"The time is an estimate {origin}." for origin in origins]
  lines.append("The floor is that of the target's published peaks. It bounds the time from below.")
  for cache in dict.fromkeys(f.cache for f in floors if f and f.moved_bytes < f.touched_bytes):
    lines.append(
      f"A cache of {bytes_text(cache)} may keep that many bytes of saved activations; the bytes moved leave "
      "them out."
    )
  return beside("Time of a step", [plan.label for plan in plans], groups, lines, name="time")


def _rates(plans: Sequence[PlanFigures]) -> list[TextRow]:
  rows = []
  for item in dict.fromkeys(plan.item for plan in plans if plan.throughput):
    counts = [plan.throughput if plan.item == item else None for plan in plans]
    rows.append(_row(f"{item} a second", counts, lambda count: f"{count:,.0f}"))
  if any(plan.utilisation for plan in plans):
    rows.append(_row("model FLOPs utilisation", [p.utilisation or None for p in plans], percent_text))
  return rows


def _time_by_module(plans: Sequence[PlanFigures]) -> TextSection | None:
  times = [plan.time for plan in plans]
  total: Counter[str] = Counter()
  for time in times:
    total.update(time.modules if time else {})
  if not total:
    return None
  shown = [name for name, _ in total.most_common(_MOST_MODULES)]
  rows = [_row(name or "(no module)", [t and t.modules.get(name) for t in times], _seconds) for name in shown]
  others = [t and sum(s for name, s in t.modules.items() if name not in shown) for t in times]
  if any(others):
    rows.append(_row("others", others, _seconds))
  return beside("Time by module", [plan.label for plan in plans], [rows], name="time")


def largest_part(time: Time) -> str:
  """Returns the kind of work that takes the most time; empty for no time."""
  return max(time.parts, key=lambda name: time.parts[name], default="")


def _row(
  name: str, values: Iterable[Any], shown: Callable[[Any], str] = str, strong: bool = False
) -> TextRow:
  """Returns a row of values, with a dash for `None`."""
  return TextRow([name, *("-" if value is None else shown(value) for value in values)], strong)


def _columns(headings: str) -> list[TextColumn]:
  """Returns columns with these one-word headings."""
  return [TextColumn(name, right=name in _FIGURES, folds=name in _PROSE) for name in headings.split()]


def _said(plans: Sequence[PlanFigures], of: Callable[[PlanFigures], Iterable[str]]) -> list[str]:
  """Returns each sentence of the plans once, with the names of its plans unless all plans have it."""
  return [f"{whose}{sentence}" for sentence, whose in each_once(plans, of)]


def _names(dictionaries: Iterable[Iterable[str]]) -> list[str]:
  return list(dict.fromkeys(name for dictionary in dictionaries for name in dictionary))


def _bytes_cell(count: int | None, plan: PlanFigures, long: bool) -> str:
  if count is None:
    return "-"
  if not plan.parameters or not long:
    return bytes_text(count)
  return f"{bytes_text(count)}  {count / plan.parameters:6.2f} B/p"


def _per_parameter(share: float) -> str:
  return f"{share:.2f} B"


def _flops_cell(flops: int | None, whole: int, long: bool) -> str:
  if flops is None:
    return "-"
  share = percent_text(flops / max(1, whole))
  return f"{with_prefix(flops, 'FLOP')}  {share:>7}" if long else share


def _fit(plan: PlanFigures) -> str:
  if not plan.room:
    return "not known"
  share = percent_text(plan.peak / plan.room)
  return f"{share}  {NO_FIT}" if plan.peak > plan.room else share


def percent_text(share: float) -> str:
  """Returns a share as `99.9%`; only a whole is shown as 100.0%, and only nothing as 0.0%."""
  if 0 < share < 5e-4:
    return "<0.1%"
  return f"{min(100 * share, 99.9) if share < 1 else 100 * share:.1f}%"


def _padding(product: ProductGroup) -> tuple[str, str]:
  """Returns the padded shape, and the share of additional FLOPs."""
  if product.padded == product.shape:
    return "-", "-"
  extra = 100 * (math.prod(product.padded) / max(1, math.prod(product.shape)) - 1)
  return _by(product.padded), f"+{extra:.1f}%" if extra >= 1 else f"+{extra:.2g}%"


def _seconds(seconds: float) -> str:
  return with_prefix(seconds, "s")


def _by(shape: Sequence[int]) -> str:
  return "x".join(map(str, shape)) or "scalar"
