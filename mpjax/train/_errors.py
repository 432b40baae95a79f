"""What ends a run: errors, each with the exit status of its command (docs/train.md), and signals. No JAX."""

from __future__ import annotations

import contextlib
import errno
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from mpjax._mistakes import ConfigError as ConfigError, DataError as DataError


class Stuck(Exception):
  """Every step was skipped at the lowest loss scale, or the state or the last loss is not finite."""

  exit_status = 3


class CheckpointError(Exception):
  """A checkpoint cannot be written, or no checkpoint can be read: one line that says why."""

  exit_status = 4


class Interrupted(Exception):
  """A signal, `signum`, stopped the run: after its checkpoint was saved, or before the first step."""

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum
    self.exit_status = 128 + signum


class Agreed(Exception):
  """An error in at least one process, raised in all of them: one line and an exit status."""

  def __init__(self, message: str, exit_status: int):
    super().__init__(message)
    self.exit_status = exit_status


# Errors that the user can fix. The process that meets one tells the others.
MENDABLE = (ConfigError, DataError, CheckpointError)
# Errors that all processes of a run raise together.
TOGETHER = (Agreed, Interrupted, Stuck)


def described(error: BaseException) -> str:
  """Describes an error on one line; by file and reason one of the operating system's."""
  if isinstance(error, MENDABLE):
    return str(error)
  if isinstance(error, OSError) and error.filename is not None:
    return f"{error.filename}: {error.strerror}"
  return one_line(f"{type(error).__name__}: {error}")


def one_line(text: str) -> str:
  """Returns the text of an error on one line of at most some 300 characters."""
  text = " ".join(text.split())
  return text if len(text) <= 300 else f"{text[:300]}..."


def outcome_of(error: BaseException) -> tuple[int, str] | None:
  """Returns the exit status and the line of an error that a command expects, or `None` for another."""
  if isinstance(error, KeyboardInterrupt):
    return 130, "interrupted"
  if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:  # of a name that the user gave
    return ConfigError.exit_status, f"error: {one_line(str(error))}"
  if not isinstance(error, (*MENDABLE, *TOGETHER)):
    return None
  is_signal = error.exit_status > 128
  return error.exit_status, str(error) if is_signal else f"error: {error}"


class Interrupt:
  """Within its `with` block, the first SIGTERM, SIGHUP or SIGINT sets `signum`; a second acts as usual.

  Nothing is raised then: Python drops what is raised in a destructor, a callback or while it imports. A
  SIGHUP that the process ignores (`nohup`) stays ignored.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      hangup = getattr(signal, "SIGHUP", None)
      signals = [signal.SIGTERM, signal.SIGINT]
      if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        signals.append(hangup)
      self._before = {signum: signal.signal(signum, self._receive) for signum in signals}
    return self

  def __exit__(self, *_: object) -> None:
    for signum, handler in self._before.items():
      signal.signal(signum, handler)

  def _receive(self, signum: int, _: FrameType | None) -> None:
    self.signum = signum
    signal.signal(signum, self._before[signum])

  def check(self) -> None:
    """Raises `Interrupted` if there was a signal. For before the first step: nothing is to be saved then."""
    if self.signum is not None:
      raise Interrupted(self.signum, f"{signal_name(self.signum)}: stopped before the first step")

  @contextlib.contextmanager
  def off(self) -> Iterator[None]:
    """Lets a signal end the process at once while its block waits in native code; first calls `check`."""
    self.check()
    handlers = {signum: signal.signal(signum, signal.SIG_DFL) for signum in self._before}
    try:
      yield
    finally:
      for signum, handler in handlers.items():
        signal.signal(signum, handler)


def signal_name(signum: int) -> str:
  """Returns what a person calls a signal."""
  return "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
