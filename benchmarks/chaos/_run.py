"""A training run that is killed, interrupted and damaged, and whether it ends as its undisturbed twin did."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import jax

from benchmarks.chaos._contents import checkpoints, contents, differences, steps
from mpjax.cli import main

# Forks each process from one that has imported all: a start takes two seconds then, not eight.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__, "mpjax.cli._train_command", "sklearn.datasets"])

TRAIN = ("train.steps=60", "train.log_every=1", "train.eval_every=30", "train.checkpoint_every=10")
TIMEOUT_S = 300
KILLED = 128 + signal.SIGKILL
# JAX's runtime aborts a process whose coordinator is lost.
LOST_ANOTHER = (5, 128 + signal.SIGABRT)
START, STEP, WRITE = "at the start", "in a step", "in a checkpoint write"
# Which signal a process gets and when, and how often of all.
SIGNALS = {
  f"SIGKILL {START}": (signal.SIGKILL, START, 3),
  f"SIGKILL {STEP}": (signal.SIGKILL, STEP, 5),
  f"SIGKILL {WRITE}": (signal.SIGKILL, WRITE, 5),
  "SIGINT": (signal.SIGINT, STEP, 3),
  "SIGTERM": (signal.SIGTERM, STEP, 3),
}
CHECKPOINT, METRICS, SUMMARY = "checkpoint damaged", "metrics.jsonl damaged", "summary.json damaged"
MESH = "mesh changed"


class Example(NamedTuple):
  """What is trained: a config, what makes it small, and by how many processes."""

  config: str
  overrides: tuple[str, ...]
  processes: int = 1

  @property
  def name(self) -> str:
    """What a report calls it."""
    return self.config + (f", {self.processes} processes" if self.processes > 1 else "")

  def meshes(self) -> list[tuple[str, ...]]:
    """Overrides for each mesh; that of one device is for one process."""
    sizes = [(1, 1), (2, 1), (1, 2)][self.processes > 1 :]
    return [(f"mesh.data={data}", f"mesh.fsdp={fsdp}") for data, fsdp in sizes]


class Start:
  """The processes of one start of the command.

  Args:
    example: what is trained.
    mesh: overrides of it.
    folder: the run directory.
    scratch: where compiled programs are kept, and what the processes say.
  """

  def __init__(self, example: Example, mesh: Sequence[str], folder: pathlib.Path, scratch: pathlib.Path):
    self._folder, self._log, self._last = folder, scratch / "log.txt", max(steps(folder))
    self._log.write_text("")
    arguments = ["train", example.config, *TRAIN, *example.overrides, *mesh, f"out={folder}"]
    count = example.processes
    if count > 1:
      arguments += ["--coordinator", f"127.0.0.1:{_free_port()}", "--num-processes", str(count)]
    numbers = [["--process-id", str(i)] if count > 1 else [] for i in range(count)]
    common = (self._log, scratch / "compiled", 2 // count)
    self.processes = [FORKS.Process(target=_train, args=([*arguments, *n], *common)) for n in numbers]
    for process in self.processes:
      process.start()

  def wait(self, moment: str, chance: random.Random) -> None:
    """Waits for a moment of some kind, or for the end of a process."""
    if moment == START:
      self._wait_until(lambda: False, chance.random() * 2.5)
      return
    step = self._last + chance.randrange(1, 30)
    self._wait_until(lambda: max(steps(self._folder)) >= step)
    if moment == WRITE:
      self._wait_until(lambda: any((self._folder / "checkpoints").glob("*.orbax-checkpoint-tmp*")))
    time.sleep(chance.random() * 0.03)

  def _wait_until(self, happens: Callable[[], bool], timeout_s: float = TIMEOUT_S) -> None:
    end = time.monotonic() + timeout_s
    while all(process.is_alive() for process in self.processes) and time.monotonic() < end and not happens():
      time.sleep(0.003)

  def statuses(self) -> list[int | None]:
    """Waits for the ends and returns their statuses, as a shell shows them; `None` for one that hung."""
    end = time.monotonic() + TIMEOUT_S
    for process in self.processes:
      process.join(max(end - time.monotonic(), 0))
    codes = [process.exitcode for process in self.processes]
    for process in self.processes:
      process.kill()
    return [code if code is None or code >= 0 else 128 - code for code in codes]

  def said(self) -> str:
    """What they wrote to standard output and error."""
    return self._log.read_text(errors="replace")


def _train(arguments: list[str], log: pathlib.Path, cache: pathlib.Path, devices: int) -> None:
  """Runs the command in a process of its own."""
  signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
  output = os.open(log, os.O_WRONLY | os.O_APPEND)
  os.dup2(output, 1)
  os.dup2(output, 2)
  jax.config.update("jax_platforms", "cpu")
  jax.config.update("jax_num_cpu_devices", devices)
  jax.config.update("jax_compilation_cache_dir", str(cache))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
  jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
  sys.exit(main(arguments))


def _free_port() -> int:
  with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port: int = free.getsockname()[1]
    return port


class Run:
  """A run directory, what is done to it, and what it has to be in the end.

  Attributes:
    faults: what was done, in order, each as its kind and details.
    problems: how it is not as it has to be; empty for a good one.

  Args:
    example: what is trained.
    folder: the run directory.
    scratch: where logs, copies and compiled programs go.
    twin: contents of the run that is left alone; `None` for that one itself.
    chance: decides everything.
  """

  def __init__(
    self,
    example: Example,
    folder: pathlib.Path,
    scratch: pathlib.Path,
    twin: dict[str, str] | None = None,
    chance: random.Random | None = None,
  ):
    self.faults: list[str] = []
    self.problems: list[str] = []
    self._example, self._folder, self._scratch = example, folder, scratch
    self._expected, self._chance = twin, chance or random.Random(0)
    self._mesh = example.meshes()[0]
    self._since = 0  # the step from which the twin is on this mesh
    self._destroyed: set[int] = set()

  def go(self) -> None:
    """Disturbs the run a few times, lets it end and compares it."""
    chance, summary = self._chance, self._folder / "summary.json"
    weights = [weight for *_, weight in SIGNALS.values()]
    for _ in range(chance.randrange(2, 7)):
      if chance.random() < 0.7:
        kinds = self.damage_checkpoint, self.damage_checkpoint, self.damage_metrics, self.change_mesh
        chance.choice(kinds)()
      self.disturb(*chance.choices(list(SIGNALS), weights))
      if self.problems or summary.exists():
        break
    self.end()
    if chance.random() < 0.3 and not self.problems:
      self._damage(SUMMARY, summary)
      self.end()

  def _damage(self, kind: str, file: pathlib.Path) -> None:
    """Truncates a file, inverts one of its bytes or removes it."""
    content = bytearray(file.read_bytes())
    at, way = (
      self._chance.randrange(max(len(content), 1)),
      self._chance.choice(("cut", "inverted", "removed")),
    )
    if way == "removed":
      file.unlink()
    elif way == "cut":
      os.truncate(file, at)
    elif content:
      content[at] ^= 0xFF
      file.write_bytes(content)
    where = "" if way == "removed" else f" at byte {at} of {len(content)}"
    self.faults.append(f"{kind}: {file.relative_to(self._folder)} {way}{where}")

  def damage_checkpoint(self) -> None:
    """Damages a file of the newest checkpoint, if the twin was on this mesh at the one before."""
    usable = [path for path in checkpoints(self._folder) if int(path.name) >= self._since]
    if len(usable) > 1:
      files = sorted(path for path in usable[-1].rglob("*") if path.is_file())
      self._damage(CHECKPOINT, self._chance.choice(files))

  def damage_metrics(self) -> None:
    """Damages the records, and remembers which are lost."""
    if (file := self._folder / "metrics.jsonl").exists():
      before = steps(self._folder)
      self._damage(METRICS, file)
      self._destroyed |= before - steps(self._folder)

  def change_mesh(self) -> None:
    """Goes to another mesh, and so does a copy that is left alone: it is the twin from now on.

    Numbers are then added in another order: the old twin is near and not the same.
    """
    if saved := checkpoints(self._folder):
      self._since = int(saved[-1].name)
      self._mesh = self._chance.choice([mesh for mesh in self._example.meshes() if mesh != self._mesh])
      self.faults.append(f"{MESH}: {' '.join(self._mesh)}")
      copy = Run(self._example, shutil.copytree(self._folder, self._scratch / "copy"), self._scratch)
      copy._mesh = self._mesh
      self._expected = copy.end()
      self.problems += copy.problems
      shutil.rmtree(copy._folder)

  def disturb(self, name: str) -> None:
    """Starts the command and sends one of `SIGNALS` to one of its processes."""
    signum, moment, _ = SIGNALS[name]
    start = Start(self._example, self._mesh, self._folder, self._scratch)
    start.wait(moment, self._chance)
    victim = self._chance.randrange(len(start.processes))
    pid = start.processes[victim].pid
    if start.processes[victim].is_alive() and pid is not None:
      os.kill(pid, signum)
    lost = LOST_ANOTHER if signum == signal.SIGKILL and len(start.processes) > 1 else ()
    statuses = self._judge(start, {0, 128 + signum, *lost})
    self.faults.append(f"{name}: process {victim}, step {max(steps(self._folder))}, statuses {statuses}")

  def end(self) -> dict[str, str]:
    """Lets the run end, compares it with its twin, and returns its contents."""
    if not self.problems:
      self._judge(Start(self._example, self._mesh, self._folder, self._scratch), {0})
    found = {} if self.problems else contents(self._folder)
    if found and self._expected is not None:
      self.problems += differences(found, self._expected, self._destroyed)
    return found

  def _judge(self, start: Start, allowed: Collection[int]) -> list[int | None]:
    """Returns the statuses of a start, and notes what no fault may bring: another one, a traceback."""
    statuses, said = start.statuses(), start.said()
    if not set(statuses) <= set(allowed):
      self.problems.append(f"ended with {statuses}, expected {sorted(allowed)}; it said:\n{said[-3000:]}")
    elif KILLED not in statuses and "Traceback (most recent call last)" in said:
      self.problems.append(f"a traceback:\n{said[-3000:]}")
    return statuses
