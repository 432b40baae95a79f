"""The folder of a run's checkpoints: asynchronous, atomic, checked, finite; the newest and the best are kept.

An `AsyncCheckpointer` of orbax writes each; which ones to keep is decided here. orbax's `CheckpointManager`
does not open a folder in which the metrics of one checkpoint are damaged. If a process cannot write, it waits
there for the others, which wait for it. `experimental.v1.training.Checkpointer` has that manager inside.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from mpjax.sharding._checksums import NonFiniteLeaves, examine
from mpjax.step import TrainState
from mpjax.train._errors import CheckpointError
from mpjax.train._files import set_aside
from mpjax.train.checkpoints import _integrity
from mpjax.train.checkpoints._integrity import Damaged, reason
from mpjax.train.processes import everyone


class Restored(NamedTuple):
  """A checkpoint: its step, the training state, the data iterator's state and the loop's numbers.

  `damaged` has a line about each newer checkpoint that is damaged.
  """

  step: int
  state: TrainState
  data: Any
  loop: dict[str, Any]
  damaged: Sequence[str] = ()


class Checkpoints:
  """The `checkpoints/` folder of a run directory.

  A checkpoint is written under a temporary name and renamed when complete, so a kill at any moment leaves
  the last good one. It has two parts: `state`, the arrays, and `record`, everything else, with checksums of
  the arrays, computed on the devices before any copy, and its own. What is read is compared with them. A
  state with NaN or infinity is not saved; a saved one counts as damaged. In a run of several processes, each
  process calls every method, at the same steps.

  Attributes:
    begun_with: the NaN and infinity of the run's first state, which later states may hold, too.

  Args:
    directory: the folder; made if missing.
    keep: how many of the newest checkpoints to keep, in addition to the best one and the newest whose step
      was not skipped. The next save, `wait` or `close` deletes the others.
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
    self._directory, self._keep, self._timeout_s = directory.absolute(), keep, timeout_s
    self._read_only, self._run, self._mismatch = read_only, run, mismatch
    self.begun_with: NonFiniteLeaves = {}
    self._writing: int | None = None
    self._held: int | None = None
    self._target = self._directory
    failed = f"{self._directory} cannot be opened for checkpoints"
    found = self._by_first(self._open, failed, "no checkpoint was changed")
    # The evaluation loss of each, infinity for none, and how many steps in a row were skipped.
    self._ranks: dict[int, tuple[float, int]] = {step: (loss, skips) for step, loss, skips in found}
    if not read_only:
      self._hold()
    self._writer = _integrity.writer(write_timeout_s or timeout_s)

  def nonfinite(self, state: TrainState) -> NonFiniteLeaves:
    """Returns the leaves of a state that hold NaN or infinity and did not when the run began."""
    return _integrity.nonfinite(examine(_to_tree(state)), self.begun_with)

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
      step: the step that made the state.
      state: the state.
      data: the data iterator's state, a JSON value.
      loop: the loop's own numbers, JSON values.
      eval_loss: the state's evaluation loss, if it was evaluated.
      skips: how many steps in a row, up to this one, were skipped.

    Returns:
      The leaves that hold NaN or infinity. If there are any, nothing is written.

    Raises:
      CheckpointError: if this checkpoint, or the one before, cannot be written.
    """
    self.wait()
    if step in self._ranks:
      return {}
    tree = _to_tree(state)
    examined = examine(tree)
    if held := _integrity.nonfinite(examined, self.begun_with):
      return held
    # Without a finite evaluation loss, a checkpoint is never the best.
    rank = float(eval_loss) if eval_loss is not None and math.isfinite(eval_loss) else math.inf, skips
    record = {"step": step, "run": self._run, "data": data, "loop": loop, "rank": rank}
    record |= {"leaves": examined.leaves, "begun_with": self.begun_with}
    with self._explained(step):
      _integrity.write(self._writer, self._target / str(step), tree, record)
    self._ranks[step], self._writing = rank, step
    return {}

  def steps(self) -> list[int]:
    """Returns the steps of the checkpoints, in order."""
    return sorted(self._ranks)

  def latest(self) -> int | None:
    """Returns the step of the newest checkpoint."""
    return max(self._ranks, default=None)

  def best(self) -> int | None:
    """Returns the step with the lowest evaluation loss, or the newest step if none was evaluated."""
    return min(self._ranks, key=lambda step: (self._ranks[step][0], -step), default=None)

  def restore(self, step: int, like: TrainState) -> Restored:
    """Returns the checkpoint of a step, with the structure, dtypes and shardings of `like` (abstract arrays).

    The shardings, the mesh and the number of processes may differ from those of the run that saved it.

    Raises:
      CheckpointError: in every process, if it is damaged or not finite, or its state does not match `like`.
    """
    self.wait()
    record: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    fault = None
    try:
      record = _integrity.read_record(self._path(step))
      self._require_own(step, record)
      tree = _integrity.read_state(self._path(step), _to_tree(like), record)
    except CheckpointError as error:
      fault = isinstance(error, Damaged), str(error)
    for is_damaged, text in filter(None, everyone(fault, self._timeout_s)):
      raise (Damaged if is_damaged else CheckpointError)(f"the checkpoint of step {step} {text}")
    if problem := _integrity.difference(record, examine(tree)):
      raise Damaged(f"the checkpoint of step {step} {problem}")
    self.begun_with = record["begun_with"]
    return Restored(step, like.replace(**tree), record["data"], record["loop"])

  def restore_latest(self, like: TrainState) -> Restored | None:
    """Returns the newest good checkpoint, as `restore` does; `None` if there are no checkpoints.

    Newer checkpoints that are damaged or not finite are moved to `damaged/` next to the folder, unless
    `read_only` is set.

    Raises:
      CheckpointError: if every checkpoint is damaged or not finite, or the newest does not match `like`.
        Nothing was changed.
    """
    self.wait()
    damaged: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        restored = self.restore(step, like)
      except Damaged as damage:
        damaged[step] = str(damage)
        continue
      if damaged and not self._read_only:
        damaged = self._moved_aside(damaged)
      return restored._replace(damaged=list(damaged.values()))
    if not damaged:
      return None
    raise CheckpointError(
      f"no checkpoint in {self._directory} can be used ({'; '.join(damaged.values())}); nothing was changed: "
      "bring one back from a copy, or choose another out= to start over"
    )

  def wait(self) -> None:
    """Blocks until the saved checkpoint is on disk; then deletes those that are not to be kept.

    Raises:
      CheckpointError: if it could not be written; raised once.
    """
    step, self._writing = self._writing, None
    if step is not None:
      with self._explained(step):
        self._writer.wait_until_finished()
      self._delete_old()

  def close(self) -> None:
    """Waits, then releases the threads.

    Raises:
      CheckpointError: as `wait` does.
    """
    try:
      self.wait()
    finally:
      with contextlib.suppress(Exception):  # every error was reported already
        self._writer.close()
    # After an error it stays open: threads of tensorstore may still write where its number leads.
    if self._held is not None:
      os.close(self._held)
      self._held = None

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns what orbax raises while it writes a step into a `CheckpointError`."""
    try:
      yield
    except Exception as error:  # from the file system, tensorstore or orbax
      self._ranks.pop(step, None)
      # Other processes may still be writing; a later start makes room.
      if jax.process_count() == 1:
        self._delete_unfinished(ignore_errors=True)
      whole = [step for step in self.steps() if (self._path(step) / "record").exists()]
      problem = reason(error).replace(str(self._target), str(self._directory))
      left = f"that of step {whole[-1]} is whole" if whole else "there is no earlier one"
      then = f"resumes from step {whole[-1]}" if whole else "starts over"
      raise CheckpointError(
        f"the checkpoint of step {step} cannot be written in {self._directory}: {problem}; {left}, "
        f"and once there is room and permission to write, the same command {then}"
      ) from error

  def _require_own(self, step: int, record: dict[str, Any]) -> None:
    """Raises `Damaged` if a record is not the one of `step` of this run."""
    if record["step"] != step:
      raise Damaged(f"is damaged: it is of step {record['step']}")
    if self._run and record["run"] and (differ := self._mismatch(record["run"], self._run)):
      raise Damaged(f"is damaged: it is of another run ({differ}), for which there is train.init_from")

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _open(self) -> list[tuple[int, float, int]]:
    """Makes the folder, deletes what incomplete writes have left, and returns steps with their ranks."""
    if not self._read_only:
      self._directory.mkdir(parents=True, exist_ok=True)
      self._delete_unfinished()
    names = os.listdir(self._directory) if self._directory.exists() else []
    return [(int(name), *self._rank(name)) for name in names if name.isdecimal() and str(int(name)) == name]

  def _hold(self) -> None:
    """Opens the folder, to write in it and in no other that takes its name: orbax makes what is missing."""
    with contextlib.suppress(OSError):
      if os.path.isdir("/proc/self/fd"):  # only Linux has paths of what is open
        self._held = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        self._target = pathlib.Path(f"/proc/self/fd/{self._held}")

  def _rank(self, name: str) -> tuple[float, int]:
    try:
      loss, skips = _integrity.read_record(self._directory / name)["rank"]
    except Damaged:  # said if it is to be restored
      return math.inf, 0
    return loss, skips

  def _delete_old(self) -> None:
    """Deletes all but the newest `keep`, the best, and the newest whose step was not skipped."""
    steps = self.steps()
    # Otherwise a run that is stuck would delete its last good state.
    taken = [step for step in steps if self._ranks[step][1] == 0]
    for step in {*steps} - {*steps[-self._keep :], *taken[-1:], self.best()}:
      del self._ranks[step]
      if jax.process_index() == 0:
        try:
          shutil.rmtree(self._target / str(step))
        except OSError as error:
          what = f"the old checkpoint of step {step} in {self._directory}"
          raise CheckpointError(f"{what} cannot be deleted: {reason(error)}") from error

  def _delete_unfinished(self, ignore_errors: bool = False) -> None:
    for path in self._target.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path, ignore_errors)

  def _moved_aside(self, damaged: dict[int, str]) -> dict[int, str]:
    """Moves checkpoints to `damaged/`, because their steps will be saved again; adds where to their lines."""
    run = self._directory.parent
    move = lambda: [str(set_aside(self._path(step), run)) for step in damaged]
    one = f"the damaged checkpoint of step {max(damaged)} in {self._directory}"
    failed = f"{one} cannot be moved to {run / 'damaged'}"
    then = "move it away, and the same command resumes from an earlier one"
    for step, target in zip(damaged, self._by_first(move, failed, then), strict=True):
      del self._ranks[step]
      damaged[step] += f"; moved to {target}"
    return damaged

  def _by_first(self, work: Callable[[], object], failed: str, then: str) -> Any:
    """Does work on files in the first process; returns its JSON value, or raises, in every process."""
    value, problem = None, ""
    if jax.process_index() == 0:
      try:
        value = work()
      except OSError as error:
        problem = reason(error)
    value, problem = everyone((value, problem), self._timeout_s)[0]
    if problem:
      raise CheckpointError(f"{failed}: {problem}; {then}")
    return value


def _to_tree(state: TrainState) -> dict[str, Any]:
  """Returns the arrays of a state by field, without `fp8_state` if it is empty."""
  fields = ("step", "params", "model_state", "opt_state", "rng", "fp8_state")
  tree = {name: getattr(state, name) for name in fields} | {"params": state.arrays}
  return tree if tree["fp8_state"] else {name: tree[name] for name in fields[:-1]}
