"""The output of a run: the records of the logger `mpjax.train`, on the console or in `train.log`."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import io
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import IO, Any, TextIO, cast

import rich.console
import rich.table

LOG = "train.log"
LOGGER = logging.getLogger("mpjax.train")
# The output of the run in this thread: another one's lines are not for it.
_CURRENT: contextvars.ContextVar[Output | None] = contextvars.ContextVar("output", default=None)


def say_last(line: str) -> None:
  """Shows the line that a command ends with, also if the user's code has turned logging off."""
  record = LOGGER.makeRecord(LOGGER.name, logging.ERROR, __file__, 0, line, (), None)
  LOGGER.disabled = False
  LOGGER.handle(record)


def goes_on_without(what: str, error: Exception) -> None:
  """Says that the run goes on without a part that has failed."""
  LOGGER.info(f"the run goes on without {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


class Output(logging.Handler):
  """Shows what is logged within its `with` block: warnings and errors on stderr, the rest on a console.

  A reader that goes away, a full disk or a closed stream does not end a run: further lines go to `train.log`
  in the run directory, whose first line says so. A character that the terminal cannot show appears as its
  code. A record may bring something else for the console, as `extra={"shown": renderable}`, or `None` for
  nothing.
  """

  def __init__(self) -> None:
    super().__init__()
    _fill_descriptors()
    self._out, self._err = _Steady(sys.stdout, "stdout"), _Steady(sys.stderr, "stderr")
    self._console = rich.console.Console(file=cast(TextIO, self._out))
    self._file: pathlib.Path | None = None
    self._unwritten: list[str] = []

  def __enter__(self) -> Output:
    self._before = _CURRENT.set(self)
    self.addFilter(lambda _: _CURRENT.get() in (None, self))
    LOGGER.addHandler(self)
    return self

  def __exit__(self, *_: object) -> None:
    LOGGER.removeHandler(self)
    _CURRENT.reset(self._before)
    self._out.flush()
    self._err.flush()
    self.close()

  @contextlib.contextmanager
  def of_everyone(self) -> Iterator[None]:
    """Keeps what a plug-in or a library prints from ending the run, too, where nobody reads it."""
    with (
      contextlib.redirect_stdout(cast(TextIO, self._out)),
      contextlib.redirect_stderr(cast(TextIO, self._err)),
    ):
      yield

  def show_on(self, console: rich.console.Console | None, *, quiet: bool) -> rich.console.Console:
    """Sets the console, which is standard output by default; returns one like it that does not raise.

    Args:
      console: the console, or `None`.
      quiet: whether to show nothing, except for warnings and errors.
    """
    if console is not None:
      self._out, self._console = _Steady(console.file, "the console"), copy.copy(console)
      self._console.file = cast(TextIO, self._out)
    self._console.quiet |= quiet
    return self._console

  def log_to(self, directory: pathlib.Path) -> None:
    """Sets the run directory. `train.log` is made there when there is something to write."""
    self._file = directory / LOG
    self._log()

  def emit(self, record: logging.LogRecord) -> None:
    """Shows a record."""
    line = self.format(record)
    stream = self._err if record.levelno >= logging.WARNING else self._out
    if stream is self._err:
      stream.write(f"{line}\n")
    elif self._console.quiet:
      return
    elif (shown := getattr(record, "shown", line)) is not None:
      is_table = isinstance(shown, rich.table.Table)
      self._console.print(shown, highlight=False, markup=False, soft_wrap=not is_table)
    if stream.lost:
      self._log(*self._told(stream), line)

  def _told(self, stream: _Steady) -> list[str]:
    """Tells once that a stream is lost, on the other one; returns the line for the log."""
    if stream.is_told:
      return []
    stream.is_told = True
    line = f"{stream.name} cannot be written ({stream.lost}): the run goes on, and writes the rest to "
    if stream is self._out:
      self._err.write(f"{line}{self._file or LOG}\n")
    return [f"{line}this file"]

  def _log(self, *lines: str) -> None:
    self._unwritten += lines
    if self._file is not None and self._unwritten:
      with contextlib.suppress(OSError), self._file.open("a", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in self._unwritten)
      self._unwritten.clear()


class _Steady(io.TextIOBase):
  """Passes text on to another stream until that one fails; does not raise.

  Attributes:
    name: what a message calls it.
    lost: why it failed; empty while it works.
    is_told: whether the user was told.
  """

  def __init__(self, stream: IO[str] | None, name: str):
    self._stream: Any = stream
    self.name = name
    self.lost, self.is_told = "closed" if stream is None else "", False

  @property
  def encoding(self) -> str:  # type: ignore[override]
    """Returns the encoding, by which rich chooses the lines of a table."""
    return getattr(self._stream, "encoding", None) or "utf-8"

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def fileno(self) -> int:
    """Returns the descriptor of the stream."""
    return int(self._stream.fileno())

  def isatty(self) -> bool:
    """Returns whether the stream is a terminal that still works."""
    return not self.lost and self._stream.isatty()

  def write(self, text: str) -> int:
    """Writes text, and passes it to the operating system."""
    shown = text.encode(self.encoding, "backslashreplace").decode(self.encoding)
    self._try(lambda: self._stream.write(shown))
    self.flush()
    return len(text)

  def flush(self) -> None:
    """Passes all text to the operating system, also what others wrote to the same stream."""
    self._try(lambda: self._stream.flush())

  def _try(self, action: Callable[[], object]) -> None:
    if self.lost:
      return
    try:
      action()
    except (OSError, ValueError) as error:
      self.lost = getattr(error, "strerror", None) or str(error)
      with contextlib.suppress(OSError, ValueError):  # other writers, and Python when it ends, would raise
        if (descriptor := self._stream.fileno()) in (1, 2):
          _to_nowhere(descriptor)


def _fill_descriptors() -> None:
  """Opens standard descriptors that are closed, so that no file of the run gets their numbers and output."""
  for descriptor in range(3):
    try:
      os.fstat(descriptor)
    except OSError:
      _to_nowhere(descriptor)


def _to_nowhere(descriptor: int) -> None:
  nowhere = os.open(os.devnull, os.O_RDWR)
  if nowhere != descriptor:
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
