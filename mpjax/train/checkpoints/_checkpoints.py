"""Checkpoints of a run: asynchronous, atomic (orbax), checked, finite; the last k kept and the best."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from mpjax.step import TrainState
from mpjax.train._errors import CheckpointError
from mpjax.train._files import unused
from mpjax.train.checkpoints import _integrity as reading
from mpjax.train.checkpoints._checksums import NonFiniteLeaves, examine
from mpjax.train.checkpoints._orbax_errors import reason
from mpjax.train.checkpoints._preservation import SKIPS, preservation
from mpjax.train.multiprocess import everyone

# What must be writable before orbax begins: more than all that it writes besides the arrays.
_A_LITTLE = 2**20
# How often several processes look whether a write has failed, in seconds.
_TICK_S = 0.02


class Restored(NamedTuple):
  """The contents of a checkpoint: the state, the data iterator's state, and the loop's own numbers."""

  state: TrainState
  data: Any
  loop: dict[str, Any]


class Resumed(NamedTuple):
  """The newest good checkpoint, and what was wrong with newer ones, a line each."""

  step: int
  restored: Restored
  damaged: list[str]


class Checkpoints:
  """The `checkpoints/` folder of a run directory.

  A checkpoint is written beside its final place and renamed when complete, so a kill at any moment
  leaves the last good one. Each holds checksums of its arrays, taken where they are before anything is
  copied, and of its other parts; `restore` compares them with what it has read. A state that holds NaN or
  infinity is not saved, and one that is there counts as damaged. In a run of several processes each of them
  calls every method, at the same steps.

  Attributes:
    begun_with: what leaves of the run's first state held that is not finite, and may hold for ever.

  Args:
    directory: the folder; made if missing.
    keep: how many of the newest to keep, besides the best, and the newest of a step that was not skipped.
    timeout_s: how long a write, and one process's wait for the others, may take, in seconds.
    read_only: whether to leave the folder as it is: for looking at a run that may be in progress.
    run: what tells this run from others, in plain data; saved with each checkpoint.
    mismatch: of another run's `run` and this one's, how they differ, or `None`; a checkpoint of another run
      counts as damaged.
    write_timeout_s: how long a write may take, in seconds, where that is not `timeout_s`.

  Raises:
    CheckpointError: if the folder cannot be made or read.
  """

  def __init__(
    self,
    directory: pathlib.Path,
    keep: int = 2,
    *,
    timeout_s: int = 600,
    read_only: bool = False,
    run: dict[str, Any] | None = None,
    mismatch: Callable[[dict[str, Any], dict[str, Any]], str | None] = lambda theirs, ours: None,
    write_timeout_s: int | None = None,
  ):
    self._run, self._mismatch = run, mismatch
    self._directory, self._timeout_s, self._read_only = directory.absolute(), timeout_s, read_only
    self.begun_with: NonFiniteLeaves = {}
    self._writing: int | None = None
    self._has_failed = False
    processes = set(range(jax.process_count()))
    # Barriers of named processes go through the coordinator, which has time-outs; others are collectives.
    self._multiprocessing = ocp.options.MultiprocessingOptions(
      primary_host=0, active_processes=processes if len(processes) > 1 else None
    )
    eval_loss = lambda metrics: metrics["eval_loss"]
    options = ocp.CheckpointManagerOptions(
      preservation_policy=preservation(keep, eval_loss),
      best_fn=eval_loss,
      best_mode="min",
      read_only=read_only,
      create=False,
      async_options=ocp.AsyncOptions(timeout_secs=write_timeout_s or timeout_s),
      multiprocessing_options=self._multiprocessing,
    )
    self._prepare()
    try:
      self._manager = _Manager(self._directory, options=options, handler_registry=self._handlers())
    except Exception as error:  # of any kind: orbax says nothing of it
      raise CheckpointError(_not_opened(self._directory, reason(error))) from error

  def begin(self, state: TrainState) -> None:
    """Notes what is not finite in the state that a run begins with."""
    self.begun_with = reading.nonfinite(examine(_to_tree(state)), {})

  def nonfinite(self, state: TrainState) -> NonFiniteLeaves:
    """Returns the leaves of a state that hold NaN or infinity, and did not when the run began."""
    return reading.nonfinite(examine(_to_tree(state)), self.begun_with)

  def save(
    self,
    step: int,
    state: TrainState,
    data: object,
    loop: dict[str, Any],
    eval_loss: float | None,
    skips: int = 0,
  ) -> NonFiniteLeaves:
    """Starts writing a checkpoint of a finite state; the arrays are copied before this returns.

    Args:
      step: the number of the step that gave the state.
      state: to save.
      data: the data iterator's state, a JSON value.
      loop: the loop's own numbers, a JSON value.
      eval_loss: of the state, if it was evaluated.
      skips: how many steps up to this one were skipped in a row.

    Returns:
      The leaves that hold NaN or infinity; nothing is written then.

    Raises:
      CheckpointError: if this one cannot be written, or the one before could not.
    """
    self.wait()
    if step in self.steps():
      return {}
    tree = _to_tree(state)
    examined = examine(tree)
    if held := reading.nonfinite(examined, self.begun_with):
      return held
    # One that was not evaluated, or is not finite, is never the best.
    ranked = float(eval_loss) if eval_loss is not None and math.isfinite(eval_loss) else math.inf
    metrics: dict[str, Any] = {"eval_loss": ranked, SKIPS: skips}
    origin = {"step": step} | ({} if self._run is None else {"run": self._run})
    parts = reading.sealed(tree, data, loop, metrics, origin, examined, self.begun_with)
    with self._explained(step):
      _write_a_little(self._directory)
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(parts.state),
          data=ocp.args.JsonSave(parts.data),
          loop=ocp.args.JsonSave(parts.loop),
          integrity=ocp.args.JsonSave(parts.integrity),
        ),
        metrics=metrics,
        force=True,
      )
    self._writing = step
    return {}

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, in order."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """Returns the step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def best(self) -> int | None:
    """Returns the step of the checkpoint with the lowest eval loss, or of the newest where none has one."""
    best = self._manager.best_step()
    return self.latest() if best is None else best

  def restore(self, step: int, like: TrainState) -> Restored:
    """Returns the checkpoint of a step, with the structure, dtypes and shardings of `like` (abstract arrays).

    The shardings, the mesh and the number of processes need not be those of the run that saved it.

    Raises:
      CheckpointError: if it is damaged, not finite, or of another state than `like`.
    """
    self.wait()
    try:
      return self._read(step, like)
    except reading.Damaged as damage:
      raise CheckpointError(
        f"the checkpoint of step {step} in {self._directory} {damage.what}: {damage}; nothing was changed"
      ) from None

  def restore_latest(self, like: TrainState) -> Resumed | None:
    """Returns the newest good checkpoint, as `restore` gives it; `None` where there are none at all.

    Damaged ones that are newer, and those that are not finite, are moved to `damaged/` beside the folder,
    unless it is only read.

    Raises:
      CheckpointError: if every checkpoint is so, or the newest is of another state than `like`.
        Nothing was changed then.
    """
    self.wait()
    damaged: dict[int, str] = {}
    for step in reversed(self._told_by_first(self.steps())):
      try:
        restored = self._read(step, like)
      except reading.Damaged as damage:
        damaged[step] = f"the checkpoint of step {step} {damage.what}: {damage}"
        continue
      moved = self._move_aside([] if self._read_only else list(damaged))
      lines = [f"{damage}; moved to {to}" for damage, to in zip(damaged.values(), moved, strict=False)]
      return Resumed(step, restored, lines or list(damaged.values()))
    if not damaged:
      return None
    raise CheckpointError(
      f"no checkpoint in {self._directory} can be used ({'; '.join(damaged.values())}); nothing was changed: "
      "bring one back from a copy, or choose another out= to start over"
    )

  def wait(self) -> None:
    """Blocks until what was saved is on disk.

    Raises:
      CheckpointError: if it could not be written; raised once.
    """
    step, self._writing = self._writing, None
    if step is not None:
      with self._explained(step):
        if jax.process_count() > 1:
          self._manager.wait_unless_failed()
        self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then releases the threads.

    Raises:
      CheckpointError: as `wait` does.
    """
    try:
      self.wait()
    finally:
      with contextlib.suppress(Exception):  # of any kind: what is left to raise has been told
        self._manager.close()
      # Others of several processes may still be writing; a later start makes room then.
      if self._has_failed and jax.process_count() == 1:
        self._remove_unfinished(ignore_errors=True)

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns what orbax raises while a step is written into a `CheckpointError`."""
    try:
      yield
    except Exception as error:  # of any kind: the file system's, tensorstore's, orbax's
      self._has_failed = True
      whole = [int(path.name) for path in self._directory.glob("*") if path.name.isdecimal()]
      left = f"that of step {max(whole)} is whole" if whole else "there is no earlier one"
      then = f"resumes from step {max(whole)}" if whole else "starts over"
      raise CheckpointError(
        f"the checkpoint of step {step} cannot be written in {self._directory}: {reason(error)}; {left}, "
        f"and once there is room and permission to write, the same command {then}"
      ) from error

  def _read(self, step: int, like: TrainState) -> Restored:
    """Returns the checkpoint of a step, in every process or in none; raises `Damaged` if it is damaged."""
    metrics = self._manager.metrics(step)
    try:
      foreign = functools.partial(self._foreign, step)
      parts = reading.read(self._path(step), _to_tree(like), metrics, self._timeout_s, foreign)
    except reading.OtherState as error:
      raise CheckpointError(
        f"the checkpoint of step {step} in {self._directory} is of another state: {error}; nothing was "
        "changed: restore it with the model, policy and optimizer that it was saved with"
      ) from None
    except TimeoutError as error:
      raise CheckpointError(f"{self._path(step)} cannot be read: {error}") from error
    self.begun_with = parts.begun_with
    return Restored(like.replace(**parts.state), parts.data, parts.loop)

  def _foreign(self, step: int, origin: dict[str, Any]) -> str | None:
    """Returns why a checkpoint is not this run's of `step`."""
    if origin["step"] != step:
      return f"it is of step {origin['step']}"
    theirs = origin.get("run")
    differ = None if theirs is None or self._run is None else self._mismatch(theirs, self._run)
    return None if differ is None else f"it is of another run ({differ}), for which there is train.init_from"

  def _handlers(self) -> ocp.handlers.CheckpointHandlerRegistry:
    """Returns how arrays are written: in one transaction, so that a full disk meets one write, not many."""
    state = ocp.StandardCheckpointHandler(
      save_concurrent_gb=None, multiprocessing_options=self._multiprocessing
    )
    handlers = ocp.handlers.DefaultCheckpointHandlerRegistry()
    handlers.add("state", ocp.args.StandardSave, state)
    handlers.add("state", ocp.args.StandardRestore, state)
    return handlers

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _prepare(self) -> None:
    """Makes the folder, and removes what writes that did not complete have left in it."""
    problem = ""
    if jax.process_index() == 0 and not self._read_only:
      try:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_unfinished()
      except OSError as error:
        problem = reason(error)
    problem = self._told_by_first(problem)
    if problem:
      raise CheckpointError(_not_opened(self._directory, problem))

  def _remove_unfinished(self, ignore_errors: bool = False) -> None:
    for path in self._directory.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path, ignore_errors)

  def _move_aside(self, steps: list[int]) -> list[str]:
    """Moves checkpoints to `damaged/`, since their steps are saved again, and returns where they are."""
    if not steps:
      return []
    folder, targets, problem = self._directory.parent / "damaged", [], ""
    if jax.process_index() == 0:
      try:
        folder.mkdir(exist_ok=True)
        for step in steps:
          targets.append(str(unused(folder / str(step))))
          os.rename(self._path(step), targets[-1])
      except OSError as error:
        problem = reason(error)
    targets, problem = self._told_by_first((targets, problem))
    if problem:
      raise CheckpointError(
        f"the damaged checkpoint of step {steps[0]} in {self._directory} cannot be moved to {folder}: "
        f"{problem}; move it away, and the same command resumes from an earlier one"
      )
    self._manager.reload()
    return targets

  def _told_by_first(self, value: object) -> Any:
    """Returns a JSON value as the first process has it."""
    try:
      return json.loads(everyone(json.dumps(value), self._timeout_s)[0])
    except TimeoutError as error:
      raise CheckpointError(f"{self._directory} cannot be read: {error}") from error


