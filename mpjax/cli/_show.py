"""What a command prints of a result: the answer, the table of `--table NAME`, or everything with `--all`."""

from __future__ import annotations

import os

import rich.console

from mpjax._render.html_sections import Shown, print_shown
from mpjax._render.text_sections import TEXT_WIDTH
from mpjax.train import ConfigError


def report_console() -> rich.console.Console:
  """Returns a console on standard output, which in a file or a pipe has the width of a report."""
  console = rich.console.Console()
  if console.is_terminal or "COLUMNS" in os.environ:
    return console
  return rich.console.Console(width=TEXT_WIDTH)


def show(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints a result as `mpjax._render.html_sections.print_shown` does.

  Raises:
    ConfigError: for a name that no table has.
  """
  try:
    print_shown(shown, console, name, alarm)
  except ValueError as error:
    raise ConfigError(f"--table: {error}") from error
