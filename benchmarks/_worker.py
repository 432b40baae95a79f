"""Processes that measure one thing each, and how the benchmark that starts them talks to them.

A process is given its task as JSON, prints a line of JSON when it is ready, and one for every line that it
reads after that. What ends it (no memory left, a crash of a compiler) ends nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
_MARK = "@worker "  # libraries print too
_END = {"error": "ended without a word"}


def serve(start: Callable[[dict[str, Any]], tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> None:
  """The measuring side: `start(task)` gives what to say when ready, and what to call for every line read."""

  def stages(task: dict[str, Any]) -> Generator[dict[str, Any], str, None]:
    ready, measure = start(task)
    yield ready
    while True:
      yield measure()

  serve_stages(stages)


def serve_stages(stages: Callable[[dict[str, Any]], Generator[dict[str, Any], str, None]]) -> None:
  """The measuring side as a generator of what to say, one message for every line that is sent into it."""
  try:
    work = stages(json.loads(sys.argv[1]))
    _say(next(work))
    for line in sys.stdin:
      _say(work.send(line.strip()))
  except StopIteration:
    return
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
    module: of this package; called by its name, it calls `serve`.
    task: what it is given; JSON.
    environment: added to this process's own.
  """

  def __init__(self, python: str, module: str, task: dict[str, Any], environment: dict[str, str]):
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
    self._process = subprocess.Popen(
      [python, "-m", module, json.dumps(task)],
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      stderr=self._errors,
      text=True,
      env=os.environ | {"PYTHONPATH": path} | environment,
    )
    self._messages: queue.Queue[dict[str, Any]] = queue.Queue()
    self._listener = threading.Thread(target=self._listen, daemon=True)
    self._listener.start()

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

  def poll(self) -> dict[str, Any] | None:
    """The next message if there is one by now."""
    return None if self._messages.empty() else self.read(0)

  def tell(self, line: str = "") -> None:
    """Has it go on, without waiting for what it says."""
    # If it has ended, what it said before that, or why, is read later.
    with contextlib.suppress(BrokenPipeError, ValueError):
      print(line, file=self._process.stdin, flush=True)

  def ask(self, timeout: float, line: str = "") -> dict[str, Any]:
    """Has it measure once more."""
    self.tell(line)
    return self.read(timeout)

  def close(self) -> None:
    """Ends the process, which gives its memory back."""
    self._process.kill()
    self._process.wait()
    self._listener.join(1)
    streams = [self._process.stdin, self._errors]
    if not self._listener.is_alive():  # what it has started itself may hold the other end
      streams.append(self._process.stdout)
    for stream in filter(None, streams):
      with contextlib.suppress(OSError):
        stream.close()

  def _listen(self) -> None:
    for line in self._process.stdout or ():
      if line.startswith(_MARK):
        self._messages.put(json.loads(line.removeprefix(_MARK)))
    self._messages.put(_END)

  def _last_error(self) -> str:
    if self._errors.closed:
      return "it was stopped"
    self._errors.seek(0)
    lines = [line.strip() for line in self._errors if line.strip()]
    return lines[-1][:300] if lines else "nothing on stderr"
