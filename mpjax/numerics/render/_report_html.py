"""The report as one HTML file: markup, style, program and data together, without network requests."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from mpjax._render.plain_text import plain_data

_VERSION = 1


def save_html(report: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
  """Writes a report as a page that works from a disk, without a server and without a network.

  Args:
    report: the report from `NumericsReport.to_dict()`.
    path: path of the file; missing folders are made.

  Raises:
    ValueError: if the report has another version than this page reads.
  """
  if report.get("version") != _VERSION:
    raise ValueError(f"report of version {report.get('version')!r}: expected version {_VERSION}")
  write_whole(path, _page(report))


def write_whole(path: str | os.PathLike[str], text: str) -> None:
  """Writes a file completely or not at all: a failed write leaves the old one. Missing folders are made."""
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    temporary.write_text(text, encoding="utf-8", errors="xmlcharrefreplace", newline="\n")
    os.replace(temporary, path)
  finally:
    temporary.unlink(missing_ok=True)


def _page(report: Mapping[str, Any]) -> str:
  style = _file("report.css")
  program = "".join(map(_file, ("charts.js", "report.js", "table.js")))
  parts = {
    "title": html.escape(str(report["title"] or "a training step")),
    "style": style,
    "program": program,
    "style_hash": _hash(style),
    "program_hash": _hash(program),
    "data": _json(report),
  }
  # One pass: inserted text is not read again, whatever the names of modules.
  return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _file("report.html"))


def _file(name: str) -> str:
  return importlib.resources.files("mpjax").joinpath("numerics", "render", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
  """Returns the hash with which a Content-Security-Policy allows only this inline block."""
  return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _json(report: Mapping[str, Any]) -> str:
  """Returns strict JSON in ASCII that cannot end its HTML element."""
  text = json.dumps(plain_data(report), allow_nan=False, separators=(",", ":"))
  return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