class _Manager(ocp.CheckpointManager):
  """Opens a folder whose metrics are damaged, too, and tells of a failed write before the others have met."""

  _failure: Exception | None = None

  def wait_unless_failed(self) -> None:
    """Blocks until what was saved is on disk; raises as soon as this process could not write its part.

    orbax's own wait would go on: its thread waits for the others to finish, and they for that part.
    """
    while self.is_saving_in_progress():
      if self._failure is not None:
        raise self._failure
      time.sleep(_TICK_S)

  def _wait_for_checkpointers(self) -> None:  # of orbax; without it, the run's own time-out ends the wait
    try:
      super()._wait_for_checkpointers()
    except Exception as error:
      self._failure = error
      raise

  def metrics(self, step: int) -> dict[str, float] | None:
    """Returns the metrics of a step; `None` where there are none that can be ranked."""
    try:
      metrics = super().metrics(step)
      return metrics if isinstance(metrics["eval_loss"], float) else None
    except (OSError, ValueError, LookupError, TypeError):  # not there, no JSON, or other keys and values
      return None


def _not_opened(directory: pathlib.Path, problem: str) -> str:
  return f"{directory} cannot be opened for checkpoints: {problem}; no checkpoint was changed"


def _write_a_little(directory: pathlib.Path) -> None:
  """Raises the `OSError` of a directory that cannot be written: orbax would drop writes that it has begun."""
  with tempfile.TemporaryFile(dir=directory) as file:
    file.write(bytes(_A_LITTLE))
    file.flush()
    os.fsync(file.fileno())


def _to_tree(state: TrainState) -> dict[str, Any]:
  """Returns the arrays of a state by field; without a state of FP8 scaling where there is none."""
  fields = ("step", "params", "model_state", "opt_state", "rng", "fp8_state")
  tree = {name: getattr(state, name) for name in fields} | {"params": state.arrays}
  return tree if tree["fp8_state"] else {name: tree[name] for name in fields[:-1]}
