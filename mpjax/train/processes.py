"""Several processes of one run: they agree before the first step, stop after the same one, and never hang.

`jax.distributed` connects them, and ends the others when heartbeats of one stay away, with status 134 and its
own lines. An error in one process ends that one; the others notice that a connection broke, or no heartbeats.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import pathlib
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax import _compat
from mpjax._types import PyTree
from mpjax.train._errors import (
  MENDABLE,
  TOGETHER,
  Agreed,
  ConfigError,
  Interrupt,
  Interrupted,
  one_line,
  outcome_of,
)
from mpjax.train._files import how_to_go_on
from mpjax.train.config._config import DistributedConfig
from mpjax.train.config._config_file import mismatch

T = TypeVar("T")

LOST = 5
# The parts of a run's time.
PARTS = ("start", "compile", "data", "step", "evaluation", "checkpoint")

# How long the others, which the coordinator in process 0 serves, may take to speak before it ends.
_ANSWER_S = 2.0
_FOR_EVER_MS = 10**9
_meetings = itertools.count()


class Processes:
  """The processes of a run. Without `jax.distributed`, this process is the only one.

  Attributes:
    process: the number of this process, of `count`.
    directory: the run directory once it is known; messages name its last checkpoint.
    interrupt: what receives the signals of this process; by default nothing does.
    seconds: the time of each part of the run that has ended: the host's, devices work on meanwhile.
  """

  def __init__(self, settings: DistributedConfig | None = None, interrupt: Interrupt | None = None):
    self.settings, self.interrupt = settings or DistributedConfig(), interrupt or Interrupt()
    self.directory: pathlib.Path | None = None
    self.seconds = dict.fromkeys(PARTS, 0.0)
    self._part, self._doing, self._since = "start", "the start", time.monotonic()
    self._closed = threading.Event()
    self._client, self.process, self.count = _compat.coordination()

  @property
  def first(self) -> bool:
    """Returns whether this process writes files and prints for all."""
    return self.process == 0

  @contextlib.contextmanager
  def watched(self) -> Iterator[None]:
    """Ends this process if its block makes no progress."""
    threading.Thread(target=self._watch_over, daemon=True, name="watch over the run").start()
    try:
      yield
    finally:
      self._closed.set()

  def phase(self, part: str, what: str) -> None:
    """Ends a part of the run's time, begins another or the same, and says what it waits for."""
    now = time.monotonic()
    self.seconds[self._part] += now - self._since
    self._part, self._doing, self._since = part, what, now

  def agree(
    self,
    work: Callable[[], T],
    tell: Callable[[T], Any] = lambda _: None,
    *,
    same: bool = False,
  ) -> tuple[T, Any]:
    """Does some work in every process, before the first step; returns only if it succeeded in all of them.

    Returns the work's result, and what `tell`, a function of that, returns in process 0: a JSON value. With
    `same`, all processes have to tell the same, a mapping by name.

    Raises:
      Agreed: in every process, if the work raised an error that the user can fix in one, or one received a
        signal before it. In a run of one process, raises the work's error or `Interrupted`.
    """
    result: Any = None
    try:
      self.interrupt.check()
      result = work()
      told = {"told": None if same and self.count == 1 else tell(result)}
    except (*MENDABLE, Interrupted) as error:
      if self.count == 1:
        raise
      told = {"problem": str(error), "status": error.exit_status}
    first, *others = everyone(told)
    for i, told in enumerate([first, *others]):
      if "problem" in told:
        raise Agreed(f"process {i}: {told['problem']}" if i else told["problem"], told["status"])
    for i, told in enumerate(others if same else [], 1):
      if differ := mismatch(first["told"], told["told"], "in process 0", f"in process {i}"):
        problem = f"the processes differ ({differ}): give all the same config, code and data"
        raise Agreed(problem, ConfigError.exit_status)
    return result, first["told"]

  def fetch(self, tree: PyTree) -> PyTree:
    """Returns global arrays as complete NumPy arrays in every process."""
    is_here = lambda x: getattr(x, "is_fully_addressable", True)
    gather = lambda x: multihost_utils.process_allgather(x, tiled=True)
    return jax.tree.map(lambda x: np.asarray(x) if is_here(x) else gather(x), tree)

  def end(self, run: Callable[[], object]) -> int:
    """Runs a command in all processes, and returns its exit status.

    If this process ends while others still run, this does not return.
    """
    status, line = 0, ""
    with self.watched():
      try:
        run()
      except BaseException as error:
        expected = outcome_of(error)
        if self.count == 1 and expected is None:
          raise
        status, line = expected or self._unexpected(error)
        if not self.are_together(error):
          self._exit(status, line)
    if line and self.first:
      _say(line)
    if self._client is not None:  # a barrier, so that none takes another for lost
      jax.distributed.shutdown()
    return status

  def are_together(self, error: BaseException) -> bool:
    """Returns whether all processes raise this error; if not, the others still run."""
    return self.count == 1 or isinstance(error, TOGETHER)

  def _unexpected(self, error: BaseException) -> tuple[int, str]:
    """Returns the exit status and the line of one process's error; may show a traceback."""
    line = f"error: {one_line(f'{type(error).__name__}: {error}')}"
    # JAX raises these where a connection breaks. A step's own code raised its errors where it was traced, or
    # they have its traceback.
    of_jax = isinstance(error, (jax.errors.JaxRuntimeError, ValueError, TimeoutError))
    if not of_jax or "\n" in str(error):
      traceback.print_exception(error)
      return 1, line
    lost = f"{line}, while this one waited for {self._doing}: another process may be gone"
    return LOST, f"{lost}; {self._go_on()}"

  def _watch_over(self) -> None:
    """Ends this process where it makes no progress."""
    limit, since, waited_s = self.settings.hang_timeout_s, self._since, 0.0
    tick = min(1.0, limit / 4)
    # By ticks: the time in which this process is stopped (Ctrl-Z, a suspended machine) does not count.
    while not self._closed.wait(tick):
      waited_s, since = waited_s + tick if since == self._since else 0.0, self._since
      if waited_s > limit:
        waited = f"waited for {self._doing} for more than distributed.hang_timeout_s={limit:g} seconds"
        self._exit(LOST, f"error: {waited}: {self._go_on()}")

  def _go_on(self) -> str:
    again = "the same command in any number of processes" if self.count > 1 else "the same command"
    return how_to_go_on(self.directory, again)

  def _exit(self, status: int, line: str) -> NoReturn:
    """Exits at once: Python's usual end would wait for processes that are gone."""
    self._closed.set()
    _say(f"process {self.process}: {line}" if self.count > 1 else line)
    if self.first and self.count > 1:
      time.sleep(_ANSWER_S)
    os._exit(status)


