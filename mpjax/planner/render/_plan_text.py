"""Plans as tables, one column a plan: plain text, and in colour where `rich` is installed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpjax._plain_text import bytes_text, fold, table, table_width, with_prefix
from mpjax.planner._results import ARGUMENT_PARTS, TRANSIENT_PARTS, PlanFigures, ProductGroup

if TYPE_CHECKING:
  import rich.console

NO_FIT = "DOES NOT FIT"

_TITLE, _STRONG, _RULE = "bold cyan", "bold", "dim"

_TEXT_WIDTH = 116
_FIRST_WIDTH = 26  # of the names of rows, in tables that have a column a plan
_CELL_WIDTH = 21  # `123.45 GB   16.00 B/p`
_LEAST_WIDTH = 12  # to which a column of prose shrinks
_GAP = 2  # between columns
_FIGURES = frozenset({"count", "bytes", "extra", "FLOPs"})
_PROSE = frozenset({"module", "why", "plan", "from"})
_MOST_ACTIVATIONS = 8
_MOST_PRODUCTS = 10


def as_text(plans: Sequence[PlanFigures]) -> str:
  """Returns plans side by side as plain text, at most 116 columns wide but for long shapes and lines."""
  sections = _sections(plans, _TEXT_WIDTH)
  return "\n\n".join("\n".join(line for line, _ in _lines(section)) for section in sections)


def print_plans(plans: Sequence[PlanFigures], console: rich.console.Console | None = None) -> None:
  """Prints plans side by side, as many of them as the terminal has room for.

  Args:
    plans: to compare; one that does not fit the memory of its device is marked in red.
    console: to print to; standard output if `None`.
  """
  import rich.console
  import rich.text

  console = console or rich.console.Console()
  for i, section in enumerate(_sections(plans, console.width)):
    if i:
      console.print()
    for line, style in _lines(section):
      if style == _RULE and not console.options.ascii_only:
        line = line.replace("-", "\N{BOX DRAWINGS LIGHT HORIZONTAL}")
      text = rich.text.Text(line, style)
      text.highlight_regex(rf"\S+ %  {NO_FIT}", "bold red")
      # A number that the terminal wraps can still be read, one that is cut cannot.
      console.print(text, soft_wrap=True)


class _Column(NamedTuple):
  """A column of a table; the cells of one that `folds` may run over several lines."""

  heading: str
  right: bool = False
  folds: bool = False


class _Row(NamedTuple):
  cells: Sequence[str]
  strong: bool = False


_Groups = Sequence[Sequence[_Row]]


@dataclasses.dataclass(frozen=True)
class _PlanSection:
  """A title, a table whose groups of rows are ruled off, and sentences under it."""

  title: str
  columns: Sequence[_Column] = ()
  groups: _Groups = ()
  lines: Sequence[str] = ()


def _sections(plans: Sequence[PlanFigures], width: int) -> Iterator[_PlanSection]:
  """Returns what there is to say of plans, with tables folded to a width, and headings and sentences too."""
  abreast = max(1, (width - _FIRST_WIDTH) // (_CELL_WIDTH + _GAP))
  beside = [plans[i : i + abreast] for i in range(0, len(plans), abreast)]
  sections: list[_PlanSection | None] = [_header(plans)] if plans else []
  sections += map(_memory, beside)
  sections += _each(plans, _activations)
  sections += map(_matrix_units, beside)
  sections += _each(plans, _products)
  sections.append(_collectives(plans))
  sections += map(_floor, beside)
  notes = _said(plans, lambda plan: plan.notes)
  sections.append(_PlanSection("Notes", lines=notes) if notes else None)
  return (_folded(section, width) for section in sections if section)


def _header(plans: Sequence[PlanFigures]) -> _PlanSection:
  def facts(plan: PlanFigures) -> str:
    device = f"target {plan.target}: {plan.device}" if plan.device != plan.target else f"target {plan.target}"
    has = f"with {bytes_text(plan.device_memory)} of memory" if plan.device_memory else "of unknown memory"
    count = f"{plan.devices} devices {has} each" if plan.devices > 1 else f"1 device {has}"
    return f"{device}; {count}; {plan.parameters:,} parameters"

  names = ", ".join(plan.label for plan in plans)
  return _PlanSection(f"Plan of a step: {names}", lines=_said(plans, lambda plan: [facts(plan)]))


def _memory(plans: Sequence[PlanFigures]) -> _PlanSection:
  per_parameter = any(plan.parameters for plan in plans)

  def row(name: str, counts: Iterable[int | None], strong: bool = False) -> _Row:
    cells = [_bytes_cell(count, plan) for count, plan in zip(counts, plans, strict=True)]
    return _Row([name, *cells], strong)

  def parts(names: Iterable[str]) -> Iterator[_Row]:
    for name in names:
      if any(name in plan.memory.parts for plan in plans):
        yield row(name, [plan.memory.parts.get(name) for plan in plans])
      if name == "optimizer state":
        for slot in _names(plan.memory.optimizer for plan in plans):
          yield row(f"  {slot}", [plan.memory.optimizer.get(slot) for plan in plans])

  state = [part for part in ARGUMENT_PARTS if part != "batch"]
  persistent = [sum(plan.memory.parts.get(part, 0) for part in state) for plan in plans]
  groups = [
    [*parts(state), row("persistent (state)", persistent, strong=True)],
    [*parts(("batch", *TRANSIENT_PARTS)), row("peak, analytic", [p.memory.peak for p in plans], strong=True)],
    _compiled(plans, row),
    _at_once(plans, row),
    [
      _row("peak of device memory", plans, _fit, strong=True),
      row("inference weights", [plan.inference for plan in plans]),
      row("checkpoint", [plan.checkpoint for plan in plans]),
    ],
  ]
  lines = ["B/p: bytes per parameter."] if per_parameter else []
  lines += _said(plans, lambda plan: plan.compiled.difference if plan.compiled else ())
  return _beside("Memory of one device", plans, groups, lines)


def _at_once(plans: Sequence[PlanFigures], row: Callable[..., _Row]) -> list[_Row]:
  """Returns what rules of thumb count: weights, their copies, gradients and optimiser state, all of each."""
  states = [plan.memory.training_state for plan in plans]
  names = _names(states)
  if not names:
    return []
  parts = [row(f"  {name}", [state.get(name) for state in states]) for name in names]
  return [row("training state, all at once", [sum(state.values()) for state in states], strong=True), *parts]


def _compiled(plans: Sequence[PlanFigures], row: Callable[..., _Row]) -> list[_Row]:
  """Returns the compiler's rows; none if no plan is compiled."""
  compiled = [plan.compiled for plan in plans]
  if not any(compiled):
    return []
  rows = [
    _row("by the compiler", [""] * len(plans)),
    row("  arguments", [c and c.arguments for c in compiled]),
    row("  outputs", [c and c.outputs for c in compiled]),
    row("  less aliases", [c and -c.aliases for c in compiled]),
    row("  temporaries", [c and c.temporaries for c in compiled]),
    row("peak, compiled", [c and c.peak for c in compiled], strong=True),
    _row("  explained by parts", [c and c.explained for c in compiled], _percent),
  ]
  for part in TRANSIENT_PARTS:
    counts = [c and c.memory.parts.get(part) for c in compiled]
    if any(counts):
      rows.append(row(f"    {part}", counts))
  rows.append(_row("  time to compile", [c and c.seconds for c in compiled], _seconds))
  return rows


