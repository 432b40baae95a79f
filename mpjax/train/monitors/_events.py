"""TensorBoard's file of a run, which is told when it cannot be written."""

from __future__ import annotations

import contextlib
import pathlib
import threading
from typing import Any

import tensorboardX

_WRITER = "_EventLoggerThread"


class Events(tensorboardX.SummaryWriter):
  """A `SummaryWriter` whose thread's errors come out at what is written next.

  By itself the thread ends with a traceback, and whoever writes then waits for it for ever.

  Args:
    folder: of the event files.
    start: step of the checkpoint that the run resumes from; what was written of later ones is dropped.
    owner: whether this process writes; otherwise nothing happens here.
  """

  def __init__(self, folder: pathlib.Path, start: int, owner: bool = True):
    self._error: OSError | None = None
    self._hook = threading.excepthook
    threading.excepthook = self._told
    try:
      super().__init__(str(folder), purge_step=start + 1, write_to_disk=owner)
    except BaseException:
      threading.excepthook = self._hook
      raise

  def check(self) -> None:
    """Raises the `OSError` that has kept something from being written."""
    if self._error is not None:
      raise self._error

  def add_scalar(self, *args: Any, **kwargs: Any) -> None:
    """As of a `SummaryWriter`."""
    self.check()
    super().add_scalar(*args, **kwargs)

  def add_histogram_raw(self, *args: Any, **kwargs: Any) -> None:
    """As of a `SummaryWriter`."""
    self.check()
    super().add_histogram_raw(*args, **kwargs)

  def flush(self) -> None:
    """As of a `SummaryWriter`."""
    self.check()
    super().flush()

  def close(self) -> None:
    """As of a `SummaryWriter`."""
    threading.excepthook = self._hook
    try:
      self.check()
      super().close()
    except OSError:
      # At the interpreter's end it would try again.
      writer = self.file_writer.event_writer
      writer._closed = True
      with contextlib.suppress(OSError):
        writer._ev_writer.close()
      raise

  def _told(self, event: Any) -> None:
    if isinstance(event.exc_value, OSError) and type(event.thread).__name__ == _WRITER:
      self._error = event.exc_value
    else:
      self._hook(event)