def _say(line: str) -> None:
  with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or nobody reads
    print(line, file=sys.stderr, flush=True)
    sys.stdout.flush()


def everyone(value: object) -> list[Any]:
  """Returns the JSON values of all processes, in their order. Every process has to call this.

  They go through the coordination service: no device takes part. The watch over the run ends a long wait.
  """
  client, process, count = _compat.coordination()
  text = json.dumps(value)
  if client is None:
    return [json.loads(text)]
  key = f"mpjax/everyone/{next(_meetings)}"
  client.key_value_set(f"{key}/{process}", text)
  if process == 0:  # so that each of thousands of processes asks only once
    texts = [client.blocking_key_value_get(f"{key}/{i}", _FOR_EVER_MS) for i in range(count)]
    client.key_value_set(f"{key}/all", f"[{','.join(texts)}]")
  found: list[Any] = json.loads(client.blocking_key_value_get(f"{key}/all", _FOR_EVER_MS))
  return found


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that decide what a step computes."""
  packages = ("mpjax", "jax", "jaxlib", "flax", "optax", "numpy")
  found = {name: importlib.import_module(name).__version__ for name in packages}
  return {"python": platform.python_version(), **found}


def signal_of_any(processes: Processes) -> Callable[[], int | None]:
  """Returns a function to call after each step, for the signal that any process of a run received.

  All then stop after the same step. Each call asks the others, by one number that crosses the devices, and
  reads the answer of the call before, which is there by then, so that nothing waits. In a single process the
  answer is its own signal at once.
  """
  if processes.count == 1:
    return lambda: processes.interrupt.signum
  mesh = jax.sharding.Mesh(np.array(jax.devices()), ("everywhere",), axis_types=(AxisType.Auto,))
  one_each = NamedSharding(mesh, PartitionSpec("everywhere"))
  largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
  asked: list[jax.Array] = []

  def answer() -> int | None:
    own = np.full(jax.local_device_count(), processes.interrupt.signum or 0, np.int32)
    asked.append(largest(jax.make_array_from_process_local_data(one_each, own)))
    return int(asked.pop(0)) or None if len(asked) > 1 else None

  return answer
