"""Rows of the fault table about runs of two processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.chaos._disturbance import KILLED
from benchmarks.chaos._starts import Team
from benchmarks.chaos._trial import Case, Prepared, Row, Trial, Wrong, each, says

HEARTBEAT_S = 12
PAIR = ("distributed.start_timeout_s=200", f"distributed.heartbeat_timeout_s={HEARTBEAT_S}")


def rows(prepared: Prepared) -> list[Row]:
  """Returns the rows about two processes."""
  same = "the same command ends as an undisturbed run, bit for bit"
  return [
    Row(
      "two processes: killed, paused, stopped", f"5, 134 or the signal's, in bounded time; {same}", _pairs()
    ),
    Row("two processes of other configs, data or code", "2 in all, nothing written", _others()),
    Row(
      "two processes: late, missing, same number, port taken", "0, or 5 or 134 in bounded time", _numbers()
    ),
  ]


def _pair(trial: Trial, *overrides: str, **options: Any) -> Team:
  return trial.start(*PAIR, *overrides, processes=2, **options)


def _pairs() -> dict[str, Case]:
  def happens(trial: Trial, act: Callable[[Team], Sequence[int]]) -> str:
    team = _pair(trial)
    team.wait_until(lambda: team.has_logged(15))
    allowed = act(team)
    began = time.monotonic()
    statuses, said = trial.end(team, allowed)
    took = time.monotonic() - began
    if took > 120:
      raise Wrong(f"took {took:.0f} s to end")
    # What JAX's runtime tells of itself is not our line.
    if 5 in statuses and not re.search(r"^process \d: ", said, re.MULTILINE):
      raise Wrong(f"status 5 without a line: {said[-800:]}")
    if statuses != [0, 0]:
      trial.train(*PAIR, processes=2)
    trial.is_as_its_twin(pair=True)
    return f"statuses {' '.join(map(str, statuses))}"

  def sent(signum: int, number: int, allowed: Sequence[int]) -> Callable[[Team], Sequence[int]]:
    def act(team: Team) -> Sequence[int]:
      team.signal(signum, number)
      return allowed

    return act

  def stopped(number: int, seconds: float, allowed: Sequence[int]) -> Callable[[Team], Sequence[int]]:
    def act(team: Team) -> Sequence[int]:
      team.signal(signal.SIGSTOP, number)
      team.wait_until(lambda: False, seconds)
      team.signal(signal.SIGCONT, number)
      return allowed

    return act

  lost = (5, 134, KILLED)
  acts = {
    **{f"process {i} killed": sent(signal.SIGKILL, i, lost) for i in (0, 1)},
    **{f"Ctrl-C to process {i}": sent(signal.SIGINT, i, (130,)) for i in (0, 1)},
    **{f"SIGTERM to process {i}": sent(signal.SIGTERM, i, (143,)) for i in (0, 1)},
    "SIGHUP to process 1": sent(signal.SIGHUP, 1, (129,)),
    **{f"process {i} paused for 4 s": stopped(i, 4, (0,)) for i in (0, 1)},
    **{
      f"process {i} paused for {3 * HEARTBEAT_S} s": stopped(i, 3 * HEARTBEAT_S, (*lost, 0)) for i in (0, 1)
    },
  }
  return each(happens, {name: (act,) for name, act in acts.items()})


def _others() -> dict[str, Case]:
  def differs(trial: Trial, override: str, before: Callable[[int], object] = lambda _: None) -> None:
    if override == "data.path":
      text = pathlib.Path(shutil.copytree(trial.prepared.finished.parent / "text", trial.folder / "text"))
      (text / "0.txt").write_text("other\n" * 500)
      override = f"data.path={text}"
    team = _pair(trial, own={1: [override]} if override else {}, before=before)
    statuses, said = trial.end(team, (2,))
    if statuses != [2, 2]:
      raise Wrong(f"statuses {statuses}")
    if trial.out.exists():
      raise Wrong("a run directory was made")
    says(said, "differ", "process 1")

  def other_code(number: int) -> None:
    if number == 1:
      import optax

      clip = optax.clip_by_global_norm
      optax.clip_by_global_norm = lambda norm: clip(norm * 2)

  others: tuple[str, ...] = (
    "seed=4",
    "policy=bf16",
    "optimizer.learning_rate=0.5",
    "model.dim=32",
    "train.steps=50",
    "data.path",
  )
  others += ("mesh={data: 1, fsdp: 2}", "train.eval_every=20")
  return each(differs, {other: (other,) for other in others} | {"other code in process 1": ("", other_code)})


def _numbers() -> dict[str, Case]:
  def late(trial: Trial, number: int) -> None:
    trial.end(_pair(trial, before=lambda i: time.sleep(6 * (i == number))), (0,))
    trial.is_as_its_twin(pair=True)

  def ends(trial: Trial, before: Callable[[int], object] = lambda _: None, **options: Any) -> str:
    began = time.monotonic()
    team = _pair(trial, "distributed.start_timeout_s=8", before=before, **options)
    statuses, _ = trial.end(team, (2, 5, 134, KILLED))
    if time.monotonic() - began > 200:
      raise Wrong(f"took {time.monotonic() - began:.0f} s to end")
    if trial.out.exists():
      raise Wrong("a run directory was made")
    return f"statuses {' '.join(map(str, statuses))}"

  def missing(trial: Trial, number: int) -> str:
    return ends(trial, before=lambda i: os.kill(os.getpid(), signal.SIGKILL) if i == number else None)

  def same_number(trial: Trial, number: int) -> str:
    return ends(trial, own={1 - number: ["--process-id", str(number)]})

  def one_expects_three(trial: Trial) -> str:
    """Process 0 says how many there are: the other's number is of no effect, or ends both."""
    team = _pair(trial, "distributed.start_timeout_s=8", own={1: ["--num-processes", "3"]})
    statuses, _ = trial.end(team, (0, 2, 5, 134))
    if statuses == [0, 0]:
      trial.is_as_its_twin(pair=True)
    return f"statuses {' '.join(map(str, statuses))}"

  def port_taken(trial: Trial) -> str:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as server:
      address = f"127.0.0.1:{server.getsockname()[1]}"
      return ends(trial, own={i: ["--coordinator", address] for i in range(2)})

  return {
    **each(late, {f"process {i} comes late": (i,) for i in (0, 1)}),
    **each(missing, {f"process {i} does not come": (i,) for i in (0, 1)}),
    **each(same_number, {f"two of number {i}": (i,) for i in (0, 1)}),
    "the number is too large": lambda trial: ends(trial, own={1: ["--process-id", "7"]}),
    "one expects three": one_expects_three,
    "port taken": port_taken,
  }
