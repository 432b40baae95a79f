"""What happens to a run while it trains: signals, pauses, full disks, lost readers, moved folders, clocks."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from benchmarks.chaos._starts import Team, newest_checkpoint

DAY = 24 * 3600.0
KILLED = 128 + signal.SIGKILL
# How long a run of one process that is to be paused for longer may stand still.
HANG_TIMEOUT_S = 15


class Place(NamedTuple):
  """Where run directories are made; `small` says that the disk holds nothing else and can be filled."""

  folder: pathlib.Path
  small: bool


class Disturbed(NamedTuple):
  """What was done to the processes of a start.

  Attributes:
    detail: for the report.
    statuses: which the first process may end with.
    moved_to: where the run directory is now; `None` for where it was.
    deleted: whether the run directory is gone with all that it had.
  """

  detail: str
  statuses: tuple[int, ...]
  moved_to: pathlib.Path | None = None
  deleted: bool = False


@contextlib.contextmanager
def places(root: pathlib.Path) -> Iterator[list[Place]]:
  """Yields the places for run directories: a disk of 64 MB, too, where one can be mounted."""
  usual, small = root / "usual", root / "small"
  usual.mkdir()
  small.mkdir()
  mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "none", str(small)]
  try:
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
  except OSError:
    mounted = False
  try:
    yield [Place(usual, False), *([Place(small, True)] if mounted else [])]
  finally:
    if mounted:
      subprocess.run(["umount", str(small)], check=True)


def move_clock(days: float, then: float, jump_s: float) -> None:
  """Gives this process a clock that is some days off, and others once some seconds have passed.

  Python's own code sees it; what C++ reads is the machine's.
  """
  jump, real, real_ns = time.monotonic() + jump_s, time.time, time.time_ns
  offset = lambda: DAY * (then if time.monotonic() > jump else days)
  time.time = lambda: real() + offset()
  time.time_ns = lambda: real_ns() + int(offset() * 1e9)


def limit_files(size: int) -> None:
  """Lets this process write no file of more than `size` bytes, as on a full disk."""
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextlib.contextmanager
def full_disk(place: Place, left: int, at_once: bool) -> Iterator[tuple[str, Callable[[], None]]]:
  """Yields what fills a small disk but for `left` bytes, which is free again afterwards."""
  filler = place.folder / "filler"

  def fill() -> None:
    size = 0
    with filler.open("wb") as file, contextlib.suppress(OSError):  # the run took the rest
      while (more := shutil.disk_usage(place.folder).free - left) > 0:
        os.posix_fallocate(file.fileno(), size, min(more, 1 << 20))
        size += min(more, 1 << 20)

  if at_once:
    fill()
  try:
    yield f"{left} bytes left" + (" from the start" if at_once else ""), fill
  finally:
    filler.unlink(missing_ok=True)


def kill_at_start(team: Team, chance: random.Random) -> Disturbed:
  """Kills a process within the time that a start takes."""
  wait = chance.random() * 2.5
  team.wait_until(lambda: False, wait)
  return _kill(team, chance, f"after {wait:.1f} s")


def kill_in_step(team: Team, chance: random.Random) -> Disturbed:
  """Kills a process at some moment of some step."""
  step = _some_step(team, chance)
  time.sleep(chance.random() * 0.02)
  return _kill(team, chance, f"after step {step}")


def kill_in_checkpoint(team: Team, chance: random.Random) -> Disturbed:
  """Kills a process while a checkpoint is being written."""
  step = _some_step(team, chance)
  team.wait_until(team.is_writing)
  time.sleep(chance.random() * 0.03)
  return _kill(team, chance, f"in the first write after step {step}")


def _kill(team: Team, chance: random.Random, detail: str) -> Disturbed:
  victim = chance.randrange(len(team.ids))
  team.signal(signal.SIGKILL, victim)
  # 134: JAX's runtime aborts those whose coordinator is lost.
  return Disturbed(f"process {victim} {detail}", (0, KILLED, *((5, 134) if len(team.ids) > 1 else ())))


def terminate(team: Team, chance: random.Random) -> Disturbed:
  """Sends SIGTERM to a process."""
  step = _some_step(team, chance)
  team.signal(signal.SIGTERM, chance.randrange(len(team.ids)))
  return Disturbed(f"after step {step}", (0, 143))


def ctrl_c(team: Team, chance: random.Random) -> Disturbed:
  """Sends SIGINT to a process, or twice in a row."""
  step = _some_step(team, chance)
  victim, twice = chance.randrange(len(team.ids)), len(team.ids) == 1 and chance.random() < 0.4
  team.signal(signal.SIGINT, victim)
  if twice:
    time.sleep(chance.random() * 0.1)
    team.signal(signal.SIGINT, victim)
  return Disturbed(f"{'twice ' if twice else ''}after step {step}", (0, 130))


def hang_up(team: Team, chance: random.Random) -> Disturbed:
  """Sends SIGHUP to a process."""
  step = _some_step(team, chance)
  team.signal(signal.SIGHUP, chance.randrange(len(team.ids)))
  return Disturbed(f"after step {step}", (0, 129))


def pause(team: Team, chance: random.Random) -> Disturbed:
  """Stops a process for a while."""
  step = _some_step(team, chance)
  return _pause(team, chance, f"after step {step}", 0.1 + 2 * chance.random())


def long_pause(team: Team, chance: random.Random) -> Disturbed:
  """Stops a process for longer than it may hang, in a checkpoint's write where that can be had."""
  step = _some_step(team, chance)
  team.wait_until(team.is_writing)
  return _pause(team, chance, f"after step {step}", HANG_TIMEOUT_S + 4)


def _pause(team: Team, chance: random.Random, when: str, seconds: float) -> Disturbed:
  victim = chance.randrange(len(team.ids))
  team.signal(signal.SIGSTOP, victim)
  time.sleep(seconds)
  team.signal(signal.SIGCONT, victim)
  return Disturbed(f"{seconds:.1f} s {when}", (0,))


def move(team: Team, chance: random.Random) -> Disturbed:
  """Moves the run directory, and may put another one in its place."""
  step = _some_step(team, chance)
  new = pathlib.Path(tempfile.mkdtemp(prefix="moved-", dir=team.out.parent)) / "run"
  replaced = chance.random() < 0.3
  team.out.rename(new)
  if replaced:
    team.out.mkdir()
    (team.out / "of another").write_text("x")
  detail = f"after step {step}{', another in its place' if replaced else ''}"
  return Disturbed(detail, (0, 4, *_lost(team)), moved_to=new)


def delete(team: Team, chance: random.Random) -> Disturbed:
  """Deletes the run directory, between two moments of the run."""
  step = _some_step(team, chance)
  team.signal(signal.SIGSTOP)
  shutil.rmtree(team.out, ignore_errors=True)
  team.signal(signal.SIGCONT)
  return Disturbed(f"after step {step}", (0, 4, *_lost(team)), deleted=True)


def _lost(team: Team) -> tuple[int, ...]:
  return (5, 134) if len(team.ids) > 1 else ()


def _some_step(team: Team, chance: random.Random) -> int:
  """Waits until this start has logged some step, chosen at random, and returns it."""
  step = newest_checkpoint(team.out) + chance.randrange(1, 30)
  team.wait_until(lambda: team.has_logged(step))
  return step
