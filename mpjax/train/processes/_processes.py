"""The processes of a run: they agree before they go on, and end together whatever ends one of them."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pathlib
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from mpjax import _compat
from mpjax._types import Array, PyTree
from mpjax.train._errors import MENDABLE, TOGETHER, Agreed, CheckpointError
from mpjax.train.config._config import DistributedConfig
from mpjax.train.processes._agreement import everyone

T = TypeVar("T")

LOST = 5

# Keys of the processes' messages in the key-value store of the coordination service.
_NEWS, _HERE = "mpjax/news", "mpjax/here"
_GONE = "{} gone without a word (killed, or the machine lost)"
# Words in the errors of runtimes and of the coordination service after a lost connection.
_BROKEN = re.compile(
  r"gloo|nccl|connection (closed|reset|refused)|socket closed|unavailable|deadline_exceeded|deadline exceeded"
  r"|heartbeat|coordination|barrier|did not come",
  re.IGNORECASE,
)


class Processes:
  """The processes of a run. Without `jax.distributed`, this process is the only one.

  Attributes:
    process: the number of this process.
    count: the number of processes.
    directory: the run directory once it is known; messages name its last checkpoint.

  Args:
    settings: the time-outs.
    may_exit: whether a hang may end this process if it is the only one; one of several always ends.
    started: whether `jax.distributed` was started for this run, and ends with it.
  """

  def __init__(
    self, settings: DistributedConfig | None = None, *, may_exit: bool = True, started: bool = False
  ):
    self.settings = settings or DistributedConfig()
    self._may_exit, self._started = may_exit, started
    self.directory: pathlib.Path | None = None
    self._ending = threading.Lock()
    self._doing, self._since = "the start", time.monotonic()
    self._closed = threading.Event()
    self._watch: threading.Thread | None = None
    self._client, self.process, self.count, _ = _compat.coordination()
    self._held: socket.socket | None = None

  @property
  def first(self) -> bool:
    """Returns whether this process writes files and prints for all."""
    return self.process == 0

  @property
  def are_watched(self) -> bool:
    """Returns whether a hang ends this process."""
    return self.count > 1 or self._may_exit

  def __enter__(self) -> Processes:
    self._since = time.monotonic()
    if not self.are_watched:
      return self
    self._watch = threading.Thread(target=self._watch_over, daemon=True, name="watch over the run")
    self._watch.start()
    # Only if `jax.distributed` ends with the run: otherwise process 0 may be done before the rest.
    if self._started and self.first:
      self._held = hold_open()
    elif self._started:
      threading.Thread(target=self._watch_first, daemon=True, name="watch over process 0").start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closed.set()
    if self._watch is not None:
      self._watch.join()

  def doing(self, what: str) -> None:
    """Records that the run has made progress, and what it waits for now."""
    self._doing, self._since = what, time.monotonic()

  def agree(
    self,
    work: Callable[[], T],
    tell: Callable[[T], Any] = lambda _: None,
    check: Callable[[Any, Any, int], str | None] = lambda first, other, process: None,
  ) -> tuple[T, Any]:
    """Does some work in every process; returns only if it succeeded in all of them.

    Args:
      work: the work; it may raise errors that the user can fix.
      tell: takes the work's result; returns what others must know, a JSON value.
      check: takes what process 0 tells, what another process tells and the other's number; returns an error
        text, or `None`.

    Returns:
      The work's result, and what process 0 tells.

    Raises:
      Agreed: in every process, if the work raised in one. In a run of one process, raises the work's error.
    """
    if self._client is None:
      result = work()
      return result, tell(result)
    done: list[T] = []
    try:
      done.append(work())
      told = {"told": tell(done[0])}
    except MENDABLE as error:
      told = {"problem": str(error), "status": error.exit_status}
    timeout_s = max(self.settings.start_timeout_s, self.settings.hang_timeout_s)
    verdict = _verdict([json.loads(text) for text in everyone(json.dumps(told), timeout_s)], check)
    if "problem" in verdict:
      raise Agreed(verdict["problem"], verdict["status"])
    return done[0], verdict["told"]

  def fetch(self, tree: PyTree) -> PyTree:
    """Returns global arrays as complete NumPy arrays in every process."""

    def gather(x: Array | np.ndarray) -> np.ndarray:
      whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
      return np.asarray(x) if whole else multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gather, tree)

  def end(self, run: Callable[[], object], outcome: Callable[[BaseException], tuple[int, str] | None]) -> int:
    """Runs a command in all processes and ends them together.

    Args:
      run: the command.
      outcome: takes an error; returns the exit status and the line for stderr, or `None` if the error is not
        expected.

    Returns:
      The exit status. If this process ends while others still run, this does not return.
    """
    status, line, alone = 0, "", False
    try:
      with self:
        run()
    except BaseException as error:
      expected = outcome(error)
      if self.count == 1:
        if expected is None:
          raise
        status, line = expected
      else:
        alone = not self.are_together(error)
        if _is_broken(error) and (expected is None or isinstance(error, CheckpointError)):
          self._lost(f"the connection to another process broke ({one_line(error)})")
        if expected is None:
          traceback.print_exc()
        status, line = expected or (1, f"error: {type(error).__name__}: {one_line(error)}")
    if alone:
      self._tell_and_exit(status, line)
    if line and self.first:
      logging.getLogger("mpjax.train").error(line)
    if self.count > 1:
      self._leave()
    return status

  def are_together(self, error: BaseException) -> bool:
    """Returns whether all processes raise this error; if not, the others still run."""
    return self.count == 1 or isinstance(error, TOGETHER)

  def _lost(self, reason: str) -> NoReturn:
    """Exits because another process died; `reason` is used if nobody knows which one."""
    self._lost_to(self._who_is_gone() or reason)

  def _lost_to(self, reason: str) -> NoReturn:
    self._exit(LOST, f"error: {reason}, while this one waited for {self._doing}: {self._resume()}")

  def _resume(self) -> str:
    again = "start all processes again, in any number" if self.count > 1 else "the same command again"
    steps = []
    if self.directory is not None:
      steps = [int(p.name) for p in (self.directory / "checkpoints").glob("*") if p.name.isdecimal()]
    if steps:
      return f"the checkpoint of step {max(steps)} in {self.directory} is intact; {again}, to resume from it"
    return f"there is no checkpoint yet; {again}"

  def _watch_over(self) -> None:
    """Ends this process when another one has reported its end, or when there is no progress."""
    limit, answered = self.settings.hang_timeout_s, False
    tick = min(1.0, limit / 4)
    while True:
      before = time.monotonic()
      if self._closed.wait(tick):
        return
      # The time in which this process was stopped (Ctrl-Z, a suspended machine) does not count.
      asleep = time.monotonic() - before - tick
      if asleep > 2 * tick:
        self._since += asleep
      news = self._news()
      if word := news.get("ended"):
        self._exit(word["status"], self._since_word(word))
      if "asked" in news and not answered:
        self._say_here()
        answered = True
      if time.monotonic() - self._since > limit:
        line = (
          f"error: waited for {self._doing} for more than distributed.hang_timeout_s={limit:g} seconds: "
          f"{self._resume()}"
        )
        self._tell_and_exit(LOST, line)

  def _watch_first(self) -> None:
    """Ends this process when process 0 has ended without a message."""
    if wait_for_its_end() and not self._closed.is_set():
      self._lost_to(_GONE.format("process 0 is"))

  def _news(self) -> dict[str, Any]:
    """Returns the messages: `ended` from a process that has ended, `asked` from one that looks for others."""
    if self._client is None:
      return {}
    try:
      news = self._client.key_value_dir_get(_NEWS)
    except jax.errors.JaxRuntimeError:  # the service is gone; the runtime notices, too
      return {}
    return {key.rpartition("/")[2]: json.loads(value) for key, value in news}

  def _say_here(self) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(f"{_HERE}/{self.process}", "")

  def _since_word(self, word: dict[str, Any]) -> str:
    return f"stopped while waiting for {self._doing}, since process {word['process']} ended: {word['line']}"

  def _who_is_gone(self) -> str | None:
    """Asks all processes to answer, and names those that do not."""
    self._say_here()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process has asked already
      self._client.key_value_set(f"{_NEWS}/asked", "true")
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      # The coordinator leaves last, because the others ask it.
      time.sleep(3.0 if self.first else 2.5)
      if word := self._news().get("ended"):
        self._exit(word["status"], self._since_word(word))
      here = {int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get(_HERE)}
      gone = sorted(set(range(self.count)) - here)
      if gone:
        who = f"process {gone[0]} is" if len(gone) == 1 else f"processes {', '.join(map(str, gone))} are"
        return _GONE.format(who)
    return None

  def _tell_and_exit(self, status: int, line: str) -> NoReturn:
    """Leaves a message for the others, waits until they can have read it, and exits."""
    if self._client is not None:
      word = {"process": self.process, "status": status, "line": line.removeprefix("error: ")}
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # another process was first
        self._client.key_value_set(f"{_NEWS}/ended", json.dumps(word))
      if self.first:
        self._say(line)
        line = ""
        time.sleep(3.0)  # the store is in this process
    self._exit(status, line)

  def _exit(self, status: int, line: str) -> NoReturn:
    """Exits at once: Python's usual end would wait for processes that are gone."""
    if not self._ending.acquire(blocking=False):
      while True:  # another thread is exiting
        time.sleep(60)
    if line:
      self._say(line)
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
      sys.stdout.flush()
      sys.stderr.flush()
    os._exit(status)

  def _say(self, line: str) -> None:
    shown = f"process {self.process}: {line}" if self.count > 1 else line
    with contextlib.suppress(OSError, ValueError):
      print(shown, file=sys.stderr, flush=True)

  def _leave(self) -> None:
    """Leaves the service together with all others, so that no process takes another for lost."""
    if self._started:  # otherwise the caller ends it
      jax.distributed.shutdown()
    if self._held is not None:
      self._held.close()


