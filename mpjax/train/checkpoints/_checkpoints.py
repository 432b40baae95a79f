"""Checkpoints of a run: asynchronous, atomic (orbax), checked, finite; the newest k and the best are kept."""

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
from mpjax.train.processes import everyone

# Bytes written as a test before orbax begins: more than it writes in addition to the arrays.
_A_LITTLE = 2**20
# How often a process of several checks whether a write has failed, in seconds.
_TICK_S = 0.02


class Restored(NamedTuple):
  """The contents of a checkpoint: the training state, the data iterator's state and the loop's numbers."""

  state: TrainState
  data: Any
  loop: dict[str, Any]


class Resumed(NamedTuple):
  """The newest good checkpoint, and a line about each damaged checkpoint after it."""

  step: int
  restored: Restored
  damaged: list[str]


class Checkpoints:
  """The `checkpoints/` folder of a run directory.

  A checkpoint is written under a temporary name and renamed when complete, so a kill at any moment leaves
  the last good one. Each holds checksums of its arrays, computed on the devices before any copy, and of its
  other parts; `restore` compares them with what it reads. A state with NaN or infinity is not saved; a saved
  one counts as damaged. In a run of several processes, each process calls every method, at the same steps.

  Attributes:
    begun_with: the NaN and infinity of the run's first state, which later states may hold, too.

  Args:
    directory: the folder; made if missing.
    keep: how many of the newest checkpoints to keep, in addition to the best one and the newest whose step
      was not skipped.
    timeout_s: limit for a write, and for one process's wait for the others, in seconds.
    read_only: change nothing in the folder: for a run that may be in progress.
    run: what identifies this run, in plain data; saved with each checkpoint.
    mismatch: takes `run` of another run and of this one; says how they differ, or returns `None`. A
      checkpoint of another run counts as damaged.
    write_timeout_s: limit for a write, in seconds, if it differs from `timeout_s`.

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
    # Barriers of named processes go through the coordinator and have time-outs; others are collectives.
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
    except Exception as error:  # orbax documents no errors
      raise CheckpointError(_not_opened(self._directory, reason(error))) from error

  def begin(self, state: TrainState) -> None:
    """Records what is not finite in the first state of a run."""
    self.begun_with = reading.nonfinite(examine(_to_tree(state)), {})

  def nonfinite(self, state: TrainState) -> NonFiniteLeaves:
    """Returns the leaves of a state that hold NaN or infinity and did not when the run began."""
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
      step: the number of the step that made the state.
      state: the state to save.
      data: the data iterator's state, a JSON value.
      loop: the loop's own numbers, a JSON value.
      eval_loss: the state's evaluation loss, if it was evaluated.
      skips: how many steps in a row, up to this one, were skipped.

    Returns:
      The leaves that hold NaN or infinity. If there are any, nothing is written.

    Raises:
      CheckpointError: if this checkpoint, or the one before, cannot be written.
    """
    self.wait()
    if step in self.steps():
      return {}
    tree = _to_tree(state)
    examined = examine(tree)
    if held := reading.nonfinite(examined, self.begun_with):
      return held
    # Without a finite evaluation loss, a checkpoint is never the best.
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
    """Returns the step with the lowest evaluation loss, or the newest step if none was evaluated."""
    best = self._manager.best_step()
    return self.latest() if best is None else best

  def restore(self, step: int, like: TrainState) -> Restored:
    """Returns the checkpoint of a step, with the structure, dtypes and shardings of `like` (abstract arrays).

    The shardings, the mesh and the number of processes may differ from those of the run that saved it.

    Raises:
      CheckpointError: if it is damaged or not finite, or its state does not match `like`.
    """
    self.wait()
    try:
      return self._read(step, like)
    except reading.Damaged as damage:
      raise CheckpointError(
        f"the checkpoint of step {step} in {self._directory} {damage.what}: {damage}; nothing was changed"
      ) from None

  def restore_latest(self, like: TrainState) -> Resumed | None:
    """Returns the newest good checkpoint, as `restore` does; `None` if there are no checkpoints.

    Newer checkpoints that are damaged or not finite are moved to `damaged/` next to the folder, unless
    `read_only` is set.

    Raises:
      CheckpointError: if every checkpoint is damaged or not finite, or the newest does not match `like`.
        Nothing was changed.
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
    """Blocks until the saved checkpoint is on disk.

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
      with contextlib.suppress(Exception):  # every error was reported already
        self._manager.close()
      # Other processes may still be writing; a later start makes room.
      if self._has_failed and jax.process_count() == 1:
        self._remove_unfinished(ignore_errors=True)

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns what orbax raises while it writes a step into a `CheckpointError`."""
    try:
      yield
    except Exception as error:  # from the file system, tensorstore or orbax
      self._has_failed = True
      whole = [int(path.name) for path in self._directory.glob("*") if path.name.isdecimal()]
      left = f"that of step {max(whole)} is whole" if whole else "there is no earlier one"
      then = f"resumes from step {max(whole)}" if whole else "starts over"
      raise CheckpointError(
        f"the checkpoint of step {step} cannot be written in {self._directory}: {reason(error)}; {left}, "
        f"and once there is room and permission to write, the same command {then}"
      ) from error

  def _read(self, step: int, like: TrainState) -> Restored:
    """Returns the checkpoint of a step in every process, or raises in every process (`Damaged`)."""
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
    """Returns why a checkpoint is not the one of `step` of this run, or `None` if it is."""
    if origin["step"] != step:
      return f"it is of step {origin['step']}"
    theirs = origin.get("run")
    differ = None if theirs is None or self._run is None else self._mismatch(theirs, self._run)
    return None if differ is None else f"it is of another run ({differ}), for which there is train.init_from"

  def _handlers(self) -> ocp.handlers.CheckpointHandlerRegistry:
    """Returns handlers that write arrays in one transaction, so that a full disk fails only one write."""
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
    """Makes the folder, and removes what incomplete writes have left in it."""
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
    """Moves checkpoints to `damaged/`, because their steps will be saved again; returns their new paths."""
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
    """Returns the first process's JSON value."""
    try:
      return json.loads(everyone(json.dumps(value), self._timeout_s)[0])
    except TimeoutError as error:
      raise CheckpointError(f"{self._directory} cannot be read: {error}") from error


