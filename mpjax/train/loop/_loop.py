"""The training loop: trains a config's model, through crashes, interruptions and restarts."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import rich.console
import yaml
from grain import DatasetIterator

from mpjax._types import PyTree
from mpjax.numerics._watcher import Watcher
from mpjax.step import TrainState
from mpjax.train._errors import CheckpointError, ConfigError, DataError, Interrupted, Stuck
from mpjax.train._export import WIDE, export_text, save_safetensors
from mpjax.train._interrupt import signal_name
from mpjax.train.checkpoints import Checkpoints, NonFiniteLeaves, nonfinite_text
from mpjax.train.config._differences import run_mismatch
from mpjax.train.data import Batch, describe
from mpjax.train.loop._diagnose import cannot_recover, state_report, step_report, way_on, why_skipped
from mpjax.train.loop._metrics_file import MetricsFile, plain
from mpjax.train.loop._output import LOGGER
from mpjax.train.loop._progress import Progress, show_header, show_summary
from mpjax.train.loop._run_directory import RunDirectory
from mpjax.train.loop._step_records import LAG, Profile, Records
from mpjax.train.loop._trackers import Tracker, Trackers
from mpjax.train.processes import Processes, SignalOfAny
from mpjax.train.setup._evaluation import mean_of_batches, weights_of
from mpjax.train.setup._init_from import start_from
from mpjax.train.setup._optimizers import describe_schedule
from mpjax.train.setup._setup import Setup

# Two centuries, in seconds; in nanoseconds an int64.
_FOR_EVER = 200 * 365 * 24 * 3600


class _Pending(NamedTuple):
  step: int
  metrics: dict[str, jax.Array]
  batch: PyTree


class TrainingRun:
  """One training run: what its config builds, and the loop.

  Attributes:
    checkpoints: the checkpoints of the run.
    step: the number of the last step that was taken; 0 before the first one.
    state: the state after that step.
    iterator: the iterator over this process's rows of each batch, after that step's.
  """

  state: TrainState
  iterator: DatasetIterator

  def __init__(
    self,
    setup: Setup,
    directory: RunDirectory,
    processes: Processes,
    console: rich.console.Console,
    trackers: Sequence[Tracker],
    began: float,
  ):
    self.setup, self.directory, self.processes = setup, directory, processes
    self.console, self._own_trackers = console, trackers
    self.config, self.policy, self.data = setup.config, setup.policy, setup.data
    self.checkpoints, self._are_tracked = processes.agree(
      lambda: self._open_checkpoints(directory.path / "checkpoints"),
      lambda _: bool(trackers or setup.config.train.trackers),
    )
    self.step = 0
    self._watcher = Watcher(setup.step)
    self._looked: dict[int, Any] = {}  # what the watcher saw of pending steps
    self._pending: collections.deque[_Pending] = collections.deque()
    self._records = Records(setup, began)
    self._source = ""
    self._logged: int | None = None
    self._stuck: tuple[_Pending, dict[str, Any]] | None = None
    self._opened = contextlib.ExitStack()

  def _open_checkpoints(self, folder: pathlib.Path) -> Checkpoints:
    settings = self.config.distributed
    return Checkpoints(
      folder,
      self.config.train.keep_checkpoints,
      timeout_s=round(settings.hang_timeout_s) or 1,
      # orbax counts time in which the process is stopped, and moves of the clock; the watchdog does not.
      write_timeout_s=_FOR_EVER if self.processes.are_watched else None,
      run=yaml.safe_load(self.config.to_yaml()),
      mismatch=run_mismatch,
    )

  def train(self) -> dict[str, Any]:
    """Trains from the last checkpoint to the end and returns the summary."""
    try:
      self._begin()
      signals = SignalOfAny(self.processes.interrupt, self.processes.count > 1)
      with self._progress:
        for step in range(self.step + 1, self.config.train.steps + 1):
          signals.ask()
          self._profile.before(step)
          with jax.profiler.StepTraceAnnotation("train", step_num=step):
            self._take(step)
          self._profile.after(step, self.state)
          self._at_boundary(signals.answer())
      self._profile.stop(self.step)
      summary = self._finish()
    except BaseException:
      with contextlib.suppress(OSError):  # a full disk was reported already
        self._opened.close()
      raise
    self._opened.close()
    return summary

  def _begin(self) -> None:
    """Makes the first state or reads the last checkpoint, and opens what the run writes to."""
    self.iterator = self.data.train(self.setup.rows)
    self.processes.agree(self._resume)
    start, settings, first = self.step, self.config.train, self.processes.first
    self._records.begin(self.state, start)
    self._say_growth(self._records.next_update)
    self.directory.begin()
    run = f"resumed after step {start}" if start else self._source
    path, count = self.directory.path, self.processes.count
    show_header(self.setup, self.state, path, run, count)
    self._metrics_file = MetricsFile(path / "metrics.jsonl", start, self._logged, owner=first)
    self._opened.callback(self._metrics_file.close)
    self._doing("start", "the trackers")
    self._trackers = Trackers(self.config, path, start, self._own_trackers, owner=first)
    self._opened.callback(lambda: self._trackers.close(None))
    traces = path / "profile" / (f"process_{self.processes.process}" if count > 1 else "")
    self._profile = Profile(settings.profile_steps, start, traces)
    self._opened.callback(lambda: self._profile.stop(self.step, keep=self.directory.is_there))
    has_scale = self.policy.loss_scaling is not None
    self._progress = Progress(self.console, settings.steps, start, self.setup.task.units[0], has_scale)

  def _doing(self, part: str, what: str) -> None:
    """Tells the watchdog what the run does now, and the records to which part of its time that belongs."""
    self.processes.doing(what)
    self._records.enter(part)

  def _say_growth(self, update: int) -> None:
    """Says that the number of steps has grown, and where an older optimiser's schedule stands."""
    steps, before = self.config.train.steps, self.directory.steps_before
    if before is not None or (self._source and update):
      grows = "" if before is None else f"train.steps grows from {before} to {steps}: "
      LOGGER.info(grows + describe_schedule(self.config.optimizer, steps, update))

  def _take(self, step: int) -> None:
    """Takes a step, and writes the record of an earlier one."""
    self._doing("data", f"the data of step {step}")
    # The other processes would wait for the rows.
    may_save = self.processes.count == 1 and not self._records.is_first(step)
    rows = self._next_rows(self.iterator, f"the data of step {step}", save=may_save)
    self._doing("compile" if self._records.is_first(step) else "step", f"step {step}")
    batch = self.setup.place(rows)
    if (every := self.config.numerics.every) and step % every == 0 and self._are_tracked:
      self._looked[step] = self._watcher.look(self.state, batch)
    self.state, metrics = self.setup.step(self.state, batch)
    self.step = step
    self._records.wait_for_compilation(step, metrics)
    for value in metrics.values():
      value.copy_to_host_async()
    self._pending.append(_Pending(step, metrics, batch))
    while len(self._pending) > LAG:
      self._write(self._fetch(self._pending.popleft()), {})

  def _next_rows(self, batches: Iterator[Batch], what: str, *, save: bool = False) -> Batch:
    """Returns this process's rows of the next batch, none at the end; may save a checkpoint if it fails."""
    try:
      return next(batches, {})
    except Exception as error:  # a user's data source can raise anything
      if save:
        self._write_pending()
        self._save()
        self.checkpoints.wait()
      message = f"{what} cannot be read: {describe(error)}; {self.resumes()} once the data is back"
      raise DataError(message) from error

  def resumes(self) -> str:
    """Returns what the same command does, as a part of a sentence: start over, or resume from a step."""
    if (step := self.checkpoints.latest()) is None:
      return "no checkpoint was saved yet: the same command starts over"
    return f"the checkpoint of step {step} is in {self.directory.path}, and the same command resumes from it"

  def _at_boundary(self, signum: int | None) -> None:
    """Evaluates, saves or stops where that is due; all of these wait for every step so far.

    Depends only on the step, the metrics and `signum`, which are the same in every process.
    """
    if self._stuck is not None:
      self._stop(*self._stuck)
    settings, step = self.config.train, self.step
    last = step == settings.steps
    evaluate = last or step % settings.eval_every == 0
    save = last or step % settings.checkpoint_every == 0 or signum is not None
    if not (evaluate or save):
      return
    records = self._fetch_pending()
    eval_loss, extra = None, {}
    if evaluate:
      extra = self._evaluate()
      eval_loss = extra["eval_loss"]
      self._progress.evaluation(step, extra)
    for record in records:
      self._write(record, extra if record["step"] == step else {})
    save |= eval_loss is not None and self._records.is_best(eval_loss)
    if save and (nonfinite := self._save(eval_loss)):
      # NaN spreads and does not go away: further steps would be useless.
      raise Stuck(f"stopped at step {step}: {state_report(nonfinite)}\n{self._way_on()}")
    self._records.restart_clock()
    if signum is not None and not last:
      self.checkpoints.wait()
      saved = f"{signal_name(signum)}: checkpoint of step {step} saved in {self.directory.path}"
      raise Interrupted(signum, f"{saved}; the same command resumes from it")

  def _fetch_pending(self) -> list[dict[str, Any]]:
    """Returns the records of all pending steps; waits for the last one."""
    records = [self._fetch(pending) for pending in self._pending]
    self._pending.clear()
    return records

  def _fetch(self, pending: _Pending) -> dict[str, Any]:
    """Returns the record of a step; waits for it."""
    self._doing("step", f"step {pending.step}")
    record = self._records.of(pending.step, pending.metrics)
    if cannot_recover(record, self.policy.loss_scaling, self.config.train.max_skips):
      self._stuck = self._stuck or (pending, record)
    return record

  def _write_pending(self) -> None:
    for record in self._fetch_pending():
      self._write(record, {})

  def _write(self, record: dict[str, Any], extra: dict[str, float]) -> None:
    """Shows a record, and logs it if logging is due or it has an evaluation."""
    record |= {name: plain(value) for name, value in extra.items()}
    self._records.last |= record
    step = record["step"]
    if step in self._looked:
      self._track_figures(step)
    logged = bool(extra) or step % self.config.train.log_every == 0
    if logged:
      self._metrics_file.write(record)
      scalars = self._records.scalars(record)
      self._trackers.each(lambda tracker: tracker.scalars(step, scalars))
    self._progress.step(step, record, logged)

  def _track_figures(self, step: int) -> None:
    """Gives the trackers what the watcher saw of a step."""
    shares, histograms = self._watcher.figures(self.processes.fetch(self._looked.pop(step)))

    def give(tracker: Tracker) -> None:
      for name, (edges, counts) in histograms.items():
        tracker.histogram(step, name, edges, counts)
      tracker.scalars(step, {f"numerics/{name}": share for name, share in shares.items()})

    self._trackers.each(give)

  def _stop(self, pending: _Pending, record: dict[str, Any]) -> None:
    """Saves the state and the failing batch, and raises `Stuck` with the diagnosis."""
    self._write_pending()
    nonfinite = self._save()
    file = self.directory.path / f"nonfinite_batch_{pending.step}.npz"
    arrays: dict[str, Any] = self.processes.fetch(pending.batch)
    if self.processes.first:
      np.savez(file, **arrays)
    if nonfinite:
      report = state_report(nonfinite)
    elif self.processes.count > 1:  # the search runs operations on this process's devices only
      report = "the run was one of several processes: the command below says which operation began it"
    else:
      report = step_report(self.setup.step, self.state, pending.batch)
    self.checkpoints.wait()
    saved = "" if nonfinite else f"a checkpoint of step {self.step}, up to which steps were under way, and "
    raise Stuck(
      f"stopped at step {pending.step}: the last {self.config.train.max_skips} steps "
      f"{why_skipped(record, self.policy.loss_scaling)}\n{report}\n"
      f"saved: {saved}the batch of step {pending.step}, in {file}; mpjax numerics "
      f"{self.directory.path} --hunt searches again, also with another policy\n{self._way_on()}"
    )

  def _way_on(self) -> str:
    return way_on(self.checkpoints.latest(), self.directory.path, self.config.train.skip_nonfinite)

  def _evaluate(self) -> dict[str, float]:
    """Returns the evaluation of the state. Saves nothing: a run resumed from here would skip it."""
    self._doing("evaluation", f"the evaluation after step {self.step}")
    setup, totals = self.setup, collections.defaultdict[str, list[Any]](list)
    model, batches = setup.for_evaluation(self.state), iter(setup.data.eval(setup.rows))
    for number in itertools.count(1):
      if not (rows := self._next_rows(batches, "the evaluation data")):
        break
      for name, value in setup.evaluate(model, setup.place(rows)).items():
        totals[name].append(value)
        jax.block_until_ready(totals[name][-LAG:][0])
      self.processes.doing(f"batch {number} of the evaluation")
    return {name: mean_of_batches(values) for name, values in totals.items()}

  def _resume(self) -> None:
    """Restores the newest good checkpoint, or makes the first state."""
    self._doing("start", "the checkpoint to resume from")
    resumed = self.checkpoints.restore_latest(self.setup.abstract_state())
    if resumed is None:
      self.state = self.setup.first_state()
      self.checkpoints.begun_with = self.checkpoints.nonfinite(self.state)
      if (source := self.config.train.init_from) is not None:
        self.state, self._source = start_from(self.setup, self.state)
        if nonfinite := self.checkpoints.nonfinite(self.state):
          raise ConfigError(
            f"train.init_from={source}: {nonfinite_text(nonfinite)}: expected a finite run or export"
          )
      return
    for damage in resumed.damaged:
      LOGGER.info(damage)
    if resumed.loop["fingerprint"] != self.data.info.fingerprint:
      raise ConfigError(
        f"out={self.directory.path}: the data is not what this run began with "
        f"({self.data.info.description}): nothing was changed; bring the data back, or choose another out="
      )
    self.iterator.set_state(resumed.data)
    self._records.last = resumed.loop["last"]
    self._logged = resumed.loop.get("records")
    self.state, self.step = resumed.state, resumed.step

  def _save(self, eval_loss: float | None = None) -> NonFiniteLeaves:
    """Saves a checkpoint, or returns the leaves of the state that are not finite."""
    self._doing("checkpoint", f"the checkpoint of step {self.step}")
    self._require_directory(eval_loss)
    self._metrics_file.sync()
    try:
      nonfinite = self._write_checkpoint(eval_loss)
      if self.config.train.checkpoint_wait:
        self.checkpoints.wait()
    except CheckpointError:
      self._require_directory(eval_loss)
      raise
    return nonfinite

  def _write_checkpoint(self, eval_loss: float | None) -> NonFiniteLeaves:
    last, records = self._records.last, self._metrics_file.count
    loop = {"fingerprint": self.data.info.fingerprint, "last": last, "records": records}
    skips, data = int(last.get("consecutive_skips", 0)), self.iterator.get_state()
    return self.checkpoints.save(self.step, self.state, data, loop, eval_loss, skips)

  def _require_directory(self, eval_loss: float | None = None) -> None:
    """Ends the run if its directory was moved, deleted or replaced; saves a checkpoint elsewhere if possible.

    Raises:
      CheckpointError: if the directory is no longer there.
    """
    if not self.processes.first or self.directory.is_there:
      return
    path = self.directory.path
    gone = f"{path} was moved, deleted or replaced while the run went on, and nothing more is written there"
    if self.processes.count > 1:  # the others would have to take part in a checkpoint elsewhere
      raise CheckpointError(f"{gone}; its checkpoints are where it is now")
    self._write_pending()
    self._metrics_file.sync()
    begun_with, refuge = self.checkpoints.begun_with, self.directory.refuge()
    with contextlib.suppress(CheckpointError):  # for a checkpoint that was being written
      self.checkpoints.close()
    self.checkpoints = self._open_checkpoints(refuge / "checkpoints")
    self.checkpoints.begun_with = begun_with
    nonfinite = self._write_checkpoint(eval_loss)
    self.checkpoints.wait()
    saved = f"a checkpoint of step {self.step} is in {refuge}, and the same command with out={refuge} resumes"
    raise CheckpointError(f"{gone}; {state_report(nonfinite) if nonfinite else f'{saved} from it'}")

  def _finish(self) -> dict[str, Any]:
    """Waits for the last checkpoint, exports the weights if asked to, and writes and returns the summary."""
    settings, path, first = self.config.train, self.directory.path, self.processes.first
    step = settings.steps
    self._doing("checkpoint", f"the checkpoint of step {step} to be written")
    try:
      self.checkpoints.wait()
    finally:
      self._require_directory()
    loss = self._records.last["loss"]
    if not math.isfinite(float(loss)):
      said = f"stopped at step {step}, the last: its loss is {loss}, so the run does not count as finished"
      raise Stuck(f"{said}\n{self._way_on()}")
    self._doing("checkpoint", "what the run leaves to be written")
    if settings.export is not None:  # gathered by all, written by one
      weights = jax.jit(functools.partial(weights_of, self.setup.step, masters=settings.export_dtype in WIDE))
      params, model_state = self.processes.fetch((weights(self.state), self.state.model_state))
      if first:
        file = path / "model.safetensors"
        save_safetensors(file, self.config, self.data.info, params, model_state, settings.export_dtype)
        LOGGER.info(export_text(file))
    summary = self._records.summary(self.state)
    self._trackers.close(summary)  # before the run counts as finished
    if first:
      self.directory.write_summary(summary)
      show_summary(summary, path)
    return summary
