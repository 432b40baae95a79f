"""The output of a run: the records of the logger `mpjax.train`, on a console and on stderr."""

from __future__ import annotations

import logging
import os
import sys
import threading

import rich.console
import rich.table

from mpjax.train._errors import one_line

LOGGER = logging.getLogger("mpjax.train")


def goes_on_without(what: str, error: Exception) -> None:
  """Says that the run goes on without a part that has failed."""
  LOGGER.info(f"the run goes on without {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


class Output(logging.Handler):
  """Shows what its thread logs within its block: warnings and errors on stderr, the rest on a console.

  A full disk, or a reader that goes away, does not end a run, which goes on without that stream. A record may
  bring something else for the console, as `extra={"shown": renderable}`.

  Attributes:
    console: the console; standard output by default.
  """

  def __init__(self, console: rich.console.Console | None = None) -> None:
    super().__init__()
    self.console = console or rich.console.Console()
    thread = threading.get_ident()
    self.addFilter(lambda record: record.thread == thread)

  def __enter__(self) -> Output:
    LOGGER.addHandler(self)
    return self

  def __exit__(self, *_: object) -> None:
    LOGGER.removeHandler(self)

  def emit(self, record: logging.LogRecord) -> None:
    """Shows a record."""
    line, is_warning = self.format(record), record.levelno >= logging.WARNING
    shown = getattr(record, "shown", line)
    try:
      if is_warning:
        print(line, file=sys.stderr, flush=True)
      else:
        is_table = isinstance(shown, rich.table.Table)
        self.console.print(shown, highlight=False, markup=False, soft_wrap=not is_table)
    except (Exception, SystemExit) as error:  # rich exits where nobody reads
      nowhere = open(os.devnull, "w")  # noqa: SIM115 (otherwise Python's last flush would fail, too)
      if is_warning:
        sys.stderr = nowhere
        return
      if self.console.file is sys.stdout:
        sys.stdout = nowhere
      self.console = rich.console.Console(quiet=True)
      reason = one_line(str(error.__context__ or error))
      LOGGER.warning(f"warning: the run goes on without output, which cannot be written ({reason})")
