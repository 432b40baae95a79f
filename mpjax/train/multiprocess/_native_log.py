"""What native code writes to stderr, read on its way: a page about lost processes becomes a reason."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import sys
import threading
from collections.abc import Callable

# The runtime's own account of a process that is gone, and of what it does about it.
_COORDINATION = re.compile(r"[IWEF]\d{4} .*(coordination_service|preemption_|/client\.h|\bclient\.h)")
_STAMP = re.compile(r"[IWEF]\d{4} \d\d:")
_FATAL = re.compile(r"F\d{4} .*client\.h.*JAX distributed service detected fatal errors")
_UNHEALTHY = re.compile(r"unhealthy \(stopped sending heartbeats\):\s*((?:\d+\s+)+)")
_HELD_S = 2.0


class NativeLog:
  """Puts a pipe in the place of stderr, for native code, and hands on what comes through it.

  JAX's runtime ends a process that has lost another one: it writes a page and aborts. Here `on_lost` is
  called with the reason in its place, and the page is left out. Python's own stderr stays as it is.

  Args:
    on_lost: called once, from a thread, with the reason; does not return.
  """

  def __init__(self, on_lost: Callable[[str], None]):
    self._on_lost = on_lost
    sys.stderr.flush()
    self._stderr = os.dup(2)
    self._pipe, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    self._python = sys.stderr
    sys.stderr = os.fdopen(os.dup(self._stderr), "w", buffering=1, errors="backslashreplace")
    _delay_aborts()
    self.thread = threading.Thread(target=self._read, daemon=True, name="native stderr")
    self.thread.start()

  def close(self) -> None:
    """Gives stderr back, everything written so far handed on."""
    os.dup2(self._stderr, 2)  # closes the pipe's last writing end
    self.thread.join(timeout=1)
    sys.stderr = self._python

  def _read(self) -> None:
    rest, held = b"", ""
    while True:
      ready, _, _ = select.select([self._pipe], [], [], _HELD_S if held else None)
      data = os.read(self._pipe, 65536) if ready else b""
      *lines, rest = (rest + data).split(b"\n")
      for line in lines:
        text = line.decode(errors="backslashreplace") + "\n"
        # A message has further lines without a stamp.
        if _COORDINATION.match(text) or (held and not _STAMP.match(text)):
          held += text
        else:
          self._write(text)
      if _FATAL.search(held) and ("***" in held or not ready):
        self._on_lost(lost_reason(held))
      if not ready:
        self._write(held)
        held = ""
      elif not data:
        self._write(held + rest.decode(errors="backslashreplace"))
        return

  def _write(self, text: str) -> None:
    with contextlib.suppress(OSError):
      os.write(self._stderr, text.encode(errors="backslashreplace"))


def lost_reason(page: str) -> str:
  """What the runtime's page about a lost process says, in a few words."""
  if silent := _UNHEALTHY.search(page):
    numbers = silent[1].split()
    who = f"process {numbers[0]} has" if len(numbers) == 1 else f"processes {', '.join(numbers)} have"
    return f"{who} stopped sending heartbeats"
  if "RegisterTask" in page:
    return "one did not reach the coordinator, or not all were there in time"
  if "Failed to send RPC to coordination service" in page or "Socket closed" in page:
    return "process 0, the coordinator, is gone"
  status = page.partition("absl::Status: ")[2] or page
  return " ".join(status.partition("***")[0].split())[:300]


def _delay_aborts() -> None:
  """Makes an abort wait for what the thread does about its reason; then it goes on.

  The handler is the C library's own `sleep`, called with the signal's number: for six seconds. No Python
  could run there.
  """
  if os.name != "posix":
    return
  library = ctypes.CDLL(None)
  library.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
  library.signal.restype = ctypes.c_void_p
  library.signal(int(signal.SIGABRT), ctypes.cast(library.sleep, ctypes.c_void_p))
