"""The first signal to a run, from its command's start on. Does not import JAX, which takes a while."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from mpjax.train._errors import Interrupted


class Interrupt:
  """Within its `with` block, the first SIGTERM, SIGHUP or SIGINT sets `signum`; a second acts as usual.

  Nothing is raised then: Python drops what is raised in a destructor, a callback or while it imports. A
  SIGHUP that the process ignores (`nohup`) stays ignored.

  Attributes:
    signum: the signal that this process received, or `None`.
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
