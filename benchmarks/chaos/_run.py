"""One training run under faults, and whether it ends as its undisturbed twin did."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.chaos import _disturbance as disturbance
from benchmarks.chaos._contents import contents, difference
from benchmarks.chaos._damage import Damage, damage, damage_summary
from benchmarks.chaos._disturbance import HANG_TIMEOUT_S, KILLED, Disturbed, Place
from benchmarks.chaos._starts import HUNG, Team, checkpoints, newest_checkpoint

STEPS, EVERY = 60, 10
TIMEOUT_S = 180
# What happens to the processes of a start, and how often of all.
EVENTS: dict[str, tuple[int, Callable[[Team, random.Random], Disturbed]]] = {
  "SIGKILL at the start": (3, disturbance.kill_at_start),
  "SIGKILL in a step": (5, disturbance.kill_in_step),
  "SIGKILL in a checkpoint write": (5, disturbance.kill_in_checkpoint),
  "SIGTERM": (2, disturbance.terminate),
  "Ctrl-C": (2, disturbance.ctrl_c),
  "SIGHUP": (1, disturbance.hang_up),
  "pause": (3, disturbance.pause),
  "pause longer than hang_timeout_s": (1, disturbance.long_pause),
  "run directory moved": (2, disturbance.move),
  "run directory deleted": (1, disturbance.delete),
}
FULL = "disk full"
SIZES = ("data", "fsdp")


class Example(NamedTuple):
  """What is trained: a config, what makes it small, and by how many processes."""

  config: str
  overrides: tuple[str, ...]
  processes: int = 1

  @property
  def name(self) -> str:
    """Returns what a report calls it."""
    return self.config + (f", {self.processes} processes" if self.processes > 1 else "")


class Fault(NamedTuple):
  """One fault: what was done, what the run made of it, and whether that was right."""

  kind: str
  detail: str
  outcome: str
  right: bool = True


class Run:
  """A run directory, what was done to it, and what it is to be in the end.

  Args:
    example: what is trained.
    out: the run directory, on `place`.
    place: where it is.
    scratch: where logs and copies go.
    twin: contents of the run that nobody disturbs.
    chance: decides everything.
  """

  def __init__(
    self,
    example: Example,
    out: pathlib.Path,
    place: Place,
    scratch: pathlib.Path,
    twin: dict[str, Any],
    chance: random.Random,
  ):
    self.example, self.out, self.place, self.scratch, self.chance = example, out, place, scratch, chance
    self.expected = twin
    self.faults: list[Fault] = []
    self.destroyed: set[int] = set()
    self.taken_again: list[int] = []
    self.problem = ""
    self._mesh, self._devices = mesh_of("data", example.processes > 1)[0], 1
    self._since = 0  # the step from which the twin is on this mesh

  def go(self) -> None:
    """Disturbs the run a few times, lets it end, and compares it; `problem` says what is wrong then."""
    for _ in range(self.chance.randrange(2, 7)):
      self._round()
      if self.problem or self._is_finished():
        break
    if not self.problem:
      self._finish()

  def _is_finished(self) -> bool:
    return (self.out / "summary.json").exists()

  def _start(self, out: pathlib.Path | None = None, extra: Sequence[str] = (), **options: Any) -> Team:
    arguments = [*arguments_of(self.example), *self._mesh, *extra]
    log = self.scratch / "log.txt"
    processes, devices = self.example.processes, self._devices
    return Team(arguments, out or self.out, log, processes=processes, devices=devices, **options)

  def _round(self) -> None:
    """Damages or changes what stands still, perhaps, and disturbs one start."""
    done: Damage | None = None
    if steps := [int(each.name) for each in checkpoints(self.out)]:
      # Without the checkpoint of that step, the run would take steps again that the twin took elsewhere.
      may_lose_one = sum(step >= self._since for step in steps) > 1 or not self._since
      if self.chance.random() < 0.5 and may_lose_one:
        done = damage(self.out, self.chance)
      if done is None and self.chance.random() < 0.2:
        self._change_mesh()
    if done is not None and done.mend is not None:
      self._refused(done)
      return
    self._disturbed(done)

  def _refused(self, done: Damage) -> None:
    """Starts a run that cannot go on, which has to be said in a line."""
    team = self._start()
    statuses = team.statuses(TIMEOUT_S)
    self._judge(team, statuses, (2,))
    assert done.mend is not None
    done.mend()
    self._note(done.kind, done.detail, f"refused with status {statuses[0]}, mended by hand")

  def _disturbed(self, done: Damage | None) -> None:
    """Starts the run under one thing that ends it, perhaps, and others that do not."""
    before: list[Callable[[], None]] = []
    noted: list[tuple[str, str]] = []
    extra: list[str] = []
    choices = dict(EVENTS)
    if self.example.processes > 1:  # another process would rightly take a paused one for lost
      choices.pop("pause longer than hang_timeout_s")
    if self._since:  # it would begin on this mesh, and its twin began on another
      choices.pop("run directory deleted")
    kinds = [*choices, FULL]
    kind = self.chance.choices(kinds, [*(weight for weight, _ in choices.values()), 4])[0]
    if kind == "pause longer than hang_timeout_s":
      extra.append(f"distributed.hang_timeout_s={HANG_TIMEOUT_S}")
    if self.chance.random() < 0.2:
      now, then = (self.chance.choice((-20000, -400, -40, -1, 10, 400, 7000)) for _ in range(2))
      jump_s = self.chance.random() * 4
      before.append(lambda: disturbance.move_clock(now, then, jump_s))
      noted.append(("clock moved", f"{now:+} days, then {then:+}"))
    with contextlib.ExitStack() as stack:
      stdout, close = self._stdout(stack, noted, before)
      fill: Callable[[], None] = lambda: None
      at_once = self.chance.random() < 0.4
      if kind == FULL and self.place.small:
        detail, fill = stack.enter_context(disturbance.full_disk(self.place, self._some_bytes(), at_once))
      elif kind == FULL:
        limit = self.chance.randrange(12_000, 120_000)
        detail = f"no file over {limit} bytes"
        before.append(lambda: disturbance.limit_files(limit))
      resumed_from = newest_checkpoint(self.out)
      team = self._start(extra=extra, before=lambda _: [call() for call in before], stdout=stdout)
      if close is not None:
        step = resumed_from + self.chance.randrange(5)
        team.wait_until(lambda: team.has_logged(step))
        close()
      if kind == FULL:
        if self.place.small and not at_once:
          step = resumed_from + self.chance.randrange(1, 30)
          team.wait_until(lambda: team.has_logged(step))
          fill()
        happened = Disturbed(detail, (0, 2, 4, *((5,) if self.example.processes > 1 else ())))
      else:
        happened = choices[kind][1](team, self.chance)
      statuses = team.statuses(TIMEOUT_S)
    allowed = (*happened.statuses, *((2, 4) if kind == FULL and done else ()))
    self._judge(team, statuses, allowed)
    self._follow(team, happened, kind)
    outcome = _OUTCOMES.get(statuses[0], f"status {statuses[0]}")
    if done is not None:
      self.destroyed |= done.destroyed
      self._note(done.kind, done.detail, self._what_was_said(done, team, statuses, stdout))
    for name, what in noted:
      self._note(name, what, outcome)
    self._note(kind, happened.detail, outcome)

  def _some_bytes(self) -> int:
    return self.chance.choice((0, 3_000, 30_000, self.chance.randrange(1_500_000)))

  def _stdout(
    self, stack: contextlib.ExitStack, noted: list[tuple[str, str]], before: list[Callable[[], None]]
  ) -> tuple[int | None, Callable[[], None] | None]:
    """Returns a standard output that will not do, now and then, and what takes its reader away."""
    if self.chance.random() > 0.2:
      return None, None
    if self.chance.random() < 0.3:
      noted.append(("stdout lost", "a full disk"))
      descriptor = os.open("/dev/full", os.O_WRONLY)
      stack.callback(os.close, descriptor)
      return descriptor, None
    noted.append(("stdout lost", "its reader goes away"))
    reader, writer = os.pipe()
    stack.callback(os.close, writer)
    before.append(lambda: os.close(reader))  # the copy of a process would have a reader for ever
    return writer, lambda: os.close(reader)

  def _judge(self, team: Team, statuses: list[int], allowed: Sequence[int]) -> None:
    """Notes what no fault may bring: another status, a hang, a traceback, an error without its line."""
    said = team.said()
    if HUNG in statuses:
      self.problem = "hung"
    elif not set(statuses) <= set(allowed):
      self.problem = f"ended with {statuses}, expected {sorted(set(allowed))}"
    elif "Traceback (most recent call last)" in said and KILLED not in statuses:
      self.problem = "a traceback"
    elif {2, 4} & set(statuses) and "error: " not in said:
      self.problem = "an error without a line"
    if self.problem:
      self.problem += f"; it said:\n{said[-3000:]}"

  def _follow(self, team: Team, happened: Disturbed, kind: str) -> None:
    """Goes to where the run is now, and counts the steps that have to be taken again."""
    if happened.deleted:
      self.destroyed |= set(range(1, STEPS + 1))
    if happened.moved_to is not None:
      self.out = happened.moved_to
    told = re.search(r"with out=(\S+) resumes", team.said())
    if told:
      self.out = pathlib.Path(told[1])
    elif kind.startswith("SIGKILL") and not self._is_finished():
      self.taken_again.append(max(team.last_logged() - newest_checkpoint(self.out), 0))

  def _what_was_said(self, done: Damage, team: Team, statuses: list[int], stdout: int | None) -> str:
    """Returns whether a start has told of damage; that it had to and did not is a problem."""
    said = team.said()
    resumed = re.search(r"resumed after step (\d+)", said)
    words = {"metrics.jsonl damaged": ("not a record", "are missing")}.get(done.kind, (" is damaged: ",))
    if any(word in said for word in words):
      return "told"
    if resumed is None or stdout is not None or statuses[0] not in (0, 129, 130, 143):
      return "the start was over before it could tell"
    lost = {step for step in done.destroyed if step <= int(resumed[1])}
    if done.kind == "metrics.jsonl damaged" and (lost or not done.destroyed):
      self.problem = self.problem or f"{done.kind}, {done.detail}: nothing was said of it:\n{said[-3000:]}"
    return "nothing to tell: the run does not need it"

  def _note(self, kind: str, detail: str, outcome: str) -> None:
    self.faults.append(Fault(kind, detail, outcome, not self.problem))

  def _change_mesh(self) -> None:
    """Takes the run up on another mesh; a copy of it, left alone there, is its twin from now on.

    Numbers are then added in another order, so that the old twin is near, and not the same.
    """
    before = self._mesh
    many = self.example.processes > 1
    choices = [mesh_of(axis, two) for axis in SIZES for two in ((True,) if many else (False, True))]
    self._mesh, count = self.chance.choice([choice for choice in choices if choice[0] != before])
    self._devices = count // self.example.processes
    self._since = newest_checkpoint(self.out)
    copy = self.scratch / "copy"
    shutil.copytree(self.out, copy)
    team = self._start(copy)
    statuses = team.statuses(TIMEOUT_S)
    self._judge(team, statuses, (0,))
    outcome = "did not go on"
    if not self.problem:
      old, self.expected = self.expected, contents(copy, self.scratch)
      losses = [found["summary"]["eval_loss"] for found in (old, self.expected)]
      off = abs(losses[1] / losses[0] - 1)
      outcome = "trained on: as a copy left alone does"
      if off > 0.05:
        self.problem = f"on {self._mesh} the evaluation loss is {losses[1]}, expected about {losses[0]}"
    self._note("mesh changed", f"{' '.join(before)} to {' '.join(self._mesh)}", outcome)
    shutil.rmtree(copy)

  def _finish(self) -> None:
    """Lets the run end, compares it, and now and then damages the summary and has it made again."""
    if not self._is_finished():
      team = self._start()
      self._judge(team, team.statuses(TIMEOUT_S), (0,))
    self._compare()
    if not self.problem and self.chance.random() < 0.3:
      done = damage_summary(self.out, self.chance)
      team = self._start()
      self._judge(team, team.statuses(TIMEOUT_S), (0,))
      self._compare()
      self._note(done.kind, done.detail, "made again")

  def _compare(self) -> None:
    if not self.problem:
      self.problem = difference(contents(self.out, self.scratch), self.expected, self.destroyed)


# What a start made of what happened to it, by the first process's status.
_OUTCOMES = {
  0: "trained on to the end",
  2: "refused with status 2",
  4: "stopped with status 4",
  5: "stopped with status 5",
  129: "stopped with status 129",
  130: "stopped with status 130",
  134: "aborted by JAX (134)",
  KILLED: "killed",
  143: "stopped with status 143",
}


def arguments_of(example: Example) -> list[str]:
  """Returns the arguments of `mpjax train`, without the mesh and `out`."""
  train = {"steps": STEPS, "log_every": 1, "eval_every": 30, "checkpoint_every": EVERY}
  waits = {"heartbeat_timeout_s": 20, "start_timeout_s": 100}
  settings = [f"train.{key}={value}" for key, value in train.items()]
  if example.processes > 1:
    settings += [f"distributed.{key}={value}" for key, value in waits.items()]
  return [example.config, *example.overrides, *settings]


def mesh_of(axis: str, many: bool) -> tuple[list[str], int]:
  """Returns the overrides for a mesh of one axis, of one device or two, and how many devices that is."""
  size = 2 if many else 1
  return [f"mesh.{name}={size if name == axis else 1}" for name in SIZES], size


def twin_of(example: Example, folder: pathlib.Path, scratch: pathlib.Path) -> dict[str, Any]:
  """Trains an example undisturbed and returns what it leaves.

  Raises:
    RuntimeError: if it does not end well.
  """
  mesh, _ = mesh_of("data", example.processes > 1)
  out = folder / f"{example.config}-{example.processes}"
  arguments = [*arguments_of(example), *mesh]
  team = Team(arguments, out, scratch / "log.txt", processes=example.processes)
  if any(team.statuses(600)):
    raise RuntimeError(f"the undisturbed run of {example.name} failed:\n{team.said()[-3000:]}")
  return contents(out, scratch)
