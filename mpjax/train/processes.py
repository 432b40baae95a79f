"""Several processes of one run: they start, agree, stop and end together, whatever ends one of them.

`jax.distributed` connects them and ends all when heartbeats of one stay away, with status 134 and its own
lines. What is here ends them sooner, with one line of mpjax: a process that fails tells the others, one that
is gone without a word is named, and what hangs ends.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import json
import os
import pathlib
import platform
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax import _compat
from mpjax._types import Array, PyTree
from mpjax.train._errors import (
  MENDABLE,
  TOGETHER,
  Agreed,
  CheckpointError,
  ConfigError,
  Interrupted,
  causes,
  one_line,
)
from mpjax.train._interrupt import Interrupt
from mpjax.train.config._config import DistributedConfig
from mpjax.train.config._differences import mismatch
from mpjax.train.loop._output import say_last

T = TypeVar("T")

LOST = 5

# Keys in the key-value store of the coordination service, which is in process 0.
_WORD, _HERE, _EVERYONE = "mpjax/word", "mpjax/here", "mpjax/everyone"
# How long the others may take to answer, or to read a word, in seconds.
_ANSWER_S = 2.0
# Words in errors of JAX's runtime after a lost connection.
_BROKEN = re.compile(
  r"gloo|nccl|connection (closed|reset|refused)|socket closed|unavailable|deadline_exceeded|deadline exceeded"
  r"|heartbeat|coordination|(?<![-_])barrier",
  re.IGNORECASE,
)
# A jitted function that ran before raises them as a ValueError, which begins with the runtime's status.
_STATUS = re.compile("(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED): ")
_meetings = itertools.count()


class Processes:
  """The processes of a run. Without `jax.distributed`, this process is the only one.

  Attributes:
    process: the number of this process.
    count: the number of processes.
    directory: the run directory once it is known; messages name its last checkpoint.
    interrupt: what receives the signals of this process.

  Args:
    settings: the time-outs.
    interrupt: what receives the signals of this process; by default nothing does.
    may_exit: whether this process and `jax.distributed` end with the run. If not, a hang ends one of several
      processes, but never the only one.
  """

  def __init__(
    self,
    settings: DistributedConfig | None = None,
    interrupt: Interrupt | None = None,
    *,
    may_exit: bool = True,
  ):
    self.settings, self._may_exit = settings or DistributedConfig(), may_exit
    self.interrupt = interrupt or Interrupt()
    self.directory: pathlib.Path | None = None
    self._ending = threading.Lock()
    self._doing, self._since = "the start", time.monotonic()
    self._closed = threading.Event()
    self._watch = threading.Thread(target=self._watch_over, daemon=True, name="watch over the run")
    self._client, self.process, self.count, self._address = _compat.coordination()

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
    if self.are_watched:
      self._watch.start()
    # Otherwise process 0 may be done before the rest.
    if self._may_exit and not self.first:
      threading.Thread(target=self._watch_first, daemon=True, name="watch over process 0").start()
    return self

  def __exit__(self, *_: object) -> None:
    self._closed.set()
    # A thread that comes back from native code while Python exits aborts the process.
    if self._watch.is_alive():
      self._watch.join(self.settings.hang_timeout_s)

  def doing(self, what: str) -> None:
    """Records that the run has made progress, and what it waits for now."""
    self._doing, self._since = what, time.monotonic()

  def agree(
    self,
    work: Callable[[], T],
    tell: Callable[[T], Any] = lambda _: None,
    *,
    same: bool = False,
  ) -> tuple[T, Any]:
    """Does some work in every process, before the first step; returns only if it succeeded in all of them.

    Args:
      work: the work; it may raise errors that the user can fix.
      tell: takes the work's result; returns what others must know, a JSON value.
      same: whether all processes have to tell the same, a mapping by name.

    Returns:
      The work's result, and what process 0 tells.

    Raises:
      Agreed: in every process, if the work raised in one, or one received a signal before it. In a run of one
        process, raises the work's error or `Interrupted`.
    """
    if self.count == 1:
      self.interrupt.check()
      alone = work()
      return alone, None if same else tell(alone)
    result: Any = None
    try:
      self.interrupt.check()
      result = work()
      told = {"told": tell(result)}
    except (*MENDABLE, Interrupted) as error:
      told = {"problem": str(error), "status": error.exit_status}
    timeout_s = max(self.settings.start_timeout_s, self.settings.hang_timeout_s)
    return result, _agreed(everyone(told, timeout_s), same)

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
    status, line = 0, ""
    with self:
      try:
        run()
      except BaseException as error:
        expected = outcome(error)
        if self.count == 1 and expected is None:
          raise
        status, line = expected or (1, one_line(f"error: {type(error).__name__}: {error}"))
        if not self.are_together(error):
          self._end_alone(error, status, line, expected is not None)
    if line and self.first:
      say_last(line)
    if self._client is not None:  # a barrier, so that none takes another for lost
      jax.distributed.shutdown()
    return status

  def _end_alone(self, error: BaseException, status: int, line: str, is_expected: bool) -> NoReturn:
    """Ends this process while the others still run."""
    if _is_broken(error) and (not is_expected or isinstance(error, CheckpointError)):
      self._tell(LOST, f"the connection to another process broke ({one_line(str(error))})", lost=True)
      self._end_by(self._word(_ANSWER_S))
    self._closed.set()  # the word is for the others
    if not is_expected:
      traceback.print_exception(error)
    self._tell(status, line)
    self._exit(status, line)

  def are_together(self, error: BaseException) -> bool:
    """Returns whether all processes raise this error; if not, the others still run."""
    return self.count == 1 or isinstance(error, TOGETHER)

  def _watch_over(self) -> None:
    """Ends this process when another one has left a word, or without progress."""
    limit = self.settings.hang_timeout_s
    tick = min(1.0, limit / 4)
    while True:
      before = time.monotonic()
      word = self._word(tick)
      if self._closed.is_set():
        return
      if word:
        self._end_by(word)
      # The time in which this process was stopped (Ctrl-Z, a suspended machine) does not count.
      asleep = time.monotonic() - before - tick
      if asleep > 2 * tick:
        self._since += asleep
      if time.monotonic() - self._since > limit:
        line = (
          f"error: waited for {self._doing} for more than distributed.hang_timeout_s={limit:g} seconds: "
          f"{self._resume()}"
        )
        self._tell(LOST, line)
        self._exit(LOST, line)

  def _tell(self, status: int, line: str, lost: bool = False) -> None:
    """Leaves a word for the others, if it is the first one; `lost`: a process is gone, none knows which."""
    if self._client is not None:
      word = {"process": self.process, "status": status, "line": line.removeprefix("error: "), "lost": lost}
      with contextlib.suppress(jax.errors.JaxRuntimeError):
        self._client.key_value_set(_WORD, json.dumps(word))

  def _word(self, timeout_s: float) -> dict[str, Any]:
    """Waits for the first word of any process; returns `{}` if there is none."""
    if self._client is not None:
      try:
        text: str = self._client.blocking_key_value_get(_WORD, round(1000 * timeout_s))
        return dict(json.loads(text))
      except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
          return {}
    self._closed.wait(timeout_s)
    return {}

  def _watch_first(self) -> None:
    """Ends this process when the coordinator's port, in process 0, is closed.

    The runtime notices that, too, a moment later, and aborts without naming a process or a checkpoint.
    """
    host, _, port = (self._address or "").rpartition(":")
    began = 0.0
    # One connection a second at most, where the other end closes each at once.
    while not self._closed.wait(began + 1 - time.monotonic()):
      try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=60) as connection:
          began = time.monotonic()
          connection.settimeout(None)
          while connection.recv(4096):  # until the other end closes it, as it does with what says nothing
            pass
      except ConnectionResetError:
        continue
      except OSError:
        break
    if began and not self._closed.is_set():
      self._lost([0])

  def _end_by(self, word: dict[str, Any]) -> NoReturn:
    """Ends this process as a word says, or names the processes that are gone."""
    if not word.get("lost", True):
      why = f"since process {word['process']} ended: {word['line']}"
      self._exit(word["status"], f"stopped while waiting for {self._doing}, {why}")
    self._lost(self._silent(), word.get("line", "the connection to another process broke"))

  def _lost(self, gone: list[int], reason: str = "") -> NoReturn:
    if gone:
      who = f"process {gone[0]} is" if len(gone) == 1 else f"processes {', '.join(map(str, gone))} are"
      reason = f"{who} gone without a word (killed, or the machine lost)"
    self._exit(LOST, f"error: {reason}, while this one waited for {self._doing}: {self._resume()}")

  def _silent(self) -> list[int]:
    """Returns the processes that do not answer: each that lives sees the same word, and calls this."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another thread has answered
      self._client.key_value_set(f"{_HERE}/{self.process}", "")
    time.sleep(_ANSWER_S)
    try:
      here = {int(key.rpartition("/")[2]) for key, _ in self._client.key_value_dir_get(_HERE)}
    except jax.errors.JaxRuntimeError:
      return [0]
    return sorted(set(range(self.count)) - here)

  def _resume(self) -> str:
    again = "start all processes again, in any number" if self.count > 1 else "the same command again"
    folders = [] if self.directory is None else (self.directory / "checkpoints").glob("*")
    if steps := [int(folder.name) for folder in folders if folder.name.isdecimal()]:
      return f"the checkpoint of step {max(steps)} in {self.directory} is intact; {again}, to resume from it"
    return f"there is no checkpoint yet; {again}"

  def _exit(self, status: int, line: str) -> NoReturn:
    """Exits at once: Python's usual end would wait for processes that are gone."""
    self._ending.acquire()  # for ever if another thread is exiting
    shown = f"process {self.process}: {line}" if self.count > 1 else line
    with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads
      print(shown, file=sys.stderr, flush=True)
      sys.stdout.flush()
    if self.first and self.count > 1:  # the others read in this process
      time.sleep(_ANSWER_S)
    os._exit(status)


