"""SIGTERM and Ctrl-C as a flag that the loop looks at between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(Exception):
  """The run was stopped by a signal after its checkpoint was saved; `signum` says which."""

  def __init__(self, signum: int, message: str):
    super().__init__(message)
    self.signum = signum


class Interrupt:
  """While entered, the first SIGTERM or SIGINT sets `signum`; a second one acts as it always does.

  Attributes:
    signum: the signal that came, or `None`.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      self._before = {s: signal.signal(s, self._receive) for s in (signal.SIGTERM, signal.SIGINT)}
    return self

  def __exit__(self, *_: object) -> None:
    for signum, handler in self._before.items():
      signal.signal(signum, handler)

  def _receive(self, signum: int, _: FrameType | None) -> None:
    self.signum = signum
    signal.signal(signum, self._before[signum])