def _activations(plan: PlanFigures) -> _PlanSection | None:
  saved = plan.memory.saved
  if not saved:
    return None
  columns = _columns("module line operation dtype shape count bytes")
  rows = [
    _Row([s.path, s.source, s.operation, s.dtype, _by(s.shape), str(s.count), bytes_text(s.nbytes)])
    for s in saved[:_MOST_ACTIVATIONS]
  ]
  line = f"All activations that are saved, at the worst moment: {bytes_text(plan.memory.saved_bytes)}."
  return _PlanSection("Largest saved activations", columns, [rows], [line])


def _matrix_units(plans: Sequence[PlanFigures]) -> _PlanSection | None:
  flops = [plan.matrix_flops() for plan in plans]
  kernels = [plan.compiled.kernels if plan.compiled else {} for plan in plans]
  if not any(flops) and not any(kernels):
    return None

  def rows(by_name: list[dict[str, int]], prefix: str = "") -> list[_Row]:
    return [
      _Row([prefix + name, *(_flops_cell(had.get(name), sum(had.values())) for had in by_name)])
      for name in _names(by_name)
    ]

  shares = [plan.eligible if plan.products else None for plan in plans]
  groups = [
    [*rows(flops), _row("eligible at full rate", shares, _percent, strong=True)],
    [_row("by the compiler", [""] * len(plans)), *rows(kernels, "  ")] if any(kernels) else [],
  ]
  return _beside("Matrix products: FLOPs of one step on one device", plans, groups)


