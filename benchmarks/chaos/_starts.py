"""Starts of the command, forked from a process that has imported all of it: no start pays for that again."""

from __future__ import annotations

import gc
import os
import pathlib
import resource
import signal
import socket
import sys
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence

import jax

from mpjax.cli import main

_TICK_S = 0.005
HUNG = 1000  # as a status: nothing ends with it
OUT_OF_TIME = 128 + signal.SIGXCPU


def warm_up(cache: pathlib.Path) -> None:
  """Imports what a run needs, and says where compiled programs are kept. No device is touched."""
  import sklearn.datasets  # noqa: F401

  import mpjax.cli._train_command  # noqa: F401

  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  gc.collect()
  gc.freeze()  # what is shared with each start is not looked through again in it


def limit_time(seconds: int) -> None:
  """Lets this process use some seconds of processor time, however busy the machine is; then it is killed."""
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def fork(work: Callable[[], int], log: pathlib.Path, stdout: int | None = None) -> int:
  """Does some work in a process of its own and returns its id.

  Args:
    work: returns the exit status.
    log: where standard output and error go, at the end of what is there.
    stdout: a descriptor to take the place of standard output.
  """
  sys.stdout.flush()
  sys.stderr.flush()
  process = os.fork()
  if process:
    return process
  status = 1
  try:
    # A shell has some ignored in what it starts in the background.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGHUP, signal.SIGTERM):
      signal.signal(signum, signal.SIG_DFL)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file if stdout is None else stdout, 1)
    os.dup2(file, 2)
    status = work()
  except KeyboardInterrupt:  # before the command could see it
    status = 130
  except SystemExit as ended:
    status = ended.code if isinstance(ended.code, int) else 1
  except BaseException:
    traceback.print_exc()
  finally:
    try:
      sys.stdout.flush()
      sys.stderr.flush()
    finally:
      os._exit(status)


def ended(process: int, timeout_s: float) -> int:
  """Waits for a process and returns its status, as a shell shows it; kills it where it does not end."""
  end = time.monotonic() + timeout_s
  while time.monotonic() < end:
    found, status = os.waitpid(process, os.WNOHANG)
    if found:
      code = os.waitstatus_to_exitcode(status)
      return 128 - code if code < 0 else code
    time.sleep(_TICK_S)
  os.kill(process, signal.SIGKILL)
  os.waitpid(process, 0)
  return HUNG


class Team:
  """The processes of one start of a run.

  Args:
    arguments: of `mpjax train`.
    out: the run directory.
    log: where what they say goes; made anew.
    processes: how many.
    devices: of each.
    before: called in each of them before the command, with its number.
    stdout: a descriptor that takes the place of the first one's standard output.
    own: further arguments of some of them, by number.
  """

  def __init__(
    self,
    arguments: Sequence[str],
    out: pathlib.Path,
    log: pathlib.Path,
    *,
    processes: int = 1,
    devices: int = 1,
    before: Callable[[int], object] = lambda number: None,
    stdout: int | None = None,
    own: Mapping[int, Sequence[str]] = types.MappingProxyType({}),
  ):
    self.out, self._log = out, log
    self._inode = _inode(self._metrics)
    self._statuses: dict[int, int] = {}
    log.write_text("")
    address = f"127.0.0.1:{free_port()}"

    def command(number: int) -> Callable[[], int]:
      flags = ["--coordinator", address, "--num-processes", str(processes), "--process-id", str(number)]

      def work() -> int:
        jax.config.update("jax_num_cpu_devices", devices)
        before(number)
        return main(
          ["train", *arguments, f"out={out}", *(flags if processes > 1 else []), *own.get(number, [])]
        )

      return work

    self.ids = [fork(command(i), log, None if i else stdout) for i in range(processes)]

  @property
  def _metrics(self) -> pathlib.Path:
    return self.out / "metrics.jsonl"

  def signal(self, signum: int, *numbers: int) -> None:
    """Sends a signal to some of the processes; to all by default."""
    for number in numbers or range(len(self.ids)):
      if self.is_running(number):
        os.kill(self.ids[number], signum)

  def is_running(self, number: int) -> bool:
    """Returns whether a process has not ended."""
    if number not in self._statuses:
      found, status = os.waitpid(self.ids[number], os.WNOHANG)
      if not found:
        return True
      code = os.waitstatus_to_exitcode(status)
      self._statuses[number] = 128 - code if code < 0 else code
    return False

  def wait_until(self, happens: Callable[[], bool], timeout_s: float = 120) -> bool:
    """Waits for something; returns False if a process ended before, or it did not happen in time."""
    end = time.monotonic() + timeout_s
    while all(map(self.is_running, range(len(self.ids)))) and time.monotonic() < end:
      if happens():
        return True
      time.sleep(_TICK_S)
    return False

  def has_logged(self, step: int) -> bool:
    """Returns whether this start has logged a step, or a later one."""
    # One that resumes begins the file anew.
    return _inode(self._metrics) != self._inode and last_step(self.out) >= step

  def last_logged(self) -> int:
    """Returns the newest step that this start has logged; 0 for none."""
    return last_step(self.out) if _inode(self._metrics) != self._inode else 0

  def is_writing(self) -> bool:
    """Returns whether a checkpoint is being written."""
    return next((self.out / "checkpoints").glob("*.orbax-checkpoint-tmp*"), None) is not None

  def statuses(self, timeout_s: float) -> list[int]:
    """Waits for all and returns their statuses, as a shell shows them."""
    for number, process in enumerate(self.ids):
      if self.is_running(number):
        self._statuses[number] = ended(process, timeout_s)
    return [self._statuses[number] for number in range(len(self.ids))]

  def said(self) -> str:
    """Returns what they wrote to standard output and error."""
    return self._log.read_text(errors="replace")


def last_step(out: pathlib.Path) -> int:
  """Returns the newest step that is logged in a run directory."""
  try:
    lines = (out / "metrics.jsonl").read_bytes().splitlines()
  except OSError:
    return 0
  words = [line[9:].partition(b",")[0] for line in lines[-2:] if line.startswith(b'{"step": ')]
  return max((int(word) for word in words if word.isdigit()), default=0)


def newest_checkpoint(out: pathlib.Path) -> int:
  """Returns the step that a start would resume from."""
  return max((int(path.name) for path in checkpoints(out)), default=0)


def checkpoints(out: pathlib.Path) -> list[pathlib.Path]:
  """Returns the complete checkpoints of a run directory, oldest first."""
  found = [path for path in (out / "checkpoints").glob("*") if path.name.isdecimal()]
  return sorted(found, key=lambda path: int(path.name))


def _inode(file: pathlib.Path) -> int | None:
  """Returns what changes when another file takes a file's place."""
  try:
    return file.stat().st_ino
  except OSError:
    return None


def free_port() -> int:
  """Returns a port that nothing listens at."""
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port: int = free.getsockname()[1]
    return port
