"""Checkpoints with checksums: asynchronous, atomic and without NaN; the newest and the best are kept.

An `AsyncCheckpointer` of orbax writes each. Which ones to keep is decided here, because orbax's
`CheckpointManager` opens no folder with a damaged checkpoint, and waits for a process that cannot write.

orbax 0.12.8 reads arrays with a flipped bit and JSON of other contents. So a checkpoint has checksums of all
that is in it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import pathlib
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from mpjax.step import TrainState
from mpjax.train._checksums import Examined, examine, kinds
from mpjax.train._errors import CheckpointError, one_line
from mpjax.train._files import how_to_go_on
from mpjax.train.config._config_file import run_mismatch
from mpjax.train.processes import everyone

# The operating system's errors for files that cannot be written or read.
STORAGE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO)

# Fields that must hold no NaN. Counters and keys are integers, and FP8 histories forget NaN.
_FIELDS_WITHOUT_NAN = ("params", "model_state", "opt_state")
# Seconds. orbax counts time in which the process is stopped, which the watchdog of a run does not.
_FOR_EVER = 200 * 365 * 24 * 3600


class Restored(NamedTuple):
  """A checkpoint: its step, the training state, the data iterator's state and the loop's numbers.

  `unfit` has a line about each newer checkpoint that cannot be used.
  """

  step: int
  state: TrainState
  data: Any
  loop: dict[str, Any]
  unfit: Sequence[str] = ()


class Checkpoints:
  """The `checkpoints/` folder of a run directory; nothing in it changes before the first save.

  A checkpoint is written under a temporary name and renamed when complete, so a kill at any moment leaves
  the last good one. It has two parts: `state`, the arrays, and `record`, everything else, with checksums of
  the arrays, computed on the devices before any copy, and its own. What is read is compared with them. A
  state with NaN is not saved; a saved one counts as damaged, as does one of another run than the config
  `run`. In a run of several processes, each process calls every method, at the same steps.

  The newest `keep` stay, the best one, and the newest whose step was not skipped. The next save, `wait` or
  `close` deletes the others.

  Raises:
    CheckpointError: if the folder cannot be read.
  """

  def __init__(self, directory: pathlib.Path, keep: int = 2, run: dict[str, Any] | None = None):
    self._directory, self._keep, self._run = directory.absolute(), keep, run
    self._writing: int | None = None
    found, problem = [], ""
    try:
      found = self._found() if jax.process_index() == 0 else []
    except OSError as error:
      problem = f"{directory} cannot be read: {_reason(error)}"
    found, problem = everyone((found, problem))[0]
    if problem:
      raise CheckpointError(problem)
    # The evaluation loss of each, infinity for none, and how many steps in a row were skipped.
    self._ranks: dict[int, tuple[float, int]] = {step: (loss, skips) for step, loss, skips in found}
    self._writer = _writer()

  def save(
    self,
    step: int,
    state: TrainState,
    data: object,
    loop: dict[str, Any],
    eval_loss: float | None,
    skips: int = 0,
  ) -> str:
    """Starts writing a checkpoint of a state without NaN; the arrays are copied before this returns.

    `data` is the data iterator's state, `loop` the loop's own numbers: JSON values. `eval_loss` is the
    state's, if it was evaluated; `skips` says how many steps in a row, up to this one, were skipped.

    Returns which leaves hold NaN. If there are any, nothing is written.

    Raises:
      CheckpointError: if this checkpoint, or the one before, cannot be written.
    """
    self.wait()
    if step in self._ranks:
      return ""
    tree = _to_tree(state)
    examined = examine(tree)
    if nan := _nan(examined):
      return nan
    # Without a finite evaluation loss, a checkpoint is never the best.
    rank = float(eval_loss) if eval_loss is not None and math.isfinite(eval_loss) else math.inf, skips
    record = {"step": step, "run": self._run, "data": data, "loop": loop, "rank": rank}
    record["leaves"] = examined.leaves
    copy = json.loads(json.dumps(record | {"checksum": _digest(record)}))  # it is written later
    parts = ocp.args.Composite(state=ocp.args.StandardSave(tree), record=ocp.args.JsonSave(copy))
    with self._explained(step):
      if jax.process_index() == 0:
        self._directory.mkdir(exist_ok=True)  # in a run directory, which is gone if somebody moved it
        self._delete_unfinished()  # what a kill has left
      self._writer.save(self._path(step), args=parts, force=True)
    self._ranks[step], self._writing = rank, step
    return ""

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
      CheckpointError: in every process, if it is damaged or holds NaN, or its state does not match `like`.
    """
    self.wait()
    record: dict[str, Any] = {}
    tree: dict[str, Any] = {}
    fault = ""
    try:
      record = _read_record(self._path(step))
      if record["step"] != step:
        raise CheckpointError(f"is damaged: it is of step {record['step']}")
      if self._run and record.get("run") and (differ := run_mismatch(record["run"], self._run)):
        other = f"it is of another run ({differ}), for which there is train.init_from"
        raise CheckpointError(f"is damaged: {other}")
      tree = _read_state(self._path(step), _to_tree(like), record)
    except CheckpointError as error:
      fault = str(error)
    # All processes have to read it before any of them goes on.
    if problem := next(filter(None, everyone(fault)), "") or _difference(record, examine(tree)):
      raise CheckpointError(f"the checkpoint of step {step} {problem}")
    return Restored(step, like.replace(**tree), record["data"], record["loop"])

  def restore_latest(self, like: TrainState) -> Restored | None:
    """Returns the newest good checkpoint, as `restore` does; `None` if there are no checkpoints.

    Newer checkpoints, which are damaged or of another state, are no longer counted: their steps are saved
    again.

    Raises:
      CheckpointError: if there are checkpoints, and none can be used. Nothing was changed.
    """
    self.wait()
    unfit: dict[int, str] = {}
    for step in reversed(self.steps()):
      try:
        restored = self.restore(step, like)
      except CheckpointError as error:
        unfit[step] = str(error)
        continue
      for later in unfit:
        del self._ranks[later]
      return restored._replace(unfit=list(unfit.values()))
    if not unfit:
      return None
    none = f"no checkpoint in {self._directory} can be used ({'; '.join(unfit.values())})"
    over = "bring one back from a copy, or choose another out= to start over"
    raise CheckpointError(f"{none}; nothing was changed: {over}")

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

  @contextlib.contextmanager
  def _explained(self, step: int) -> Iterator[None]:
    """Turns what orbax raises while it writes a step into a `CheckpointError`."""
    try:
      yield
    except Exception as error:  # from the file system, tensorstore or orbax
      self._ranks.pop(step, None)
      # Other processes may still be writing; a later start makes room.
      if jax.process_count() == 1:
        self._delete_unfinished()
      then = f"{how_to_go_on(self._directory.parent)} once there is room and permission to write"
      failed = f"the checkpoint of step {step} cannot be written in {self._directory}"
      raise CheckpointError(f"{failed}: {_reason(error)}; {then}") from error

  def _path(self, step: int) -> pathlib.Path:
    return self._directory / str(step)

  def _found(self) -> list[tuple[int, float, int]]:
    """Returns the steps of the checkpoints that are there, each with its rank."""
    names = os.listdir(self._directory) if self._directory.exists() else []
    return [(int(name), *self._rank(name)) for name in names if name.isdecimal() and str(int(name)) == name]

  def _rank(self, name: str) -> tuple[float, int]:
    try:
      loss, skips = _read_record(self._directory / name)["rank"]
    except CheckpointError:  # said if it is to be restored
      return math.inf, 0
    return loss, skips

  def _delete_old(self) -> None:
    """Deletes all but the newest `keep`, the best, and the newest whose step was not skipped."""
    steps = self.steps()
    # Otherwise a run that is stuck would delete its last good state.
    taken = [step for step in steps if self._ranks[step][1] == 0]
    for step in {*steps} - {*steps[-self._keep :], *taken[-1:], self.best()}:
      del self._ranks[step]
      if jax.process_index() == 0 and self._path(step).exists():
        shutil.rmtree(self._path(step))

  def _delete_unfinished(self) -> None:
    for path in self._directory.glob("*.orbax-checkpoint-tmp*"):
      shutil.rmtree(path, ignore_errors=True)


