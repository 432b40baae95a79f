"""Shows a result: an answer of at most twelve lines, tables by name, and everything as text in a notebook."""

from __future__ import annotations

import dataclasses
import html
import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from mpjax._gone import instead
from mpjax._render.plain_text import GAP, fold, table
from mpjax.dtypes import did_you_mean

if TYPE_CHECKING:
  import rich.console

TEXT_WIDTH = 116  # of a text that is not on a terminal
ANSWER_LINES = 11  # of an answer, without the line that says how to ask for more

_LEAST_WIDTH = 10  # of a column of text
_MOST_IN_NOTEBOOK = 16_000  # letters, since a notebook's file keeps them


@dataclasses.dataclass(frozen=True)
class Table:
  """Rows under a heading, with sentences under them.

  Attributes:
    name: a short word by which a reader asks for it; several tables may have the same. Without one, it is
      shown only with all.
    heading: the line above it.
    rows: cells, the names of the columns first.
    lines: the sentences.
    left: the columns of text, aligned left. Their cells are folded if the table is too wide.
  """

  name: str
  heading: str
  rows: Sequence[Sequence[str]] = ()
  lines: Sequence[str] = ()
  left: Collection[int] = (0,)

  def text(self, width: int = TEXT_WIDTH) -> str:
    """Returns the table as text, at most `width` columns wide if its cells can be broken."""
    widths = self._widths(width)
    folded = [[fold(cell, room) for cell, room in zip(row, widths, strict=True)] for row in self.rows]
    rows = [line for lines in table(folded, left=self.left) for line in lines] if folded else []
    if rows[1:]:
      heading = max(len(cell.split("\n")) for cell in folded[0])
      rows.insert(heading, "-" * max(map(len, rows)))
    return "\n".join([fold(self.heading, width), *rows, *(fold(line, width) for line in self.lines)])

  def _widths(self, width: int) -> list[int]:
    """Returns the widths of columns: their full widths, shrunk to fit `width`, headings first."""
    columns = list(zip(*self.rows, strict=True))
    widths = [max(map(len, cells)) for cells in columns]
    words = lambda cells: (len(word.rstrip()) for cell in cells for word in re.split(r"(?<=[ ,/])", cell))
    least = [
      max(_LEAST_WIDTH, *words(c)) if i in self.left else max(map(len, (*c[0].split(), "", *c[1:])))
      for i, c in enumerate(columns)
    ]
    while sum(widths) + GAP * (len(widths) - 1) > width:
      broad = [i for i, room in enumerate(least) if widths[i] > room]
      if not broad:
        break
      widths[max(broad, key=lambda i: (i not in self.left, widths[i]))] -= 1
    return widths


class Renamed:
  """What may have had other attributes: an old name raises an error that says what to write."""

  if not TYPE_CHECKING:

    def __getattr__(self, name):
      kind = type(self).__name__
      raise AttributeError(f"{kind!r} object has no attribute {name!r}{instead(name, kind)}")


class Shown(Renamed):
  """A result with a short answer as its `str`, and with tables on request.

  Shows its `str` at a prompt, and the answer and every table in a notebook. A subclass defines `_answer` and
  `_sections`. If it is a dataclass it needs `repr=False`; otherwise its fields would be shown.
  """

  def _answer(self) -> Sequence[str]:
    """Returns the answer, most important line first: at most eleven lines of 116 columns."""
    raise NotImplementedError

  def _sections(self) -> Iterable[Table]:
    """Returns the tables."""
    raise NotImplementedError

  @property
  def tables(self) -> tuple[str, ...]:
    """The names of the tables that `table` returns."""
    return tuple(dict.fromkeys(table.name for table in self._sections() if table.name))

  def table(self, name: str) -> str:
    """Returns one of the `tables` as text; `"all"` returns the answer and every table.

    Raises:
      ValueError: if `name` is not in `tables`.
    """
    return tables_text(_part(self, name))

  def __str__(self) -> str:
    names = [f'"{name}"' for name in (*self.tables, "all")]
    return tables_text(_answer_of(self, f".table({names[0]}), or {', '.join(names[1:])}"))

  def __repr__(self) -> str:
    return str(self)

  def _repr_html_(self) -> str:
    text = self.table("all")
    if len(text) > _MOST_IN_NOTEBOOK:
      text = text[:_MOST_IN_NOTEBOOK].rpartition("\n")[0] + '\n... print(RESULT.table("all")) shows the rest'
    return f"<pre>{html.escape(text)}</pre>"


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Shown):
  """An answer and tables that were made elsewhere, for example several results side by side."""

  answer: Sequence[str]
  sections: Sequence[Table]

  def _answer(self) -> Sequence[str]:
    return self.answer

  def _sections(self) -> Sequence[Table]:
    return self.sections


def tables_text(tables: Iterable[Table], width: int = TEXT_WIDTH) -> str:
  """Returns tables as plain text, with an empty line between them."""
  return "\n\n".join(table.text(width) for table in tables)


def print_shown(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints a result or one of its tables in the width and the colours of a console.

  Args:
    shown: the result.
    console: where to print.
    name: the name of a table; `"all"`: the answer and every table; `None`: the answer.
    alarm: a pattern; matches are printed in red.

  Raises:
    ValueError: if no table has that name.
  """
  import rich.text

  first, *others = *shown.tables, "all"
  tables = _part(shown, name) if name else _answer_of(shown, f"--table {first}, or {', '.join(others)}")
  text = rich.text.Text(tables_text(tables, console.width))
  text.highlight_regex(r"(\A|(?<=\n\n)).+", "bold cyan")
  if alarm:
    text.highlight_regex(f"(?m){alarm}", "bold red")
  # A number that the terminal wraps can still be read; a number that is cut cannot.
  console.print(text, soft_wrap=True)


def _part(shown: Shown, name: str) -> list[Table]:
  tables = list(shown._sections())
  if name == "all":
    return [*_answer_of(shown), *tables]
  found = [table for table in tables if table.name and table.name == name]
  if not found:
    names = ["all", *shown.tables]
    raise ValueError(f"no table {name!r}: expected one of {', '.join(names)}{did_you_mean(name, names)}")
  return found


def _answer_of(shown: Shown, more: str = "") -> list[Table]:
  """Returns the answer, with a last line that says how to ask for tables."""
  lines = list(shown._answer())
  lines += [f"more: {more}"] if lines and more and shown.tables else []
  return [Table("", lines[0], lines=lines[1:])] if lines else []


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
  height = lambda lines: sum(len(fold(line, TEXT_WIDTH).split("\n")) for line in lines)
  if height((*first, *last)) > ANSWER_LINES:
    cut = lambda line: line if len(line) <= TEXT_WIDTH else f"{line[: TEXT_WIDTH - 3]}..."
    first, last = (list(map(cut, lines)) for lines in (first, last))
  room = ANSWER_LINES - height((*first, *last))
  shown = len(more)
  while shown and height(more[:shown]) + (shown < len(more)) > room:
    shown -= 1
  left = [rest.format(len(more) - shown)] if shown < len(more) and room else []
  return [*first, *more[:shown], *left, *last]
