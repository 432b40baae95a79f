"""Tables with columns, marked rows and groups of rows: the form in which the reports of plans make them."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from mpjax._render.tables import TEXT_WIDTH, Table, answer_lines, print_tables, tables_text

__all__ = [
  "TEXT_WIDTH",
  "TextColumn",
  "TextRow",
  "TextSection",
  "answer_lines",
  "beside",
  "of_each",
  "of_rows",
  "print_sections",
  "sections_text",
]
print_sections, sections_text = print_tables, tables_text


class TextColumn(NamedTuple):
  """A column of a table."""

  heading: str
  right: bool = False
  folds: bool = False


class TextRow(NamedTuple):
  """A row of a table."""

  cells: Sequence[str]
  strong: bool = False


RowGroups = Sequence[Sequence[TextRow]]


class TextSection(Table):
  """A table from columns and groups of rows."""

  def __init__(
    self,
    title: str,
    columns: Sequence[TextColumn] = (),
    groups: RowGroups = (),
    lines: Sequence[str] = (),
    name: str = "",
  ):
    rows: list[Sequence[str]] = [[column.heading for column in columns]] if columns else []
    for i, group in enumerate(filter(None, groups)):
      rows += [*([()] if i else []), *(row.cells for row in group)]
    super().__init__(name, title, rows, lines, [i for i, column in enumerate(columns) if not column.right])


def beside(
  title: str, labels: Iterable[str], groups: RowGroups, lines: Sequence[str] = (), *, name: str = ""
) -> TextSection:
  """Returns a table with a column for the names of rows, and a column for each thing compared."""
  columns = [TextColumn(""), *(TextColumn(label, right=True) for label in labels)]
  return TextSection(title, columns, groups, lines, name)


def of_rows(
  title: str,
  rows: Sequence[Sequence[str]],
  *,
  left: Collection[int] = (0,),
  lines: Sequence[str] = (),
  name: str = "",
) -> TextSection:
  """Returns what `Table(name, title, rows, lines, left)` is."""
  heading, *body = rows
  columns = [TextColumn(cell, right=i not in left) for i, cell in enumerate(heading)]
  return TextSection(title, columns, [[TextRow(row) for row in body]], lines, name)


def of_each(labels: Sequence[str], sections: Iterable[TextSection | None]) -> Iterator[TextSection]:
  """Yields the table of each thing compared, with its label; equal tables once, with all labels."""
  found: list[tuple[TextSection, list[str]]] = []
  for label, section in zip(labels, sections, strict=True):
    names = next((names for other, names in found if other == section), None)
    if names is not None:
      names.append(label)
    elif section:
      found.append((section, [label]))
  for section, names in found:
    labelled = copy.copy(section)
    if len(labels) > 1:
      object.__setattr__(labelled, "heading", f"{section.heading}: {', '.join(names)}")
    yield labelled