def _agreed(told_by: list[dict[str, Any]], same: bool) -> Any:
  """Returns what process 0 tells; raises `Agreed` if one has a problem or, if `same`, tells other things."""
  problems = [(i, told) for i, told in enumerate(told_by) if "problem" in told]
  if problems:
    number, told = problems[0]
    alike = len(problems) == len(told_by) and len({told["problem"] for _, told in problems}) == 1
    who = "" if number == 0 or alike else f"process {number}: "
    raise Agreed(f"{who}{told['problem']}", told["status"])
  for i, told in enumerate(told_by[1:] if same else [], 1):
    if (problem := mismatch(told_by[0]["told"], told["told"], i)) is not None:
      raise Agreed(problem, ConfigError.exit_status)
  return told_by[0]["told"]


def _is_broken(error: BaseException) -> bool:
  told = [
    str(link)
    for link in causes(error)
    if isinstance(link, jax.errors.JaxRuntimeError) or (type(link) is ValueError and _STATUS.match(str(link)))
  ]
  # The runtime also passes on what Python code in a step raised, with its traceback.
  return any(_BROKEN.search(text) and "Traceback (most recent call last)" not in text for text in told)


def everyone(value: object, timeout_s: float) -> list[Any]:
  """Returns the JSON values of all processes, in their order. Every process has to call this.

  They go through the coordination service: no device takes part.

  Raises:
    TimeoutError: if another process did not call this in time.
  """
  client, process, count, _ = _compat.coordination()
  text = json.dumps(value)
  if client is None:
    return [json.loads(text)]
  key, milliseconds = f"{_EVERYONE}/{next(_meetings)}", max(1, round(timeout_s * 1000))
  try:
    client.key_value_set(f"{key}/{process}", text)
    if process == 0:  # so that each of thousands of processes asks only once
      texts = [client.blocking_key_value_get(f"{key}/{i}", milliseconds) for i in range(count)]
      client.key_value_set(f"{key}/all", f"[{','.join(texts)}]")
    found: list[Any] = json.loads(client.blocking_key_value_get(f"{key}/all", milliseconds))
  except jax.errors.JaxRuntimeError as error:
    raise TimeoutError(f"another process did not come within {timeout_s:g} s") from error
  return found


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide what a step computes."""
  packages = ("mpjax", "jax", "jaxlib", "flax", "optax", "numpy")
  found = {name: importlib.import_module(name).__version__ for name in packages}
  return {"python": platform.python_version(), **found}


class SignalOfAny:
  """The signal that any process of a run received, so that all stop after the same step.

  Each process asks before every step, and after it reads the answer to the question of the step before. That
  answer is there by then, so nothing waits. One number crosses the devices.

  Args:
    interrupt: what receives the signals of this process.
    several: whether there are other processes.
  """

  def __init__(self, interrupt: Interrupt, several: bool) -> None:
    self._interrupt, self._several = interrupt, several
    self._answers: list[Any] = []
    if several:
      devices = np.array(jax.devices())
      mesh = jax.sharding.Mesh(devices, ("everywhere",), axis_types=(AxisType.Auto,))
      one_each = NamedSharding(mesh, PartitionSpec("everywhere"))
      self._latest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
      self._words = functools.cache(
        lambda signum: jax.make_array_from_callback(
          (devices.size,), one_each, lambda _: np.full(1, signum, np.int32)
        )
      )

  def ask(self) -> None:
    """Tells the others, before a step, whether this process got a signal."""
    if self._several:
      self._answers.append(self._latest(self._words(self._interrupt.signum or 0)))

  def answer(self) -> int | None:
    """Returns the signal that any process reported one step ago; in a single process, its own at once."""
    if not self._several:
      return self._interrupt.signum
    return int(self._answers.pop(0)) or None if len(self._answers) > 1 else None