def _to_tree(state: TrainState) -> dict[str, Any]:
  """Returns the arrays of a state by field, without `fp8_state` if it is empty."""
  fields = ("step", "params", "model_state", "opt_state", "rng", "fp8_state")
  tree = {name: getattr(state, name) for name in fields} | {"params": state.arrays}
  return tree if tree["fp8_state"] else {name: tree[name] for name in fields[:-1]}


def _writer() -> ocp.AsyncCheckpointer:
  """Returns what writes checkpoints of two parts: `state`, arrays, and `record`, a JSON object."""
  named = set(range(jax.process_count())) if jax.process_count() > 1 else None
  processes = ocp.options.MultiprocessingOptions(primary_host=0, active_processes=named)
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
    state=ocp.StandardCheckpointHandler(save_concurrent_gb=None, multiprocessing_options=processes),
    record=ocp.JsonCheckpointHandler(multiprocessing_options=processes),
  )
  options = ocp.AsyncOptions(timeout_secs=_FOR_EVER)
  return ocp.AsyncCheckpointer(handler, async_options=options, multiprocessing_options=processes)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
  """Hides what Python says of reads and writes that orbax gave up when another failed: a traceback for each.

  Waits for an orbax that waits for all that it began. Nothing that a user's code raises is hidden.
  """
  report = sys.unraisablehook

  def hook(dropped: sys.UnraisableHookArgs) -> None:
    # A call by tensorstore, after asyncio's loop is closed, has no Python object.
    code = getattr(dropped.object, "cr_code", None)
    is_last_call = dropped.object is None and str(dropped.exc_value) == "Event loop is closed"
    if not is_last_call and (code is None or os.path.join("orbax", "checkpoint", "") not in code.co_filename):
      report(dropped)

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = report


