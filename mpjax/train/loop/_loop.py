"""The training loop: trains a config's model, through crashes, interruptions and restarts."""

from __future__ import annotations

import collections
import contextlib
import functools
import math
import pathlib
import signal
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
import yaml
from grain import DatasetIterator

from mpjax._average import Average
from mpjax._types import PyTree
from mpjax.step import TrainState
from mpjax.train._errors import CheckpointError, ConfigError, DataError, Interrupted, Stuck
from mpjax.train._export import WIDE, export_text, save_safetensors
from mpjax.train._files import GONE
from mpjax.train.checkpoints import STORAGE_ERRORS, Checkpoints, NonFiniteLeaves, nonfinite_text
from mpjax.train.config._config import Config, OptimizerConfig
from mpjax.train.config._differences import run_mismatch
from mpjax.train.data import Batch, describe
from mpjax.train.loop._diagnose import first_nonfinite, nonfinite_report, state_report
from mpjax.train.loop._events import Events
from mpjax.train.loop._histograms import Watcher
from mpjax.train.loop._metrics_file import MetricsFile, plain
from mpjax.train.loop._output import LOGGER
from mpjax.train.loop._peak_memory import peak_memory
from mpjax.train.loop._progress import Progress, fp8_row, show_header, show_summary
from mpjax.train.loop._run_directory import RunDirectory
from mpjax.train.loop._step_records import Records
from mpjax.train.processes import Interrupt, Poll, Processes
from mpjax.train.setup._evaluation import mean_of_batches, weights_of
from mpjax.train.setup._init_from import start_from
from mpjax.train.setup._optimizers import describe_end, describe_growth
from mpjax.train.setup._setup import Setup

# Number of newest steps whose metrics the host does not wait for.
_LAG = 2
# Thirty days in seconds.
_FOR_EVER = 30 * 24 * 3600


class _Pending(NamedTuple):
  step: int
  metrics: dict[str, jax.Array]
  batch: PyTree


def _is_update_bad(metrics: Mapping[str, Any]) -> bool:
  """Returns whether a step with finite gradients was skipped because its update is not finite."""
  return bool(metrics.get("grads_finite", False)) and not bool(metrics.get("updates_finite", True))


