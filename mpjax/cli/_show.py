"""What a command prints of a result: the answer, the table of `--table NAME`, or everything with `--all`."""

from __future__ import annotations

import rich.console

from mpjax._render.html_sections import Shown, print_shown
from mpjax.train import ConfigError


def show(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints a result as `mpjax._render.html_sections.print_shown` does.

  Raises:
    ConfigError: for a name that no table has.
  """
  try:
    print_shown(shown, console, name, alarm)
  except ValueError as error:
    raise ConfigError(f"--table: {error}") from error
