"""Rows of the fault table about what happens to processes: signals, disks, readers, clocks."""

from __future__ import annotations

import gc
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.chaos import _disturbance as disturbance
from benchmarks.chaos._contents import contents, difference
from benchmarks.chaos._disturbance import HANG_TIMEOUT_S, KILLED, places
from benchmarks.chaos._run import arguments_of, mesh_of
from benchmarks.chaos._starts import Team
from benchmarks.chaos._table_pairs import PAIR
from benchmarks.chaos._trial import Case, NotHere, Prepared, Row, Trial, Wrong, each, says

ROOT = pathlib.Path(__file__).parents[2]
_VARIANTS = ("", "", "", "train.checkpoint_wait=true", "train.checkpoint_wait=true", "data.workers=2")


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about processes."""
  same = "the same command ends as an undisturbed run, bit for bit"
  return [
    Row("a run, its resume after SIGKILL and its twin", "the same, bit for bit", _twins()),
    *(Row(f"SIGKILL {moment}", same, _kills(kill)) for moment, kill in _KILLS.items()),
    Row("Ctrl-C, SIGTERM, SIGHUP", f"130, 143 or 129, after a checkpoint; {same}", _signals()),
    Row("full disks, small files", f"4 in one line (2 at the start), or went on; {same}", _disks()),
    Row("output that nobody reads", "0; the rest is in `train.log`; the same end", _readers()),
    Row("run directory moved, deleted, replaced", "4, a checkpoint, where it is; goes on there", _moves()),
    Row("clocks that are moved", "0; the same end, bit for bit", _clocks()),
    Row("pauses, also beyond `hang_timeout_s`", "0; the same end, bit for bit", _pauses()),
    Row("learning rate 1e30", "3 in one line that names a tensor", _divergence()),
  ]


def _twins() -> dict[str, Case]:
  def same(trial: Trial, overrides: Sequence[str], options: dict[str, Any]) -> None:
    trial.train(*overrides, out=trial.folder / "twin", **options)
    team = trial.start(*overrides, **options)
    team.wait_until(lambda: team.has_logged(25))
    team.signal(signal.SIGKILL)
    trial.end(team, (KILLED,))
    trial.train(*overrides, **options)
    _as_twin(trial)

  cases: dict[str, tuple[Sequence[str], dict[str, Any]]] = {
    "one device": ((), {}),
    "`mesh.data` of 8 devices": (("mesh.data=8", "data.batch_size=8"), {"devices": 8}),
    "two processes": (PAIR, {"processes": 2}),
  }
  return each(same, cases)


def _as_twin(trial: Trial) -> None:
  """Compares a run with the one in `twin`, bit for bit."""
  found, twin = (contents(out, trial.folder) for out in (trial.out, trial.folder / "twin"))
  if told := difference(found, twin, set()):
    raise Wrong(f"not as its twin: {told}")


def _kill_in_evaluation(team: Team, chance: Any) -> disturbance.Disturbed:
  team.wait_until(lambda: team.has_logged(29))
  wait = chance.random() * 0.3
  time.sleep(wait)
  team.signal(signal.SIGKILL)
  return disturbance.Disturbed(f"{wait:.2f} s after step 29", (0, KILLED))


def _kill_after_resume(team: Team, chance: Any) -> disturbance.Disturbed:
  team.wait_until(lambda: "resumed after step" in team.said())
  time.sleep(chance.random() * 0.2)
  team.signal(signal.SIGKILL)
  return disturbance.Disturbed("after the resume", (0, KILLED))


_KILLS: dict[str, Callable[[Team, Any], disturbance.Disturbed]] = {
  "in a step": disturbance.kill_in_step,
  "in a checkpoint write": disturbance.kill_in_checkpoint,
  "at an evaluation": _kill_in_evaluation,
  "right after a resume": _kill_after_resume,
  "at the start": disturbance.kill_at_start,
}


def _kills(kill: Callable[[Team, Any], disturbance.Disturbed]) -> dict[str, Case]:
  def killed(trial: Trial, override: str) -> str:
    settings = [override] if override else []
    if kill is _kill_in_evaluation:  # one that takes as long as it has to, with a twin of its own
      settings.append("data.eval_batches=100")
      trial.train(*settings, out=trial.folder / "twin")
    if kill is _kill_after_resume:
      trial.stopped()
      settings = []  # of the run that was stopped
    team = trial.start(*settings)
    happened = kill(team, trial.chance)
    statuses, _ = trial.end(team, happened.statuses)
    trial.train(*settings)
    if kill is _kill_in_evaluation:
      _as_twin(trial)
    else:
      trial.is_as_its_twin()
    return "killed" if KILLED in statuses else "had ended before"

  return each(killed, {f"{i} {override}".strip(): (override,) for i, override in enumerate(_VARIANTS)})


def _signals() -> dict[str, Case]:
  def signalled(trial: Trial, signals: Sequence[int], apart: float, at: int, variant: int) -> str:
    team = trial.start()
    if at:
      team.wait_until(lambda: team.has_logged(at))
    else:
      time.sleep(0.4 * (variant + 1))
    for signum in signals:
      team.signal(signum)
      time.sleep(apart)
    statuses, said = trial.end(team, [*(128 + signum for signum in signals), 0])
    if at and len(signals) == 1 and statuses != [0]:
      says(said, "checkpoint of step")
    trial.goes_on()
    return f"status {statuses[0]}"

  def collected(trial: Trial) -> None:
    """What a signal raises within a callback of the collector is lost with it."""

    def interrupt(phase: str, info: object) -> None:
      gc.callbacks.remove(interrupt)
      signal.raise_signal(signal.SIGINT)

    trial.train(statuses=(130,), before=lambda _: gc.callbacks.append(interrupt))
    trial.goes_on()

  kinds: dict[str, tuple[Sequence[int], float, int]] = {
    "Ctrl-C": ([signal.SIGINT], 0, 7),
    "SIGTERM": ([signal.SIGTERM], 0, 13),
    "SIGHUP": ([signal.SIGHUP], 0, 17),
    "Ctrl-C twice, 1 ms apart": ([signal.SIGINT] * 2, 0.001, 7),
    "Ctrl-C twice, 50 ms apart": ([signal.SIGINT] * 2, 0.05, 7),
    "Ctrl-C at the start": ([signal.SIGINT], 0, 0),
    "Ctrl-C twice at the start": ([signal.SIGINT] * 2, 0.05, 0),
    "SIGTERM, then Ctrl-C": ([signal.SIGTERM, signal.SIGINT], 0.02, 13),
  }
  cases = {
    f"{name}, {i}": (signals, apart, at + i * bool(at), i)
    for name, (signals, apart, at) in kinds.items()
    for i in range(3)
  }
  return each(signalled, cases) | {"Ctrl-C while memory is collected, at the start": collected}


def _disks() -> dict[str, Case]:
  def limited(trial: Trial, size: int, begun: bool) -> str:
    if begun:
      trial.stopped()
    team = trial.start(before=lambda _: disturbance.limit_files(size))
    statuses, _ = trial.end(team, (0, 2, 4))
    trial.goes_on()
    return f"status {statuses[0]}"

  def full(trial: Trial, left: int, at_once: bool) -> str:
    with places(trial.folder) as disks:
      if len(disks) < 2:
        raise NotHere("no small disk can be mounted")
      out = disks[1].folder / "run"
      with disturbance.full_disk(disks[1], left, at_once) as (_, fill):
        team = trial.start(out=out)
        if not at_once:
          team.wait_until(lambda: team.has_logged(12))
          fill()
        statuses, _ = trial.end(team, (0, 2, 4))
      trial.goes_on(out=out)
    return f"status {statuses[0]}"

  whats = {"a new run": False, "a begun run": True}
  limits = {
    f"no file over {size} bytes, {what}": (size, begun)
    for size in (500, 2_000, 12_000, 30_000, 60_000)
    for what, begun in whats.items()
  }
  disks = {
    f"{left} bytes left {'from the start' if at_once else 'after step 12'}": (left, at_once)
    for left in (0, 3_000, 30_000, 300_000, 900_000, 1_400_000)
    for at_once in (True, False)
  }
  return each(limited, limits) | each(full, disks)


def _readers() -> dict[str, Case]:
  def told(trial: Trial) -> None:
    trial.is_as_its_twin()
    log = trial.out / "train.log"
    says(log.read_text() if log.exists() else "", "stdout cannot be written")

  def gone(trial: Trial, at: int) -> None:
    reader, writer = os.pipe()
    team = trial.start(stdout=writer, before=lambda _: os.close(reader))  # its copy would be read for ever
    os.close(writer)
    if at:
      team.wait_until(lambda: team.has_logged(at))
    os.close(reader)
    trial.end(team, (0,))
    told(trial)

  def full(trial: Trial) -> None:
    with open("/dev/full", "w") as device:
      trial.train(stdout=device.fileno())
    told(trial)

  def closed(trial: Trial, streams: Sequence[int]) -> None:
    def close(_: int) -> None:
      for stream in streams:
        os.close(stream)
        setattr(sys, ("", "stdout", "stderr")[stream], None)  # as Python itself has it then

    trial.train(before=close)
    told(trial)

  def ascii_alone(trial: Trial) -> None:
    out = trial.folder / "é"
    trial.train(out=out, before=lambda _: sys.stdout.reconfigure(encoding="ascii"))  # type: ignore[union-attr]
    trial.is_as_its_twin(out)

  def shell(trial: Trial, line: str) -> None:
    arguments = [*arguments_of(trial.prepared.example), *mesh_of("data", False)[0], f"out={trial.out}"]
    (trial.folder / "arguments").write_text("\n".join(arguments))
    command = line.format(f"xargs -d '\\n' -a arguments {sys.executable} -m mpjax train")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    script = ["bash", "-c", f"set -o pipefail; {command}"]
    done = subprocess.run(script, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode or "Traceback" in done.stderr:
      raise Wrong(f"status {done.returncode}: {done.stderr[-800:]}")
    told(trial)

  return {
    **each(gone, {f"its reader is gone after step {at}": (at,) for at in (0, 1, 5, 31, 50)}),
    "/dev/full": full,
    **each(closed, {"stdout closed": ([1],), "stdout and stderr closed": ([1, 2],)}),
    "an ASCII terminal, `out` with an accent": ascii_alone,
    **each(shell, {line: (line,) for line in ("{} | head -1", "{} >&-", "{} >/dev/full")}),
  }


def _moves() -> dict[str, Case]:
  def happens(trial: Trial, fate: str, at: int, writing: bool) -> str:
    settings = () if writing else ("train.checkpoint_wait=true",)
    team = trial.start(*settings)
    team.wait_until(lambda: team.has_logged(at))
    if writing:
      team.wait_until(team.is_writing)
    team.signal(signal.SIGSTOP)
    there = trial.folder / "elsewhere"
    if "moved" in fate:
      trial.out.rename(there)
    else:
      shutil.rmtree(trial.out)
    if "replaced" in fate:
      trial.out.mkdir()
      (trial.out / "mine").write_text("x")
    team.signal(signal.SIGCONT)
    statuses, said = trial.end(team, (4,))
    refuge = re.search(r"with out=(\S+) resumes", said)
    if refuge is None:
      raise Wrong(f"said nothing of where the run is: {said[-800:]}")
    if "replaced" in fate and (names := sorted(path.name for path in trial.out.iterdir())) != ["mine"]:
      raise Wrong(f"wrote in the directory that took its place: {', '.join(names)}")
    lost: frozenset[int] = frozenset() if "moved" in fate else frozenset(range(1, 61))
    trial.goes_on(*settings, out=pathlib.Path(refuge[1]), destroyed=lost)
    return f"status {statuses[0]}"

  fates = ("moved", "deleted", "deleted and replaced", "moved and replaced")
  moments = {"after step 5": (5, False), "after step 31": (31, False), "in a checkpoint write": (25, True)}
  return each(happens, {f"{fate} {when}": (fate, *at) for fate in fates for when, at in moments.items()})


def _clocks() -> dict[str, Case]:
  def moved(trial: Trial, days: float, then: float) -> None:
    trial.goes_on(before=lambda _: disturbance.move_clock(days, then, trial.chance.uniform(0.6, 1.6)))

  offsets: list[tuple[float, float]] = [
    (0, -1),
    (0, -24),
    (0, -25),
    (0, -40),
    (0, -20000),
    (0, 10),
    (0, 400),
    (0, 7000),
    (-40, 7000),
  ]
  offsets += [(7000, -400), (-20000, 0), (0.001, -0.001)]
  return each(moved, {f"{days:+g} days, then {then:+g}": (days, then) for days, then in offsets})


def _pauses() -> dict[str, Case]:
  def paused(trial: Trial, seconds: float, at: int, writing: bool) -> None:
    team = trial.start(f"distributed.hang_timeout_s={HANG_TIMEOUT_S}")
    team.wait_until(lambda: team.has_logged(at))
    if writing:
      team.wait_until(team.is_writing)
    team.signal(signal.SIGSTOP)
    time.sleep(seconds)
    team.signal(signal.SIGCONT)
    trial.end(team, (0,))
    trial.is_as_its_twin()

  cases = {
    f"{seconds} s {'in a checkpoint write' if writing else 'in a step'} after step {at}": (
      seconds,
      at,
      writing,
    )
    for seconds in (1, HANG_TIMEOUT_S + 4)
    for at, writing in ((9, True), (14, False), (29, True))
  }
  return each(paused, cases)


def _divergence() -> dict[str, Case]:
  policies = (
    "fp32",
    "fp16",
    "bf16_pure",
    "{base: fp16, loss_scaling: null}",
    "{base: fp16, loss_scaling: 1024}",
  )

  def diverges(trial: Trial, policy: str) -> None:
    settings = ("optimizer.learning_rate=1e30", "optimizer.warmup_steps=0", "optimizer.clip_norm=null")
    said = trial.train(f"policy={policy}", *settings, "train.max_skips=5", statuses=(3,))
    says(said, "not finite", "finite")

  return each(diverges, {policy: (policy,) for policy in policies})
