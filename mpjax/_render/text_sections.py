"""Sections of a report for a terminal: a title, a table folded to a width, and sentences."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from mpjax._render.plain_text import fold, table, table_width

if TYPE_CHECKING:
  import rich.console

TEXT_WIDTH = 116  # of a report that is not on a terminal
ANSWER_LINES = 11  # of an answer, without the line that says how to ask for more

_TITLE, _STRONG, _RULE = "bold cyan", "bold", "dim"
_GAP = 2  # between columns
_LEAST_WIDTH = 10  # of a column of prose
_HEADING_WIDTH = 21  # largest width that a heading gives a column of numbers


class TextColumn(NamedTuple):
  """A column of a table; if it `folds`, its cells may take several lines."""

  heading: str
  right: bool = False
  folds: bool = False


class TextRow(NamedTuple):
  """A row of a table."""

  cells: Sequence[str]
  strong: bool = False


RowGroups = Sequence[Sequence[TextRow]]


@dataclasses.dataclass(frozen=True)
class TextSection:
  """A title, a table with a rule above each group of rows, and sentences under it.

  A reader asks for it by its `name`, a short word; several sections may share a name.
  """

  title: str
  columns: Sequence[TextColumn] = ()
  groups: RowGroups = ()
  lines: Sequence[str] = ()
  name: str = ""


def beside(
  title: str, labels: Iterable[str], groups: RowGroups, lines: Sequence[str] = (), *, name: str = ""
) -> TextSection:
  """Returns a section with a column for the names of rows, and a column for each thing compared."""
  columns = [TextColumn("", folds=True), *(TextColumn(label, right=True) for label in labels)]
  return TextSection(title, columns, groups, lines, name)


def of_rows(
  title: str,
  rows: Sequence[Sequence[str]],
  *,
  left: Collection[int] = (0,),
  lines: Sequence[str] = (),
  name: str = "",
) -> TextSection:
  """Returns a section from rows of cells; the first row is the heading.

  Args:
    title: the section's title.
    rows: cells.
    left: indices of the columns that are aligned left, as for `mpjax._render.plain_text.table`.
    lines: sentences under the table.
    name: the section's name.
  """
  heading, *body = rows
  columns = [TextColumn(name, right=i not in left, folds=i in left) for i, name in enumerate(heading)]
  return TextSection(title, columns, [[TextRow(row) for row in body]], lines, name)


def of_each(labels: Sequence[str], sections: Iterable[TextSection | None]) -> Iterator[TextSection]:
  """Yields the section of each thing compared, with its label; equal sections once, with all labels."""
  found: list[tuple[TextSection, list[str]]] = []
  for label, section in zip(labels, sections, strict=True):
    names = next((names for other, names in found if other == section), None)
    if names is not None:
      names.append(label)
    elif section:
      found.append((section, [label]))
  for section, names in found:
    title = f"{section.title}: {', '.join(names)}" if len(labels) > 1 else section.title
    yield dataclasses.replace(section, title=title)


def answer_lines(
  first: Sequence[str], more: Sequence[str] = (), last: Sequence[str] = (), *, rest: str = "{} more"
) -> list[str]:
  """Returns the lines of an answer, with as many lines of `more` as fit.

  Args:
    first: lines that are always shown.
    more: lines after them, most important first.
    last: lines at the end that are always shown.
    rest: a line for the lines of `more` that are left out, with `{}` for their number.
  """
  if sum(map(height, (*first, *last))) > ANSWER_LINES:
    first, last = (list(map(_on_one_line, lines)) for lines in (first, last))
  room = ANSWER_LINES - sum(map(height, (*first, *last)))
  for i, line in enumerate(more):
    lines = height(line)
    if lines + (i + 1 < len(more)) > room:
      return [*first, *more[:i], *([rest.format(len(more) - i)] if room else []), *last]
    room -= lines
  return [*first, *more, *last]


def _on_one_line(text: str) -> str:
  return text if len(text) <= TEXT_WIDTH else f"{text[: TEXT_WIDTH - 3]}..."


def height(line: str) -> int:
  """Returns how many lines a text takes in a report that is not on a terminal."""
  return len(fold(line, TEXT_WIDTH).split("\n"))


def sections_text(sections: Iterable[TextSection], width: int = TEXT_WIDTH) -> str:
  """Returns sections as plain text, at most `width` columns wide if their cells can be broken."""
  return "\n\n".join("\n".join(line for line, _ in _lines(_folded(one, width))) for one in sections)


def print_sections(sections: Iterable[TextSection], console: rich.console.Console, alarm: str = "") -> None:
  """Prints sections in the width and the colours of a console; matches of `alarm` are red."""
  import rich.text

  for i, section in enumerate(sections):
    if i:
      console.print()
    for line, style in _lines(_folded(section, console.width)):
      if style == _RULE and not console.options.ascii_only:
        line = line.replace("-", "\N{BOX DRAWINGS LIGHT HORIZONTAL}")
      text = rich.text.Text(line, style)
      if alarm:
        text.highlight_regex(alarm, "bold red")
      # A number that the terminal wraps can still be read; a number that is cut cannot.
      console.print(text, soft_wrap=True)


def _folded(section: TextSection, width: int) -> TextSection:
  """Breaks lines of a section's title, headings, sentences and cells, so that it fits the width."""
  section = dataclasses.replace(
    section, title=fold(section.title, width), lines=[fold(line, width) for line in section.lines]
  )
  if not section.columns:
    return section
  rows = [row for group in section.groups for row in group]
  widths = _column_widths(section.columns, rows, width)
  headings = _folded_cells([column.heading for column in section.columns], widths)
  columns = [c._replace(heading=heading) for c, heading in zip(section.columns, headings, strict=True)]
  groups = [
    [row._replace(cells=_folded_cells(row.cells, widths)) for row in group]
    for group in section.groups
    if group
  ]
  return dataclasses.replace(section, columns=columns, groups=groups)


def _column_widths(columns: Sequence[TextColumn], rows: Sequence[TextRow], width: int) -> list[int]:
  """Returns the widths of columns: their full widths, shrunk where necessary to fit `width`."""
  widths, least = [], []
  for i, column in enumerate(columns):
    cells = max((len(row.cells[i]) for row in rows), default=0)
    word = max(map(len, column.heading.split()), default=0)
    likes = len(column.heading) if column.folds else min(len(column.heading), _HEADING_WIDTH)
    widths.append(max(cells, likes))
    least.append(_LEAST_WIDTH if column.folds else max(cells, min(word, _HEADING_WIDTH)))
  while sum(widths) + _GAP * (len(widths) - 1) > width:
    broad = [i for i in range(len(widths)) if widths[i] > least[i]]
    if not broad:
      break
    widths[max(broad, key=lambda i: (not columns[i].folds, widths[i]))] -= 1
  return widths


def _folded_cells(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
  return [fold(cell, width) for cell, width in zip(cells, widths, strict=True)]


def _lines(section: TextSection) -> Iterator[tuple[str, str]]:
  """Yields the lines of a section, each with its style on a terminal."""
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