def _products(plan: PlanFigures) -> _PlanSection | None:
  rest = sorted((p for p in plan.products if not p.eligible), key=lambda p: -p.flops)
  if not rest:
    return None
  whole = max(1, sum(p.flops for p in plan.products))
  rows = []
  for p in rest[:_MOST_PRODUCTS]:
    module = f"{p.path} ({p.phase})" if p.phase else p.path
    shape = f"{p.batch} of {_by(p.shape)}" if p.batch > 1 else _by(p.shape)
    rows.append(_Row([module, p.source, shape, *_padding(p), _percent(p.flops / whole), p.why]))
  others = rest[_MOST_PRODUCTS:]
  lines = [f"{len(others)} more have {_percent(sum(p.flops for p in others) / whole)} of the FLOPs."]
  columns = _columns("module line MxNxK padded extra FLOPs why")
  title = "Products below the full rate of the matrix units"
  return _PlanSection(title, columns, [rows], lines if others else ())


def _collectives(plans: Sequence[PlanFigures]) -> _PlanSection | None:
  columns = _columns("plan operation dtype count bytes from")
  cells = lambda c: [c.operation, c.dtype, str(c.count), bytes_text(c.nbytes), ", ".join(c.sources)]
  groups = [[_Row([plan.label, *cells(c)]) for c in plan.collectives] for plan in plans]
  return _PlanSection("Collectives of one step on one device", columns, groups) if any(groups) else None


def _floor(plans: Sequence[PlanFigures]) -> _PlanSection | None:
  floors = [plan.floor for plan in plans]
  if not any(floors):
    return None
  rows = [_row("floor", [f and f.seconds for f in floors], _seconds, strong=True)]
  for name in _names(floor.parts for floor in floors if floor):
    rows.append(_row(f"  {name}", [f and f.parts.get(name) for f in floors], _seconds))
  rows.append(_row("bound by", [f and f.bound for f in floors]))
  rows.append(_row("bytes moved at least", [f and f.moved_bytes for f in floors], bytes_text))
  line = "At the published peaks of the target. It bounds the time from below and does not predict it."
  return _beside("Time floor: no step is faster than", plans, [rows], [line])


def _beside(
  title: str, plans: Sequence[PlanFigures], groups: _Groups, lines: Sequence[str] = ()
) -> _PlanSection:
  """Returns a section with a column a plan."""
  columns = [_Column("", folds=True), *(_Column(plan.label, right=True) for plan in plans)]
  return _PlanSection(title, columns, groups, lines)


def _row(name: str, values: Iterable[Any], shown: Callable[[Any], str] = str, strong: bool = False) -> _Row:
  """Returns a row of values, with a dash where there is none."""
  return _Row([name, *("-" if value is None else shown(value) for value in values)], strong)


def _each(
  plans: Sequence[PlanFigures], of: Callable[[PlanFigures], _PlanSection | None]
) -> Iterator[_PlanSection]:
  """Yields a section a plan, with its name; alike ones once."""
  found: list[tuple[_PlanSection, list[str]]] = []
  for plan in plans:
    section = of(plan)
    names = next((names for other, names in found if other == section), None)
    if names is not None:
      names.append(plan.label)
    elif section:
      found.append((section, [plan.label]))
  for section, names in found:
    title = f"{section.title}: {', '.join(names)}" if len(plans) > 1 else section.title
    yield dataclasses.replace(section, title=title)


def _columns(headings: str) -> list[_Column]:
  """Returns columns with these headings, a word each."""
  return [_Column(name, right=name in _FIGURES, folds=name in _PROSE) for name in headings.split()]


