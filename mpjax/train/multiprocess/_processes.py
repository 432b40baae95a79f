"""The processes of a run: they agree before they go on, and end together, whatever ends one of them."""

from __future__ import annotations

import contextlib
import json
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
from mpjax.train._config import DistributedConfig
from mpjax.train._errors import MENDABLE, TOGETHER, Agreed, CheckpointError
from mpjax.train.multiprocess._agreement import everyone

T = TypeVar("T")

LOST = 5

# Where the processes leave word for each other, in the key-value store of the coordination service.
_NEWS, _HERE = "mpjax/news", "mpjax/here"
_GONE = "{} gone without a word (killed, or the machine lost)"
# What the runtimes of CPUs, GPUs and the coordination service say when there is no other end any more.
_BROKEN = re.compile(
  r"gloo|nccl|connection (closed|reset|refused)|socket closed|unavailable|deadline_exceeded|deadline exceeded"
  r"|heartbeat|coordination|barrier|did not come",
  re.IGNORECASE,
)


class Processes:
  """The processes of a run, of which this is one; without `jax.distributed`, the only one.

  Attributes:
    process: the number of this one.
    count: how many there are.
    directory: the run's, once it is known: where messages look for the last checkpoint.

  Args:
    settings: how long to wait.
    may_exit: whether a hang may end this process, if it is alone; one of several has to end.
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
    """True if this process writes files and speaks for all."""
    return self.process == 0

  @property
  def are_watched(self) -> bool:
    """True if what hangs ends this process, whoever waits for it."""
    return self.count > 1 or self._may_exit

  def __enter__(self) -> Processes:
    self._since = time.monotonic()
    if not self.are_watched:
      return self
    self._watch = threading.Thread(target=self._watch_over, daemon=True, name="watch over the run")
    self._watch.start()
    # Only a run that ends with the processes: in others process 0 may be done before the rest.
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
    """Notes that the run has moved on, and what it waits for now."""
    self._doing, self._since = what, time.monotonic()

  def agree(
    self,
    work: Callable[[], T],
    tell: Callable[[T], Any] = lambda _: None,
    check: Callable[[Any, Any, int], str | None] = lambda first, other, process: None,
  ) -> tuple[T, Any]:
    """Does some work in every process; goes on only if it went well in all of them.

    Args:
      work: may raise what is a user's to mend.
      tell: of the work's result, what others have to know; a JSON value.
      check: (what process 0 tells, what another tells, its number) to what is wrong between them, or `None`.

    Returns:
      The work's result, and what process 0 tells.

    Raises:
      Agreed: in every process, if the work raised in one; in a run of one process, what it raised.
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
    """Returns global arrays as NumPy arrays, whole, in every process."""

    def gather(x: Array | np.ndarray) -> np.ndarray:
      whole = not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated
      return np.asarray(x) if whole else multihost_utils.process_allgather(x, tiled=True)

    return jax.tree.map(gather, tree)

  def end(self, run: Callable[[], object], outcome: Callable[[BaseException], tuple[int, str] | None]) -> int:
    """Runs a command in all processes and ends them together.

    Args:
      run: the command.
      outcome: of an error, the exit status and the line for stderr; `None` for one that is not expected.

    Returns:
      The exit status. A process that ends on its own account, others being in the middle of something, does
      not return from here.
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
      print(line, file=sys.stderr)
    if self.count > 1:
      self._leave()
    return status

  def are_together(self, error: BaseException) -> bool:
    """Returns whether an error comes to all processes alike; else the others still run."""
    return self.count == 1 or isinstance(error, TOGETHER)

  def _lost(self, reason: str) -> NoReturn:
    """Exits because another process died; `reason` is how that showed, where nobody knows which one did."""
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
    """Ends the process when another has left word that it ended, or nothing moves any more."""
    limit, answered = self.settings.hang_timeout_s, False
    tick = min(1.0, limit / 4)
    while True:
      before = time.monotonic()
      if self._closed.wait(tick):
        return
      # Stopped (Ctrl-Z, a suspended machine): that time counts for nobody.
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
    """Ends the process when process 0 has ended without a word."""
    if wait_for_its_end() and not self._closed.is_set():
      self._lost_to(_GONE.format("process 0 is"))

  def _news(self) -> dict[str, Any]:
    """Returns `ended`: what a process that ended by itself said; `asked`: one wants to know who is there."""
    if self._client is None:
      return {}
    try:
      news = self._client.key_value_dir_get(_NEWS)
    except jax.errors.JaxRuntimeError:  # the service is gone, which the runtime notices, too
      return {}
    return {key.rpartition("/")[2]: json.loads(value) for key, value in news}

  def _say_here(self) -> None:
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      self._client.key_value_set(f"{_HERE}/{self.process}", "")

  def _since_word(self, word: dict[str, Any]) -> str:
    return f"stopped while waiting for {self._doing}, since process {word['process']} ended: {word['line']}"

  def _who_is_gone(self) -> str | None:
    """Asks round, and whoever does not answer is gone."""
    self._say_here()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one has asked
      self._client.key_value_set(f"{_NEWS}/asked", "true")
    with contextlib.suppress(jax.errors.JaxRuntimeError):
      # The coordinator is the last to leave: the others ask it.
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
    """Leaves word for the others, waits until they can have read it, and exits."""
    if self._client is not None:
      word = {"process": self.process, "status": status, "line": line.removeprefix("error: ")}
      with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
        self._client.key_value_set(f"{_NEWS}/ended", json.dumps(word))
      if self.first:
        self._say(line)
        line = ""
        time.sleep(3.0)  # the store is in this process
    self._exit(status, line)

  def _exit(self, status: int, line: str) -> NoReturn:
    """Exits at once: what usually runs at the end would wait for processes that are gone."""
    if not self._ending.acquire(blocking=False):
      while True:  # another thread is at it
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
    """Leaves the service when all are there: none is to see another one go and take it for lost."""
    if self._started:  # else whoever has started it ends it
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
  """Returns what an error says, on one line."""
  text = " ".join(str(error).split()) or type(error).__name__
  return text if len(text) <= 300 else f"{text[:300]}..."


# Where process 0 says which port it holds open.
_PORT = "mpjax/first"
_TIMEOUT_S = 60


def hold_open() -> socket.socket | None:
  """Opens, in process 0, a port that closes when the process ends; nothing is read or written there.

  Returns:
    What has to be kept; `None` where no port can be opened.
  """
  client, _, count, address = _compat.coordination()
  try:
    held = socket.create_server((_LOCAL.get(_host(address), ""), 0), backlog=2 * count)
  except OSError:
    return None
  client.key_value_set(_PORT, str(held.getsockname()[1]))
  return held


def wait_for_its_end() -> bool:
  """Blocks, in another process, until process 0 has ended; returns False where that cannot be seen."""
  client, _, _, address = _compat.coordination()
  connected = False
  try:
    port = int(client.blocking_key_value_get(_PORT, _TIMEOUT_S * 1000))
    while True:
      with socket.create_connection((_host(address), port), timeout=_TIMEOUT_S) as connection:
        if connected:  # it is there, and only the connection has ended
          time.sleep(1)
        connected = True
        connection.settimeout(None)
        with contextlib.suppress(ConnectionResetError):
          connection.recv(1)
  except ConnectionRefusedError:
    return connected
  except (OSError, jax.errors.JaxRuntimeError):
    return False


# A run on one machine is nobody else's to see.
_LOCAL = {"localhost": "127.0.0.1", "127.0.0.1": "127.0.0.1"}


def _host(address: str | None) -> str:
  return (address or "").rpartition(":")[0].strip("[]")
