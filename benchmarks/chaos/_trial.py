"""What a case of the fault table works with: a folder, copies of runs, starts of commands, judgements."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from benchmarks.chaos import _mutations
from benchmarks.chaos._contents import contents, difference
from benchmarks.chaos._disturbance import KILLED, Disturbed
from benchmarks.chaos._run import Example, arguments_of, mesh_of, twin_of
from benchmarks.chaos._starts import HUNG, OUT_OF_TIME, Team, checkpoints, ended, fork, limit_time
from mpjax.cli import main

TIMEOUT_S, SECONDS = 600, 60  # of waiting, and of processor time
TINY: tuple[str, ...] = (
  "policy={base: fp16, loss_scaling: {init_scale: 16777216, growth_interval: 20}}",
  "model.layers=1",
)
TINY += ("model.heads=2", "model.dim=16", "model.dropout=0.1", "data.kind=text", "data.seq_len=16")
TINY += ("data.batch_size=4", "data.eval_batches=2")
_ERROR = re.compile(r"^(?:process \d+: |mpjax [\w ]*: )?error: ", re.MULTILINE)
_TRACEBACK = "Traceback (most recent call last)"
# linux/capability.h: version 3; CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER
_CAPABILITY_VERSION, _PASSES_OVER = 0x20080522, 0b1110


class Wrong(Exception):
  """A fault ended in another way than it has to."""


class NotHere(Exception):
  """A case cannot be tried on this machine, or could not be judged."""


class Prepared(NamedTuple):
  """What every case may copy or compare with, and none may change.

  Attributes:
    example: one process; `pair` is the same in two.
    finished: the run directory of an undisturbed run.
    stopped: that of one which SIGTERM stopped after step 40, with the checkpoint of step 40 before its last.
    twin: what an undisturbed run leaves; `twin_of_pair` in two processes.
    configs: the example configs with all keys, as plain data.
    older: the Python of an environment with an older JAX; empty for none.
  """

  example: Example
  pair: Example
  finished: pathlib.Path
  stopped: pathlib.Path
  twin: dict[str, Any]
  twin_of_pair: dict[str, Any]
  configs: dict[str, dict[str, Any]]
  older: str


Case = Callable[["Trial"], str | None]


class Row(NamedTuple):
  """A row of the table.

  Attributes:
    name: what is done.
    expected: what each case has to end in.
    cases: by name; each raises `Wrong` or `NotHere`, or returns what is counted of it, or `None`.
  """

  name: str
  expected: str
  cases: Mapping[str, Case]


def each(case: Callable[..., str | None], cases: Mapping[str, tuple[Any, ...]]) -> dict[str, Case]:
  """Returns a case for each name: a function of a trial and what stands beside the name."""

  def of(values: tuple[Any, ...]) -> Case:
    return lambda trial: case(trial, *values)

  return {name: of(values) for name, values in cases.items()}


def prepare(root: pathlib.Path, older: str) -> Prepared:
  """Trains what cases copy and compare with.

  Raises:
    RuntimeError: if that does not end well.
  """
  folder = root / "prepared"
  text = folder / "text"
  text.mkdir(parents=True)
  for i in range(4):
    (text / f"{i}.txt").write_text("".join(f"def f{j}(x):\n  return x + {i * j}\n" for j in range(60)))
  one = Example("gpt_stdlib", (*TINY, f"data.path={text}"))
  two = one._replace(processes=2)
  twins = twin_of(one, folder, folder), twin_of(two, folder, folder)
  stopped = folder / "stopped"
  for _ in range(9):
    shutil.rmtree(stopped, ignore_errors=True)
    team = Team([*arguments_of(one), *mesh_of("data", False)[0]], stopped, folder / "log.txt")
    team.wait_until(functools.partial(team.has_logged, 41))
    team.signal(signal.SIGTERM)
    if team.statuses(TIMEOUT_S) == [143] and int(checkpoints(stopped)[-1].name) > 40:
      break
  else:
    raise RuntimeError(f"a run could not be stopped between two checkpoints:\n{team.said()[-2000:]}")
  configs = _mutations.good_configs(folder)
  return Prepared(one, two, folder / "gpt_stdlib-1", stopped, *twins, configs, older)


class Trial:
  """One case: a folder of its own, and the run directory in it.

  Args:
    folder: empty.
    prepared: what may be copied.
    chance: decides what the case leaves open.
  """

  def __init__(self, folder: pathlib.Path, prepared: Prepared, chance: random.Random):
    self.folder, self.prepared, self.chance = folder, prepared, chance
    self.out = folder / "run"

  def stopped(self) -> pathlib.Path:
    """Makes the run directory one that was stopped after step 40, and returns it."""
    return pathlib.Path(shutil.copytree(self.prepared.stopped, self.out, symlinks=True))

  def finished(self) -> pathlib.Path:
    """Makes the run directory that of a finished run, and returns it."""
    return pathlib.Path(shutil.copytree(self.prepared.finished, self.out, symlinks=True))

  def start(self, *overrides: str, out: pathlib.Path | None = None, **options: Any) -> Team:
    """Starts the run; `options` are those of `Team`, and `axis`: of the mesh."""
    processes, devices = options.get("processes", 1), options.get("devices", 1)
    mesh, _ = mesh_of(options.pop("axis", "data"), processes * devices > 1)
    example = self.prepared.pair if processes > 1 else self.prepared.example
    log = self.folder / f"log{time.monotonic_ns()}.txt"
    return Team([*arguments_of(example), *mesh, *overrides], out or self.out, log, **options)

  def train(self, *overrides: str, statuses: Sequence[int] = (0,), **options: Any) -> str:
    """Starts the run, waits for its end, judges that, and returns what it said."""
    return self.end(self.start(*overrides, **options), statuses)[1]

  def end(self, team: Team, statuses: Sequence[int], timeout_s: float = TIMEOUT_S) -> tuple[list[int], str]:
    """Waits for the end of a start and judges it; returns the statuses and what was said."""
    found, said = team.statuses(timeout_s), team.said()
    judge(found, said, statuses)
    return found, said

  def meets(self, event: Callable[[Team, random.Random], Disturbed], *overrides: str, **options: Any) -> str:
    """Starts the run, lets something happen to it and judges how it ends; returns what it said."""
    team = self.start(*overrides, **options)
    happened = event(team, self.chance)
    return self.end(team, happened.statuses)[1]

  def is_as_its_twin(
    self, out: pathlib.Path | None = None, destroyed: frozenset[int] = frozenset(), pair: bool = False
  ) -> None:
    """Compares what a run left with what an undisturbed one did, bit for bit.

    Raises:
      Wrong: if they differ in more than records that were destroyed.
    """
    twin = self.prepared.twin_of_pair if pair else self.prepared.twin
    try:
      found = contents(out or self.out, self.folder)
    except RuntimeError as error:
      raise Wrong(str(error)) from error
    if told := difference(found, twin, set(destroyed)):
      raise Wrong(f"not as its twin: {told}")

  def goes_on(self, *overrides: str, destroyed: frozenset[int] = frozenset(), **options: Any) -> str:
    """Trains to the end, as the twin; returns what was said."""
    said = self.train(*overrides, **options)
    self.is_as_its_twin(options.get("out"), destroyed, options.get("processes", 1) > 1)
    return said

  def goes_on_or_is_refused(self, mend: Callable[[], object], out: pathlib.Path | None = None) -> str:
    """Trains to the end, or is refused in a line and, once that is mended, does; returns which."""
    team = self.start(out=out)
    statuses, _ = self.end(team, (0, 2, 4))
    if statuses != [0]:
      mend()
      self.train(out=out)
    self.is_as_its_twin(out)
    return "went on" if statuses == [0] else "refused, went on when mended"

  def refused(self, mend: Callable[[], object] = lambda: None, *overrides: str) -> None:
    """Is refused with status 2 in a line and without a change, and goes on once that is mended."""
    before = digest(self.out)
    self.train(*overrides, statuses=(2,))
    if digest(self.out) != before:
      raise Wrong("refused, and the run directory is changed")
    mend()
    self.goes_on()

  def command(
    self,
    *arguments: str,
    statuses: Sequence[int] = (0, 2),
    before: Callable[[], object] = lambda: None,
    seconds: int = SECONDS,
  ) -> tuple[int, str]:
    """Runs a command on one device, and judges its end; returns the status and what was said.

    Raises:
      NotHere: if it has not ended in so many seconds of processor time.
    """
    log = self.folder / f"log{time.monotonic_ns()}.txt"

    def work() -> int:
      jax.config.update("jax_num_cpu_devices", 1)
      limit_time(seconds)
      before()
      return main(list(arguments))

    status = ended(fork(work, log), TIMEOUT_S)
    said = log.read_text(errors="replace")
    if status == OUT_OF_TIME and _TRACEBACK not in said:
      raise NotHere(f"no end within {seconds} s of processor time")
    judge([status], said, statuses)
    return status, said


def judge(found: Sequence[int], said: str, allowed: Sequence[int]) -> None:
  """Raises `Wrong` for another status, a hang, a traceback, or an error that is not told in one line."""
  problem = ""
  errors = len(_ERROR.findall(said))
  if HUNG in found:
    problem = "hung"
  elif _TRACEBACK in said and KILLED not in found:
    problem = f"a traceback, status {', '.join(map(str, found))}"
  elif not set(found) <= set(allowed):
    problem = f"ended with {', '.join(map(str, found))}, expected {', '.join(map(str, allowed))}"
  elif {2, 3, 4} & set(found) and (not errors if len(found) > 1 else errors != 1):
    problem = f"status {', '.join(map(str, found))} with {errors} error lines"
  if problem:
    at = said.find(_TRACEBACK)
    part = said[max(at - 200, 0) :][:1500] if at >= 0 else said[-1500:]
    # Whole lines: of a path that is cut, the report could not tell where it was.
    raise Wrong(f"{problem}; it said: {_whole_lines(part, said)}")


def _whole_lines(part: str, said: str) -> str:
  return (part if part == said else part.partition("\n")[2].rpartition("\n")[0] or part).strip()


def says(said: str, *words: str) -> None:
  """Raises `Wrong` unless one of the words was said."""
  if not any(word in said for word in words):
    raise Wrong(f"said nothing of {' or '.join(words)}: {said[-1000:].strip()}")


def digest(path: pathlib.Path) -> dict[str, tuple[int, bytes]]:
  """Returns the modes and contents of all files below a path, itself included; links are not followed."""
  found = {}
  for entry in [path, *sorted(path.rglob("*"))] if path.is_dir() and not path.is_symlink() else [path]:
    if entry.is_symlink():
      found[str(entry)] = (0, os.readlink(entry).encode())
    elif entry.is_file() and entry.name != ".lock":
      found[str(entry)] = (entry.stat().st_mode, entry.read_bytes())
  return found


def bound_by_permissions(*_: object) -> None:
  """Makes this process, also one of root's, one that may not pass over the permissions of files."""
  libc = ctypes.CDLL(None, use_errno=True)
  header, sets = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
  if libc.capget(header, sets):
    raise OSError(ctypes.get_errno(), "capget")
  for i in (0, 1):  # effective and permitted
    sets[i] &= ~_PASSES_OVER
  if libc.capset(header, sets):
    raise OSError(ctypes.get_errno(), "capset")