def _said(plans: Sequence[PlanFigures], of: Callable[[PlanFigures], Iterable[str]]) -> list[str]:
  """Returns the sentences of plans, each once, with the names of its plans before it unless all say it."""
  said: dict[str, list[str]] = {}
  for plan in plans:
    for sentence in dict.fromkeys(of(plan)):
      said.setdefault(sentence, []).append(plan.label)
  return [s if len(who) == len(plans) else f"{', '.join(who)}: {s}" for s, who in said.items()]


def _names(dictionaries: Iterable[Iterable[str]]) -> list[str]:
  return list(dict.fromkeys(name for dictionary in dictionaries for name in dictionary))


def _bytes_cell(count: int | None, plan: PlanFigures) -> str:
  if count is None:
    return "-"
  if not plan.parameters:
    return bytes_text(count)
  return f"{bytes_text(count)}  {count / plan.parameters:6.2f} B/p"


def _flops_cell(flops: int | None, whole: int) -> str:
  return "-" if flops is None else f"{with_prefix(flops, 'FLOP')}  {_percent(flops / max(1, whole)):>7}"


def _fit(plan: PlanFigures) -> str:
  if not plan.device_memory:
    return "not known"
  share = _percent(plan.peak / plan.device_memory)
  return f"{share}  {NO_FIT}" if plan.peak > plan.device_memory else share


def _percent(share: float) -> str:
  """Returns a share as `99.9 %`; one that is short of all is never shown as all."""
  return f"{min(100 * share, 99.9) if share < 1 else 100 * share:.1f} %"


def _padding(product: ProductGroup) -> tuple[str, str]:
  """Returns the padded shape, and how much more there is to multiply."""
  if product.padded == product.shape:
    return "-", "-"
  extra = 100 * (math.prod(product.padded) / max(1, math.prod(product.shape)) - 1)
  return _by(product.padded), f"+{extra:.1f} %" if extra >= 1 else f"+{extra:.2g} %"


def _seconds(seconds: float) -> str:
  return with_prefix(seconds, "s")


def _by(shape: Sequence[int]) -> str:
  return "x".join(map(str, shape)) or "scalar"


def _folded(section: _PlanSection, width: int) -> _PlanSection:
  """Breaks the lines of a section's headings, sentences and cells of prose, so that it is narrow enough."""
  section = dataclasses.replace(
    section, title=fold(section.title, width), lines=[fold(line, width) for line in section.lines]
  )
  if not section.columns:
    return section
  rows = [row for group in section.groups for row in group]
  widths = [
    max([len(row.cells[i]) for row in rows] + [len(column.heading)] * column.folds, default=0)
    for i, column in enumerate(section.columns)
  ]
  widths = [max(w, min(len(c.heading), _CELL_WIDTH)) for w, c in zip(widths, section.columns, strict=True)]
  folding = [i for i, column in enumerate(section.columns) if column.folds]
  while sum(widths) + _GAP * (len(widths) - 1) > width:
    widest = max(folding, key=lambda i: widths[i])
    if widths[widest] <= _LEAST_WIDTH:
      break
    widths[widest] -= 1
  headings = _folded_cells([column.heading for column in section.columns], widths)
  columns = [c._replace(heading=heading) for c, heading in zip(section.columns, headings, strict=True)]
  groups = [
    [row._replace(cells=_folded_cells(row.cells, widths)) for row in group]
    for group in section.groups
    if group
  ]
  return dataclasses.replace(section, columns=columns, groups=groups)


def _folded_cells(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
  return [fold(cell, width) for cell, width in zip(cells, widths, strict=True)]


def _lines(section: _PlanSection) -> Iterator[tuple[str, str]]:
  """Yields the lines of a section, with the style of each for terminals that have any."""
  yield from ((line, _TITLE) for line in section.title.split("\n"))
  if section.columns:
    headings = [column.heading for column in section.columns]
    rows = [headings, *(row.cells for group in section.groups for row in group)]
    drawn = iter(table(rows, left=[i for i, column in enumerate(section.columns) if not column.right]))
    yield from ((line, _STRONG) for line in next(drawn))
    for group in section.groups:
      yield "-" * table_width(rows), _RULE
      for row in group:
        yield from ((line, _STRONG if row.strong else "") for line in next(drawn))
  yield from ((line, "") for line in section.lines)
