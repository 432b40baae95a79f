"""Shows a report: an answer of twelve lines, tables by name, and everything as HTML in a notebook.

The HTML has tables and sentences, and no scripts; every text is escaped.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from mpjax._gone import instead
from mpjax._render.text_sections import TextSection, print_sections, sections_text
from mpjax.dtypes import did_you_mean

if TYPE_CHECKING:
  import rich.console

MOST_HTML = 16_000  # bytes of tables and sentences, since a notebook's file keeps them

_MOST_CELL, _MOST_TITLE, _MOST_LINE = 240, 240, 2_000  # characters
# The notebook sets the colours, so that this fits light and dark ones.
_STYLE = (
  ".mpjax{font-size:13px;line-height:1.4;overflow-x:auto}"
  ".mpjax p{margin:2px 0;white-space:pre-wrap}"
  ".mpjax p.t{font-weight:600;margin-top:8px}"
  ".mpjax table{border-collapse:collapse;margin:2px 0;font-size:inherit}"
  ".mpjax th,.mpjax td{text-align:left;white-space:pre-wrap;padding:1px 12px 1px 0;border:0}"
  ".mpjax .r{text-align:right}"
  ".mpjax tbody{border-top:1px solid rgba(128,128,128,.6)}"
  ".mpjax tr.s{font-weight:600}"
)


def sections_html(sections: Iterable[TextSection], rest: str = "print() shows all.") -> str:
  """Returns sections as one HTML element below 20 kB, which says how many rows are left out.

  Args:
    sections: what to show.
    rest: a sentence that says how to see the rows that are left out.
  """
  room = _Budget(MOST_HTML)
  body = "".join(_section(section, room) for section in sections)
  if room.left_out:
    body += _paragraph(f"{room.left_out} more rows: {rest}")
  return f'<div class="mpjax"><style>{_STYLE}</style>{body}</div>'


class Shown:
  """A result with a short answer as its `str`, and with tables on request.

  Shows its `str` at a prompt, and the answer and every table in a notebook. A subclass defines `_answer` and
  `_sections`. If it is a dataclass it needs `repr=False`; otherwise its fields would be shown.
  """

  if not TYPE_CHECKING:

    def __getattr__(self, name):
      kind = type(self).__name__
      raise AttributeError(f"{kind!r} object has no attribute {name!r}{instead(name, kind)}")

  def _answer(self) -> Sequence[str]:
    """Returns the answer, most important line first: at most eleven lines of 116 columns."""
    raise NotImplementedError

  def _sections(self) -> Iterable[TextSection]:
    """Returns the named tables."""
    raise NotImplementedError

  @property
  def tables(self) -> tuple[str, ...]:
    """The names of the tables that `table` returns."""
    return tuple(dict.fromkeys(section.name for section in self._sections() if section.name))

  def table(self, name: str) -> str:
    """Returns one of the `tables` as text; `"all"` returns the answer and every table.

    Raises:
      ValueError: if `name` is not in `tables`.
    """
    return sections_text(_part(self, name))

  def __str__(self) -> str:
    return sections_text(_answer_of(self, _asked_in_python))

  def __repr__(self) -> str:
    return str(self)

  def _repr_html_(self) -> str:
    return sections_html(_part(self, "all"), '.table("all") shows all.')


@dataclasses.dataclass(frozen=True, repr=False)
class Report(Shown):
  """An answer and tables that were made elsewhere, for example several results side by side."""

  answer: Sequence[str]
  sections: Sequence[TextSection]

  def _answer(self) -> Sequence[str]:
    return self.answer

  def _sections(self) -> Sequence[TextSection]:
    return self.sections


def print_shown(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints a result or one of its tables, in the width and the colours of a console.

  Args:
    shown: the result.
    console: where to print.
    name: the name of a table; `"all"`: the answer and every table; `None`: the answer.
    alarm: a pattern; matches are printed in red.

  Raises:
    ValueError: if no table has that name.
  """
  sections = _part(shown, name) if name else _answer_of(shown, _asked_in_a_shell)
  print_sections(sections, console, alarm)


def _part(shown: Shown, name: str) -> list[TextSection]:
  sections = list(shown._sections())
  if name == "all":
    return [*_answer_of(shown), *sections]
  found = [section for section in sections if section.name and section.name == name]
  if not found:
    names = ["all", *shown.tables]
    raise ValueError(f"no table {name!r}: expected one of {', '.join(names)}{did_you_mean(name, names)}")
  return found


def _answer_of(shown: Shown, asked: Callable[[Sequence[str]], str] | None = None) -> list[TextSection]:
  """Returns the answer, with a last line that says how to ask for tables."""
  lines = list(shown._answer())
  names = shown.tables
  if lines and names and asked:
    lines.append(f"more: {asked(names)}")
  return [TextSection(lines[0], lines=lines[1:])] if lines else []


def _asked_in_python(names: Sequence[str]) -> str:
  first, *others = (f'"{name}"' for name in (*names, "all"))
  return f".table({first}), or {', '.join(others)}"


def _asked_in_a_shell(names: Sequence[str]) -> str:
  return f"--table {names[0]}, or {', '.join((*names[1:], 'all'))}"


@dataclasses.dataclass
class _Budget:
  """The bytes that may still be written; none after the first piece that did not fit."""

  size: int
  left_out: int = 0

  def takes(self, piece: str) -> bool:
    """Returns whether a piece fits, and counts it."""
    size = len(piece.encode())
    if self.left_out or size > self.size:
      self.left_out += 1
      return False
    self.size -= size
    return True


def _section(section: TextSection, room: _Budget) -> str:
  bodies = []
  for group in section.groups:
    rows = [row for row in (_row(row.cells, section, strong=row.strong) for row in group) if room.takes(row)]
    bodies += [f"<tbody>{''.join(rows)}</tbody>"] if rows else []
  lines = [line for line in map(_paragraph, section.lines) if room.takes(line)]
  title = _paragraph(section.title, "t") if section.title else ""
  heads = _row([column.heading for column in section.columns], section, tag="th")
  table = f"<table><thead>{heads}</thead>{''.join(bodies)}</table>" if bodies else ""
  if not (table or lines) and (section.groups or section.lines):  # a title alone would mislead
    return ""
  return title + table + "".join(lines)


def _row(cells: Iterable[str], section: TextSection, *, tag: str = "td", strong: bool = False) -> str:
  shown = []
  for cell, column in zip(cells, section.columns, strict=True):
    place = ' class="r"' if column.right else ""
    shown.append(f"<{tag}{place}>{_escaped(cell, _MOST_CELL)}</{tag}>")
  emphasis = ' class="s"' if strong else ""
  return f"<tr{emphasis}>{''.join(shown)}</tr>"


def _paragraph(text: str, kind: str = "") -> str:
  place = f' class="{kind}"' if kind else ""
  return f"<p{place}>{_escaped(text, _MOST_TITLE if kind else _MOST_LINE)}</p>"


def _escaped(text: str, most: int) -> str:
  return html.escape(text if len(text) <= most else text[: most - 3] + "...")
