"""Several processes of the gpu suite that compile at once, and then take turns on the one device they share.

Each is started, says what it is about to do, and waits to be told to compile; then to begin, which is when it
takes memory for its state; then for each round. Those that fit the device together live side by side, and
only one of them is at work at any time.
"""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks._worker import Worker

CONTEXT = 1 << 30  # of a process that does nothing yet: CUDA's context and libraries
POLL = 0.05
SPARE = 1.5  # over what a step needs: JAX's allocator takes memory in growing pieces
GRACE = 10  # seconds that a round may take beyond the time for it
OUT_OF_TIME = {"skipped": "no time left of --minutes"}


@dataclasses.dataclass
class Stage:
  """Rows of a report that are measured in the same rounds.

  Attributes:
    start: starts the process of a row.
    check: what is wrong with what a process has said so far, in words; empty if nothing is.
    label: tells its groups from those of other stages.
    compile_until: when those that have not compiled are left out, by `time.monotonic`.
    until: when the last round begins at the latest; it may end a little later.
    rounds: how many.
    compiling: how many processes of JAX compile at once, and try kernels on the device; torch's do not wait.
    started: how many processes live at once before they wait for their turn to compile.
    memory: bytes of the device; `None` if not known, and all live side by side.
    reference: the row that is measured beside all others.
    companion: a process that has said its first word, and is measured in the first rounds too.
  """

  start: Callable[[str], Worker]
  check: Callable[[str, dict[str, Any]], str]
  label: str
  compile_until: float
  until: float
  rounds: int
  compiling: int
  started: int
  memory: int | None
  reference: str
  companion: tuple[str, Worker] | None = None
  rows: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

  def run(self, names: list[str]) -> dict[str, dict[str, Any]]:
    """What was found, by name; `error` or `skipped` where there is nothing."""
    workers = self.compile(names)
    try:
      for i, members in enumerate(self.groups(names, workers)):
        if self.reference in workers and self.reference not in members:  # its memory is needed now
          workers.pop(self.reference).close()
        self.measure(f"{self.label}.{i}", members, workers)
    finally:
      for worker in workers.values():
        worker.close()
    return {name: self.rows[name] for name in dict.fromkeys([*names, *self.rows])}

  def compile(self, names: list[str]) -> dict[str, Worker]:
    """Starts and compiles, in order of importance as far as that goes; those that are ready to begin."""
    alive: dict[str, Worker] = {}
    state: dict[str, str] = {}
    if self.companion:
      name, worker = self.companion
      names = [name, *names]
      alive[name], state[name] = worker, "compiling"
      worker.tell("compile")
      self.rows[name] = {}
    counted = lambda what: sum(state[name] == what and "torch" not in self.rows[name] for name in alive)
    while time.monotonic() < self.compile_until:
      for name in names:
        if name not in state and counted("starting") < self.started:
          alive[name], state[name] = self.start(name), "starting"
          self.rows[name] = {}
        turn = "torch" in self.rows.get(name, {}) or counted("compiling") < self.compiling
        if state.get(name) == "waiting" and turn:
          alive[name].tell("compile")
          state[name] = "compiling"
      for name in list(alive):
        self._listen(name, alive, state)
      if len(state) == len(names) and {*state.values()} <= {"ready", "ended"}:
        break
      time.sleep(POLL)
    for name in names:
      if state.get(name) not in ("ready", "ended"):
        self.rows[name] = self.rows.get(name, {}) | OUT_OF_TIME
        if name in alive:
          alive.pop(name).close()
    return alive

  def _listen(self, name: str, alive: dict[str, Worker], state: dict[str, str]) -> None:
    """Takes the next step with a process that has said something."""
    message = alive[name].poll() if state[name] in ("starting", "compiling") else None
    if message is None:
      return
    self.rows[name] |= message
    wrong = self.check(name, self.rows[name]) if state[name] == "starting" else ""
    if wrong:
      self.rows[name]["error"] = wrong
    if {"error", "skipped"} & {*self.rows[name]}:
      alive.pop(name).close()
      state[name] = "ended"
    else:
      state[name] = "waiting" if state[name] == "starting" else "ready"
    said = self.rows[name].get("error") or self.rows[name].get("skipped")
    if state[name] in ("ready", "ended"):
      print(f"  {name}: {said or 'compiled'}", flush=True)

  def groups(self, names: list[str], workers: dict[str, Worker]) -> list[list[str]]:
    """Rows that fit the device together, each group with the reference if that fits."""
    companion = self.companion[0] if self.companion else ""
    ready = [name for name in (companion, *names) if name in workers and name != self.reference]
    # Those that hold their memory already come first, and give it back after that.
    ready.sort(key=lambda name: name != companion and "torch" not in self.rows[name])
    base = [self.reference] if self.reference in workers else []
    groups, apart, gone = [list(base)], [], set[str]()
    for name in ready:
      if not self._fit([*groups[-1], name], {*workers} - gone) and groups[-1] != base:
        gone |= {*groups[-1]} - {*base}
        groups.append(list(base))
      if self._fit([*groups[-1], name], {*workers} - gone):
        groups[-1].append(name)
      else:
        apart.append([name])
    return [group for group in groups if group and (group != base or len(groups) == 1)] + apart

  def _fit(self, group: list[str], alive: set[str]) -> bool:
    """Whether a group fits the device beside what the others keep while they wait."""
    total = 0.0
    for name in alive:
      row = self.rows[name]
      held = row.get("held_bytes", 0)
      needed = max(row.get("step_bytes", 0), row.get("state_bytes", 0))
      total += CONTEXT + (max(held, SPARE * needed) if name in group else held)
    return self.memory is None or total <= self.memory

  def measure(self, group: str, members: list[str], workers: dict[str, Worker]) -> None:
    """Rounds of the members in shuffled order; ends all but the reference."""
    left = lambda: self.until - time.monotonic()
    begun = []
    members = [name for name in members if name in workers]  # the reference may have ended
    for name in members:
      row = self.rows[name]
      if left() <= 0:
        continue
      if "rounds_s" not in row:  # the reference may have begun
        row |= workers[name].ask(max(left(), 0) + GRACE, "begin")
        wrong = "" if "error" in row else self.check(name, row)
        if wrong:
          row["error"] = wrong
      if "error" not in row:
        row["groups"] = row.get("groups", {}) | {group: len(row.setdefault("rounds_s", []))}
        begun.append(name)
    for i in range(self.rounds):
      if left() <= 0:
        break
      for name in random.Random(i).sample(begun, len(begun)):
        if not self._round(self.rows[name], workers[name].ask(max(left(), 0) + GRACE, "round")):
          begun.remove(name)
    for name in members:
      if name != self.reference or name not in begun:
        workers.pop(name).close()
      if not self.rows[name].get("rounds_s") and "error" not in self.rows[name]:
        self.rows[name] |= OUT_OF_TIME

  def _round(self, row: dict[str, Any], measured: dict[str, Any]) -> bool:
    """Notes what a round has found; whether the process is alive."""
    if "error" in measured:
      row |= {"ended": measured["error"]} if row["rounds_s"] else measured
      return False
    row["rounds_s"].append(measured.pop("seconds") if "seconds" in measured else measured)
    row |= measured if measured is not row["rounds_s"][-1] else {}
    return True


def paired(row: dict[str, Any], other: dict[str, Any]) -> list[float]:
  """A row's seconds over another's, round by round; the ratio of the medians if they never met."""
  for group in {*row["groups"]} & {*other["groups"]}:
    mine, its = (r["rounds_s"][r["groups"][group] :] for r in (row, other))
    if mine and its:
      return [a / b for a, b in zip(mine, its, strict=False)]
  return [statistics.median(row["rounds_s"]) / statistics.median(other["rounds_s"])]