class TrainingRun:
  """One training run: what its config builds, and the loop."""

  def __init__(
    self,
    config: Config,
    setup: Setup,
    directory: RunDirectory,
    processes: Processes,
    console: rich.console.Console,
  ):
    self.config, self.setup, self.directory, self.processes = config, setup, directory, processes
    self.console = console
    self.policy, self.task, self.data = setup.policy, setup.task, setup.data
    self.checkpoints, _ = processes.agree(lambda: self._open_checkpoints(directory.path / "checkpoints"))
    self._watcher = Watcher(self.setup.step, config.numerics.every)
    self._pending: collections.deque[_Pending] = collections.deque()
    self._records = Records(setup)
    self._source = ""
    self._logged: int | None = None
    self._stuck: _Pending | None = None
    self._has_told_events = False

  def _open_checkpoints(self, folder: pathlib.Path) -> Checkpoints:
    settings = self.config.distributed
    return Checkpoints(
      folder,
      self.config.train.keep_checkpoints,
      timeout_s=round(settings.hang_timeout_s) or 1,
      # orbax counts time in which the process is stopped; the watchdog does not, so it sets the limit.
      write_timeout_s=_FOR_EVER if self.processes.are_watched else None,
      run=yaml.safe_load(self.config.to_yaml()),
      mismatch=run_mismatch,
    )

  def train(self) -> dict[str, Any]:
    """Trains from the last checkpoint to the end and returns the summary."""
    iterator = self.data.train(self.setup.rows)
    (state, start), _ = self.processes.agree(lambda: self._resume(iterator))
    self._records.begin(state, start)
    self._grow(self._records.next_update)
    run = f"resumed after step {start}" if start else self._source
    show_header(self.setup, state, self.directory.path, run, self.processes.count)
    first = self.processes.first
    metrics = self.directory.path / "metrics.jsonl"
    self._metrics_file = MetricsFile(metrics, start, self._logged, owner=first)
    for line in (*self.directory.said, *self._metrics_file.said):
      LOGGER.info(line)
    self._events = Events(self.directory.path / "tensorboard", start, owner=first)
    self._poll = Poll(self.processes.count > 1)
    has_scale = self.policy.loss_scaling is not None
    self._progress = Progress(self.console, self.config.train.steps, start, self.task.units[0], has_scale)
    try:
      with self._progress, Interrupt() as interrupt:
        for step in range(start + 1, self.config.train.steps + 1):
          self._poll.ask(interrupt.signum)
          batch = self._next_batch(step, state, iterator, start)
          state = self._one_step(step, state, batch)
          self._at_boundary(step, state, iterator, self._poll.answer(interrupt.signum))
    except BaseException:
      for file in (self._events, self._metrics_file):
        with contextlib.suppress(OSError):  # a full disk was reported already
          file.close()
      raise
    self._events.close()
    self._metrics_file.close()
    return self._finish(state)

  def _grow(self, update: int) -> None:
    """Continues a run whose number of steps has grown, and says what happens to its schedule.

    Also says so for an optimiser that comes from another run.
    """
    before = self.directory.before
    ended = describe_end(self.config.optimizer, self.config.train.steps, update) if self._source else None
    if ended is not None:
      LOGGER.info(ended)
    if before is None:
      return
    old = OptimizerConfig.model_validate(before["optimizer"])
    steps = self.config.train.steps, before["train"]["steps"]
    LOGGER.info(describe_growth(self.config.optimizer, steps[0], old, steps[1], update))
    self.directory.grow(self.config)

  @contextlib.contextmanager
  def storage_errors(self) -> Iterator[None]:
    """Turns an operating system's error about the run's own files into a `CheckpointError`."""
    try:
      yield
    except OSError as error:
      lost = error.errno in GONE and not self.directory.is_there
      if not (lost or error.errno in STORAGE_ERRORS):
        raise
      kept = self._resumes(self.checkpoints.latest())
      raise CheckpointError(
        f"{self.directory.path} cannot be written: {error.strerror}; {kept} once there is room "
        "and permission to write"
      ) from error

  def _next_batch(self, step: int, state: TrainState, iterator: DatasetIterator, start: int) -> Batch:
    """Returns this process's rows of the next batch; if they cannot be read, saves a checkpoint."""
    self.processes.doing(f"the data of step {step}")
    try:
      return next(iterator)
    except Exception as error:  # a user's data source can raise anything
      message = f"the data of step {step} cannot be read: {describe(error)}"
      if self.processes.count == 1 and step - 1 > start:  # others would wait for this process's rows
        for record in self._fetch_pending():
          self._write(record, {})
        self._save(step - 1, state, iterator, eval_loss=None)
        self.checkpoints.wait()
      kept = self.checkpoints.latest()
      raise DataError(f"{message}; {self._resumes(kept)} once the data is back") from error

  def _resumes(self, step: int | None) -> str:
    if step is None:
      return "no checkpoint was saved yet: the same command starts over"
    return f"the checkpoint of step {step} is in {self.directory.path}, and the same command resumes from it"

  def _one_step(self, step: int, state: TrainState, rows: Batch) -> TrainState:
    self.processes.doing(f"step {step}")
    batch = self.setup.place(rows)
    looked = self._watcher.look(state, batch) if self._watcher.due(step) else None
    state, metrics = self.setup.step(state, batch)
    self._records.wait_for_compilation(step, metrics)
    if looked is not None:
      self._watcher.write(self._events, step, self.processes.fetch(looked))
    for value in metrics.values():
      value.copy_to_host_async()
    self._pending.append(_Pending(step, metrics, batch))
    while len(self._pending) > _LAG:
      self._write(self._fetch(self._pending.popleft()), {})
    return state

  def _at_boundary(self, step: int, state: TrainState, iterator: DatasetIterator, signum: int | None) -> None:
    """Evaluates, saves or stops where that is due; all of these wait for every step so far.

    Depends only on the step, the metrics and `signum`, which are the same in every process.
    """
    if self._stuck is not None:
      self._stop(self._stuck, step, state, iterator)
    settings = self.config.train
    last = step == settings.steps
    evaluate = last or step % settings.eval_every == 0
    save = last or step % settings.checkpoint_every == 0 or signum is not None
    if not (evaluate or save):
      if step % settings.log_every == 0:
        self._require_directory(step, state, iterator)
      return
    records = self._fetch_pending()
    eval_loss, extra = None, {}
    if evaluate:
      self.processes.doing(f"the evaluation after step {step}")
      extra = self.evaluate(state)
      eval_loss = extra["eval_loss"]
      self._progress.evaluation(step, extra)
    for record in records:
      self._write(record, extra if record["step"] == step else {})
    if eval_loss is not None:
      best = self._records.last.get("best_eval_loss")
      if np.isfinite(eval_loss) and (best is None or eval_loss < best):
        self._records.last["best_eval_loss"] = eval_loss
        save = True
    if save and (nonfinite := self._save(step, state, iterator, eval_loss)):
      # NaN spreads and does not go away: further steps would be useless.
      raise Stuck(f"stopped at step {step}: {state_report(nonfinite)}\n{self._way_on()}")
    self._records.restart_clock()
    if signum is not None and not last:
      self.checkpoints.wait()
      name = "Ctrl-C" if signum == signal.SIGINT else signal.Signals(signum).name
      message = (
        f"{name}: checkpoint of step {step} saved in {self.directory.path}; the same command resumes from it"
      )
      raise Interrupted(signum, message)

  def _fetch_pending(self) -> list[dict[str, Any]]:
    """Returns the records of all pending steps; waits for the last one."""
    records = [self._fetch(pending) for pending in self._pending]
    self._pending.clear()
    return records

  def _fetch(self, pending: _Pending) -> dict[str, Any]:
    """Returns the record of a step; waits for it."""
    self.processes.doing(f"step {pending.step}")
    record = self._records.of(pending.step, pending.metrics)
    if self._cannot_recover(record):
      self._stuck = self._stuck or pending
    return record

  def _write(self, record: dict[str, Any], extra: dict[str, float]) -> None:
    """Shows a record, and logs it if logging is due or it has an evaluation."""
    record |= {name: plain(value) for name, value in extra.items()}
    self._records.last |= record
    logged = bool(extra) or record["step"] % self.config.train.log_every == 0
    if logged:
      self._metrics_file.write(record)
      for name, value in self._records.scalars(record).items():
        self._events.add_scalar(name, value, record["step"])
      if self._events.problem is not None and not self._has_told_events:
        self._has_told_events = True
        LOGGER.info(f"the run goes on without TensorBoard's file: {self._events.problem}")
    self._progress.step(record["step"], record, logged)

  def _cannot_recover(self, record: dict[str, Any]) -> bool:
    """Returns whether the last `max_skips` steps were skipped at the lowest loss scale."""
    if record.get("consecutive_skips", 0) < self.config.train.max_skips:
      return False
    scaling = self.policy.loss_scaling
    if scaling is None or scaling.kind == "static" or _is_update_bad(record):  # no scale fixes an update
      return True
    return record["loss_scale"] * scaling.backoff_factor < scaling.min_scale

  def _stop(self, pending: _Pending, step: int, state: TrainState, iterator: DatasetIterator) -> None:
    """Saves the state and the failing batch, and raises `Stuck` with the diagnosis."""
    for record in self._fetch_pending():
      self._write(record, {})
    nonfinite = self._save(step, state, iterator, eval_loss=None)
    file = self.directory.path / f"nonfinite_batch_{pending.step}.npz"
    arrays: dict[str, Any] = self.processes.fetch(pending.batch)
    if self.processes.first:
      np.savez(file, **arrays)
    report = state_report(nonfinite) if nonfinite else self._report(state, pending)
    self.checkpoints.wait()
    saved = "" if nonfinite else f"a checkpoint of step {step}, up to which steps were under way, and "
    raise Stuck(
      f"stopped at step {pending.step}: the last {self.config.train.max_skips} steps "
      f"{self._why_skipped(pending)}\n{report}\n"
      f"saved: {saved}the batch of step {pending.step}, in {file}; mpjax numerics "
      f"{self.directory.path} --hunt searches again, also with another policy\n{self._way_on()}"
    )

  def _why_skipped(self, pending: _Pending) -> str:
    if _is_update_bad(pending.metrics):
      return "had finite gradients, and an update, model state or parameters that are not finite"
    if self.policy.loss_scaling is None:
      return "had non-finite gradients"
    return (
      f"had non-finite gradients, and the loss scale of {self._records.last['loss_scale']:g} cannot fall "
      "further"
    )

  def _way_on(self) -> str:
    """Says which checkpoint is the last, and how to start from it. Every checkpoint is finite."""
    step, path, train = self.checkpoints.latest(), self.directory.path, self.config.train
    change = "a lower optimizer.learning_rate" if train.skip_nonfinite else "train.skip_nonfinite=true"
    if step is None:
      return f"no finite checkpoint was saved: start over with another out= and, for example, {change}"
    return (
      f"the last finite checkpoint is of step {step}: train.init_from={path} with another out= starts from "
      f"it, for example with {change}; the same command resumes there and takes the same steps again"
    )

  def _report(self, state: TrainState, pending: _Pending) -> str:
    """Says what is not finite in a step, and which operation made it so."""
    if self.processes.count > 1:  # the search runs operations on this process's devices only
      return "the run was one of several processes: the command below says which operation began it"
    bad_update = _is_update_bad(pending.metrics)
    report = nonfinite_report(
      self.setup.step, state, pending.batch, self.checkpoints.begun_with, bad_update=bad_update
    )
    return f"{report}\n{first_nonfinite(self.setup.step, state, pending.batch)}"

  def evaluate(self, state: TrainState) -> dict[str, float]:
    """Returns the means over the evaluation batches, by `mean_of_batches`.

    Raises:
      DataError: if they cannot be read. Saves nothing: a run resumed from here would skip the evaluation.
    """
    totals: dict[str, list[jax.Array | Average]] = collections.defaultdict(list)
    model = self.setup.for_evaluation(state)
    for number, batch in enumerate(self._eval_batches(), 1):
      for name, value in self.setup.evaluate(model, self.setup.place(batch)).items():
        totals[name].append(value)
        jax.block_until_ready(totals[name][-_LAG:][0])
      self.processes.doing(f"batch {number} of the evaluation")
    return {name: mean_of_batches(values) for name, values in totals.items()}

  def _eval_batches(self) -> Iterator[Batch]:
    try:
      yield from self.data.eval(self.setup.rows)
    except Exception as error:  # anything, as in `_next_batch`
      message = f"the evaluation data cannot be read: {describe(error)}"
      kept = self._resumes(self.checkpoints.latest())
      raise DataError(f"{message}; {kept} once the data is back") from error

  def _resume(self, iterator: DatasetIterator) -> tuple[TrainState, int]:
    self.processes.doing("the checkpoint to resume from")
    resumed = self.checkpoints.restore_latest(self.setup.abstract_state())
    if resumed is None:
      state = self.setup.first_state()
      self.checkpoints.begun_with = self.checkpoints.nonfinite(state)
      if (source := self.config.train.init_from) is not None:
        state, self._source = start_from(self.setup, state)
        if nonfinite := self.checkpoints.nonfinite(state):
          raise ConfigError(
            f"train.init_from={source}: {nonfinite_text(nonfinite)}: expected a finite run or export"
          )
      return state, 0
    for damage in resumed.damaged:
      LOGGER.info(damage)
    if resumed.loop["fingerprint"] != self.data.info.fingerprint:
      raise ConfigError(
        f"out={self.directory.path}: the data is not what this run began with "
        f"({self.data.info.description}): nothing was changed; bring the data back, or choose another out="
      )
    iterator.set_state(resumed.data)
    self._records.last = resumed.loop["last"]
    self._logged = resumed.loop.get("records")
    return resumed.state, resumed.step

  def _save(
    self, step: int, state: TrainState, iterator: DatasetIterator, eval_loss: float | None
  ) -> NonFiniteLeaves:
    """Saves a checkpoint, or returns the leaves of the state that are not finite."""
    self.processes.doing(f"the checkpoint of step {step}")
    self._require_directory(step, state, iterator, eval_loss)
    self._events.flush()
    self._metrics_file.sync()
    loop = self._loop_state()
    try:
      nonfinite = self.checkpoints.save(step, state, iterator.get_state(), loop, eval_loss, self._skips)
      if self.config.train.checkpoint_wait:
        self.checkpoints.wait()
    except CheckpointError:
      self._require_directory(step, state, iterator, eval_loss)
      raise
    return nonfinite

  @property
  def _skips(self) -> int:
    """Returns how many steps in a row, up to the last one, were skipped."""
    return int(self._records.last.get("consecutive_skips", 0))

  def _loop_state(self) -> dict[str, Any]:
    """Returns the loop's part of a checkpoint."""
    records = {"records": self._metrics_file.count} if self.processes.first else {}
    return {"fingerprint": self.data.info.fingerprint, "last": self._records.last, **records}

  def _require_directory(
    self, step: int, state: TrainState, iterator: DatasetIterator, eval_loss: float | None = None
  ) -> None:
    """Ends the run if its directory was moved, deleted or replaced; saves a checkpoint elsewhere if possible.

    Raises:
      CheckpointError: if the directory is no longer there.
    """
    path = self.directory.path
    if not self.processes.first or self.directory.is_there:
      return
    gone = f"{path} was moved, deleted or replaced while the run went on, and nothing more is written there"
    if self.processes.count > 1:  # the others would have to take part in a checkpoint elsewhere
      raise CheckpointError(f"{gone}; its checkpoints are where it is now")
    for record in self._fetch_pending():
      self._write(record, {})
    self._metrics_file.sync()
    with contextlib.suppress(CheckpointError):  # for a checkpoint that was being written
      self.checkpoints.wait()
    refuge = self.directory.refuge()
    checkpoints = self._open_checkpoints(refuge / "checkpoints")
    checkpoints.begun_with = self.checkpoints.begun_with
    try:
      loop = self._loop_state()
      nonfinite = checkpoints.save(step, state, iterator.get_state(), loop, eval_loss, self._skips)
    finally:
      checkpoints.close()
    if nonfinite:
      raise CheckpointError(f"{gone}; {state_report(nonfinite)}")
    raise CheckpointError(
      f"{gone}; a checkpoint of step {step} is in {refuge}, and the same command with out={refuge} resumes "
      "from it"
    )

  def _finish(self, state: TrainState) -> dict[str, Any]:
    self.processes.doing(f"the checkpoint of step {self.config.train.steps} to be written")
    self.checkpoints.wait()
    loss = self._records.last["loss"]
    if not math.isfinite(float(loss)):
      raise Stuck(
        f"stopped at step {self.config.train.steps}, the last: its loss is {loss}, so the run does not count "
        f"as finished\n{self._way_on()}"
      )
    summary = {
      "policy": self.config.policy if isinstance(self.config.policy, str) else str(self.policy),
      **fp8_row(self.policy),
      "backend": jax.default_backend(),
      "steps": self.config.train.steps,
      **self._records.summary(),
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.arrays)),
      "peak_memory_bytes": peak_memory(),
      "resolved_policy": self.policy.to_dict(),
    }
    export = self.config.train.export
    if export is not None:  # gathered by all, written by one
      dtype = self.config.train.export_dtype
      weights = jax.jit(functools.partial(weights_of, self.policy, masters=dtype in WIDE))
      params, model_state = self.processes.fetch((weights(state), state.model_state))
    if self.processes.first:
      self.processes.doing("what the run leaves to be written")
      if export is not None:
        file = self.directory.path / "model.safetensors"
        save_safetensors(file, self.config, self.data.info, params, model_state, dtype)
        LOGGER.info(export_text(file))
      self.directory.write_summary(summary)
      show_summary(summary, self.directory.path)
    return summary
