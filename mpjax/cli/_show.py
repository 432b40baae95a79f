"""Prints what a command says: a result or one table of it, lines, progress."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import rich.console
import rich.progress

from mpjax._render.tables import TEXT_WIDTH, Shown, print_shown
from mpjax.cli._exit_status import config_errors


def report_console() -> rich.console.Console:
  """Returns a console on standard output; in a file or a pipe it has the width of a report."""
  console = rich.console.Console()
  if console.is_terminal or "COLUMNS" in os.environ:
    return console
  return rich.console.Console(width=TEXT_WIDTH)


def show(shown: Shown, console: rich.console.Console, name: str | None, alarm: str = "") -> None:
  """Prints the answer, the table `name`, or with `all` everything, as `print_shown` does.

  Raises:
    ConfigError: if no table has that name.
  """
  with config_errors("--table"):
    print_shown(shown, console, name, alarm)


def say(console: rich.console.Console, text: str) -> None:
  """Prints a line as it is."""
  console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextlib.contextmanager
def progress(
  console: rich.console.Console, total: int | None = None, *, lines: bool = False
) -> Iterator[Callable[[str], None]]:
  """Yields a function that takes a line before each piece of work: a bar on a terminal shows it.

  Args:
    console: where to show it.
    total: number of pieces; `None` if unknown.
    lines: whether each line is printed where there is no terminal.
  """
  columns = (
    rich.progress.TextColumn("{task.description}", markup=False),
    rich.progress.BarColumn(),
    rich.progress.TimeElapsedColumn(),
  )
  is_bar, done = console.is_terminal, itertools.count()
  with rich.progress.Progress(*columns, console=console, transient=True, disable=not is_bar) as bar:
    task = bar.add_task("begins", total=total)

    def advance(line: str) -> None:
      if lines and not is_bar:
        say(console, line)
      bar.update(task, completed=next(done), description=line)

    yield advance