def _read_record(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the record of a checkpoint, without its checksum.

  Raises:
    CheckpointError: if it is missing or not what was saved.
  """
  try:
    record: dict[str, Any] = ocp.JsonCheckpointHandler().restore(folder / "record")
    is_whole = record.pop("checksum") == _digest(record)
  except Exception as error:  # from files or contents of any kind
    raise CheckpointError(f"is damaged: record: {_reason(error)}") from error
  if not is_whole:
    raise CheckpointError("is damaged: record: not what was saved")
  return record


def _read_state(folder: pathlib.Path, like: dict[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
  """Returns the state of a checkpoint, like abstract arrays. `_difference` has to follow, in all processes.

  Raises:
    CheckpointError: if it cannot be read, or has other leaves, dtypes or shapes.
  """
  there, here = {path: text.split()[0] for path, text in record["leaves"].items()}, kinds(like)
  if differ := sorted(path for path in there.keys() | here.keys() if there.get(path) != here.get(path)):
    saved, now = (found.get(differ[0], "not there") for found in (there, here))
    other = f"is of another state: {differ[0]} is {saved} in the checkpoint and {now} in this run"
    with_its_own = "restore it with the model, policy and optimizer that it was saved with"
    raise CheckpointError(f"{other}: {with_its_own}")
  try:
    # A checkpointer's barriers would wait for a process that found damage and left.
    return ocp.StandardCheckpointHandler().restore(folder / "state", args=ocp.args.StandardRestore(like))
  except Exception as error:  # every layer that reads may fail on damage
    raise CheckpointError(f"is damaged: state: {_reason(error)}") from error


def _difference(record: Mapping[str, Any], found: Examined) -> str:
  """Returns how a state that was read is not the one of its record, or holds NaN; empty if neither."""
  # A PRNG key whose description is lost comes back as numbers with the same bits.
  if differ := [path for path, leaf in record["leaves"].items() if found.leaves.get(path) != leaf]:
    more = f" and {len(differ) - 1} more" if len(differ) > 1 else ""
    return f"is damaged: state/{differ[0]}{more}: not what was saved"
  nan = _nan(found)
  return f"is not finite: {nan}" if nan else ""


def nan_in(state: TrainState) -> str:
  """Names the leaves of a state that hold NaN; empty for none."""
  return _nan(examine(_to_tree(state)))


def _nan(examined: Examined) -> str:
  """Names the first three leaves that hold NaN and says how many more do; empty for none."""
  paths = [path for path in examined.nan if path.split("/")[0] in _FIELDS_WITHOUT_NAN]
  more = f", and {len(paths) - 3} more" if len(paths) > 3 else ""
  return ", ".join(f"{path} holds NaN" for path in paths[:3]) + more


def _reason(error: BaseException) -> str:
  """Returns one line on what went wrong: the operating system's words if it caused the error."""
  told = "".join(traceback.format_exception(error))  # with its causes
  if known := [text for text in map(os.strerror, STORAGE_ERRORS) if text in told]:
    return known[0]
  return one_line(f"{type(error).__name__}: {str(error).partition(' [tensorstore_spec')[0]}")


def _digest(record: Mapping[str, Any]) -> str:
  return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