def _verdict(told_by: list[dict[str, Any]], check: Callable[[Any, Any, int], str | None]) -> dict[str, Any]:
  problems = [(i, told) for i, told in enumerate(told_by) if "problem" in told]
  if problems:
    number, told = problems[0]
    alike = len(problems) == len(told_by) and len({told["problem"] for _, told in problems}) == 1
    line = told["problem"] if number == 0 or alike else f"process {number}: {told['problem']}"
    return {"problem": line, "status": told["status"]}
  for i, told in enumerate(told_by[1:], 1):
    if (problem := check(told_by[0]["told"], told["told"], i)) is not None:
      return {"problem": problem, "status": 2}
  return told_by[0]


def _is_broken(error: BaseException) -> bool:
  link: BaseException | None = error
  while link is not None:
    if isinstance(link, (RuntimeError, ValueError, OSError, CheckpointError)) and _BROKEN.search(str(link)):
      return True
    link = link.__cause__ or link.__context__
  return False


def one_line(error: BaseException) -> str:
  """Returns the text of an error on one line."""
  text = " ".join(str(error).split()) or type(error).__name__
  return text if len(text) <= 300 else f"{text[:300]}..."


# The key under which process 0 publishes its open port.
_PORT = "mpjax/first"
_TIMEOUT_S = 60


