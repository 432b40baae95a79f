"""Standard output and error of a run; the run goes on if they are lost."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

LOG = "train.log"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Output:
  """Keeps `sys.stdout` and `sys.stderr` from raising inside its `with` block.

  A reader that goes away, a full disk or a closed stream does not end a run: further output goes to
  `train.log` in the run directory, whose first line says so. A character that the terminal cannot show
  appears as its code.
  """

  def __init__(self) -> None:
    self._file: pathlib.Path | None = None
    self._early: list[str] = []

  def __enter__(self) -> Output:
    _fill_descriptors()
    self._before = sys.stdout, sys.stderr
    sys.stdout = cast(TextIO, _Steady(sys.stdout, "stdout", self))
    sys.stderr = cast(TextIO, _Steady(sys.stderr, "stderr", self))
    return self

  def __exit__(self, *_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
      stream.flush()
    sys.stdout, sys.stderr = self._before

  def log_to(self, directory: pathlib.Path) -> None:
    """Sets the run directory. `train.log` is made there when there is something to write."""
    self._file = directory / LOG
    early, self._early = self._early, []
    for text in early:
      self.log(text)

  def lose(self, name: str, error: BaseException | None) -> None:
    """Reports a lost stream in the log and on the other stream."""
    why = "closed" if error is None else (getattr(error, "strerror", None) or str(error))
    line = f"{name} cannot be written ({why}): the run goes on, and writes the rest to "
    self.log(f"{line}this file\n")
    if name == "stdout":
      sys.stderr.write(f"{line}{self._file or LOG}\n")

  def log(self, text: str) -> None:
    """Appends to the log, without frames of a progress bar."""
    text = _COLOURS.sub("", text)
    if "\x1b" in text or "\r" in text:
      return
    if self._file is None:
      self._early.append(text)
      return
    with (
      contextlib.suppress(OSError),
      self._file.open("a", encoding="utf-8") as file,
    ):
      file.write(text)


class _Steady:
  """A text stream that passes its text on to another stream until that one fails."""

  def __init__(self, stream: TextIO | None, name: str, output: Output):
    self._stream, self._name, self._output = stream, name, output
    self._lost = False
    self._unsaid: list[str] = []  # written, but perhaps not delivered

  def write(self, text: str) -> int:
    """Writes text, line by line."""
    if self._lost or self._stream is None:
      self._lose(None)
      self._output.log(text)
      return len(text)
    self._unsaid.append(text)
    try:
      try:
        self._stream.write(text)
      except UnicodeEncodeError:  # its own `encoding` may be only "charmap"
        encoding = self._stream.encoding
        self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
    except (OSError, ValueError) as error:
      self._lose(error)
    if "\n" in text:
      self.flush()
    return len(text)

  def writelines(self, lines: Iterable[str]) -> None:
    """Writes a list of texts."""
    self.write("".join(lines))

  def flush(self) -> None:
    """Passes the written text to the operating system."""
    if self._lost or self._stream is None:
      return
    try:
      self._stream.flush()
      self._unsaid.clear()
    except (OSError, ValueError) as error:
      self._lose(error)

  def isatty(self) -> bool:
    """Returns whether the stream is a terminal that still works."""
    return not self._lost and self._stream is not None and self._stream.isatty()

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)

  def _lose(self, error: BaseException | None) -> None:
    if self._lost:
      return
    self._lost = True
    self._output.lose(self._name, error)
    unsaid, self._unsaid = self._unsaid, []
    for text in unsaid:
      self._output.log(text)
    if self._stream is not None:
      with contextlib.suppress(OSError, ValueError):  # other writers, and Python when it ends, would raise
        _to_nowhere(self._stream.fileno())


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
