"""Processes that measure one thing each, and how the benchmark that starts them talks to them.

A process is given its task as JSON, prints a line of JSON when it is ready, and one for every line that it
reads after that. What ends it (no memory left, a crash of a compiler) ends nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any

_MARK = "@worker "  # libraries print too
_END = {"error": "ended without a word"}


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> None:
  """The measuring side: `start(task)` gives what to say when ready, and what to call for every line read."""
  try:
    ready, measure = start(json.loads(sys.argv[1]))
    _say(ready)
    for _ in sys.stdin:
      _say(measure())
  except Exception as error:
    lines = str(error).strip().splitlines() or [""]
    _say({"error": f"{type(error).__name__}: {lines[0][:300]}"})
    raise


def _say(message: dict[str, Any]) -> None:
  print(_MARK + json.dumps(message), flush=True)


class Worker:
  """A process as its starter sees it.

  Args:
    python: the interpreter.
    script: a file that calls `serve`.
    task: what it is given; JSON.
    environment: added to this process's own.
  """

  def __init__(self, python: str, script: str, task: dict[str, Any], environment: dict[str, str]):
    self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
    self._process = subprocess.Popen(
      [python, script, json.dumps(task)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=os.environ | environment,
    )
    self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=self._listen, daemon=True).start()

  def read(self, timeout: float) -> dict[str, Any]:
    """The next message; one with `error` if there is none in time, or the process has ended."""
    timeout = max(timeout, 0)
    try:
      message = self._messages.get(timeout=timeout)
    except queue.Empty:
      message = {"error": f"no answer in the {timeout:.0f} s that were left"}
    if message is _END:
      self._process.wait()
      message = {"error": f"ended with status {self._process.returncode}: {self._last_error()}"}
    if "error" in message:
      self.close()
    return message

  def ask(self, timeout: float) -> dict[str, Any]:
    """Has it measure once more."""
    # If it has ended, what it said before that, or why, is read below.
    with contextlib.suppress(BrokenPipeError, ValueError):
      print(file=self._process.stdin, flush=True)
    return self.read(timeout)

  def close(self) -> None:
    """Ends the process, which gives its memory back."""
    self._process.kill()
    self._process.wait()

  def _listen(self) -> None:
    for line in self._process.stdout or ():
      if line.startswith(_MARK):
        self._messages.put(json.loads(line.removeprefix(_MARK)))
    self._messages.put(_END)

  def _last_error(self) -> str:
    self._errors.seek(0)
    lines = [line.strip() for line in self._errors if line.strip()]
    return lines[-1][:300] if lines else "nothing on stderr"