def hold_open() -> socket.socket | None:
  """Opens, in process 0, a port that closes when the process ends. It carries no data.

  Returns:
    The socket, which the caller keeps; `None` if no port can be opened.
  """
  client, _, count, address = _compat.coordination()
  try:
    held = socket.create_server((_LOCAL.get(_host(address), ""), 0), backlog=2 * count)
  except OSError:
    return None
  client.key_value_set(_PORT, str(held.getsockname()[1]))
  return held


def wait_for_its_end() -> bool:
  """Blocks, in another process, until process 0 has ended; returns False if that cannot be observed."""
  client, _, _, address = _compat.coordination()
  connected = False
  try:
    port = int(client.blocking_key_value_get(_PORT, _TIMEOUT_S * 1000))
    while True:
      with socket.create_connection((_host(address), port), timeout=_TIMEOUT_S) as connection:
        if connected:  # process 0 is still there; only the connection ended
          time.sleep(1)
        connected = True
        connection.settimeout(None)
        with contextlib.suppress(ConnectionResetError):
          connection.recv(1)
  except ConnectionRefusedError:
    return connected
  except (OSError, jax.errors.JaxRuntimeError):
    return False


# The port of a run on one machine is open to that machine only.
_LOCAL = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}


def _host(address: str | None) -> str:
  return (address or "").rpartition(":")[0].strip("[]")
