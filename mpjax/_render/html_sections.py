"""Sections of a report as HTML for a notebook: tables and sentences, no scripts, every text escaped."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Iterable

from mpjax._render.text_sections import TextSection

MOST_HTML = 16_000  # bytes of tables and sentences: a notebook keeps what it shows

_MOST_CELL, _MOST_TITLE, _MOST_LINE = 240, 240, 2_000  # characters
# Colours are the notebook's own, so that light and dark ones both fit.
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


def sections_html(sections: Iterable[TextSection]) -> str:
  """Returns sections as one HTML element below 20 kB, which says how much of longer ones is left out."""
  room = _Budget(MOST_HTML)
  body = "".join(_section(section, room) for section in sections)
  if room.left_out:
    body += _paragraph(f"{room.left_out} more rows: print() shows all.")
  return f'<div class="mpjax"><style>{_STYLE}</style>{body}</div>'


class Shown:
  """Shows itself where it stands alone: as tables in a notebook, and as its `str` at a prompt.

  A dataclass that is one needs `repr=False`, or its fields would be shown.
  """

  def _sections(self) -> Iterable[TextSection]:
    raise NotImplementedError

  def _repr_html_(self) -> str:
    return sections_html(self._sections())

  def __repr__(self) -> str:
    return str(self)


@dataclasses.dataclass
class _Budget:
  """What may still be written; nothing after the first piece that was too long."""

  size: int
  left_out: int = 0

  def takes(self, piece: str) -> bool:
    """Returns whether a piece may be written."""
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
