"""Prints a result: the answer, one table with `--table NAME`, or everything with `--all`."""

from __future__ import annotations

import os

import rich.console

from mpjax._render.html_sections import Shown, print_shown
from mpjax._render.text_sections import TEXT_WIDTH
from mpjax.train import ConfigError


def report_console() -> rich.console.Console:
  """Returns a console on standard output; in a file or a pipe it has the width of a report."""
  console = rich.console.Console()
  if console.is_terminal or "COLUMNS" in os.environ:
    return console
  return rich.console.Console(width=TEXT_WIDTH)


def show(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints a result as `mpjax._render.html_sections.print_shown` does.

  Raises:
    ConfigError: if no table has that name.
  """
  try:
    print_shown(shown, console, name, alarm)
  except ValueError as error:
    raise ConfigError(f"--table: {error}") from error