class _Manager(ocp.CheckpointManager):
  """Opens folders with damaged metrics, too; reports a failed write without waiting for other processes."""

  _failure: Exception | None = None

  def wait_unless_failed(self) -> None:
    """Blocks until the checkpoint is on disk; raises as soon as this process cannot write its part.

    orbax's own wait would not end: its thread waits for the other processes, and they wait for this part.
    """
    while self.is_saving_in_progress():
      if self._failure is not None:
        raise self._failure
      time.sleep(_TICK_S)

  def _wait_for_checkpointers(self) -> None:  # orbax's; without it, the run's own time-out ends the wait
    try:
      super()._wait_for_checkpointers()
    except Exception as error:
      self._failure = error
      raise

  def metrics(self, step: int) -> dict[str, float] | None:
    """Returns the metrics of a step; `None` if they cannot be ranked."""
    try:
      metrics = super().metrics(step)
      return metrics if isinstance(metrics["eval_loss"], float) else None
    except (OSError, ValueError, LookupError, TypeError):  # missing, not JSON, or other keys and values
      return None


def _not_opened(directory: pathlib.Path, problem: str) -> str:
  return f"{directory} cannot be opened for checkpoints: {problem}; no checkpoint was changed"


def _write_a_little(directory: pathlib.Path) -> None:
  """Raises `OSError` if a directory cannot be written; orbax would drop a write that it has begun."""
  with tempfile.TemporaryFile(dir=directory) as file:
    file.write(bytes(_A_LITTLE))
    file.flush()
    os.fsync(file.fileno())


def _to_tree(state: TrainState) -> dict[str, Any]:
  """Returns the arrays of a state by field, without `fp8_state` if it is empty."""
  fields = ("step", "params", "model_state", "opt_state", "rng", "fp8_state")
  tree = {name: getattr(state, name) for name in fields} | {"params": state.arrays}
  return tree if tree["fp8_state"] else {name: tree[name] for name in fields[:-1]}
