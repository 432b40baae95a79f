"""The training loop: trains a config's model, through crashes, interruptions and restarts."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
import rich.console
import rich.progress
from grain import DatasetIterator

from mpjax._render.plain_text import plain_data
from mpjax._types import PyTree
from mpjax.numerics import Watcher
from mpjax.train._errors import (
  CheckpointError,
  ConfigError,
  DataError,
  Interrupted,
  Stuck,
  described,
  signal_name,
)
from mpjax.train._export import WIDE, export_text, save_safetensors
from mpjax.train._files import how_to_go_on
from mpjax.train.checkpoints import STORAGE_ERRORS, Checkpoints, nan_in
from mpjax.train.data import Batch
from mpjax.train.loop._records import Records, profiled, step_report, why_stuck
from mpjax.train.loop._sinks import (
  LOGGER,
  Tracker,
  Trackers,
  open_metrics,
  show_header,
  show_record,
  show_summary,
)
from mpjax.train.processes import Processes, signal_of_any
from mpjax.train.setup._experiment import Setup, mean_of_batches, weights_of
from mpjax.train.setup._saved_run import RunDirectory, start_from

# Number of newest steps whose metrics the host does not wait for.
LAG = 2


class _Pending(NamedTuple):
  """A step that the devices may be taking still, and what the watcher of its numbers saw."""

  step: int
  metrics: dict[str, jax.Array]
  batch: PyTree
  seen: Any


@dataclasses.dataclass
class TrainingRun:
  """One training run: what its config builds, and the loop. `step` is the number of the last step taken."""

  setup: Setup
  directory: RunDirectory
  processes: Processes
  console: rich.console.Console
  trackers: Sequence[Tracker]
  step: int = 0

  def __post_init__(self) -> None:
    self.config, self.data = self.setup.config, self.setup.data
    self._watcher = Watcher(self.setup.step)
    self._pending: collections.deque[_Pending] = collections.deque()
    # What takes each record that is to be logged.
    self._sinks: list[Callable[[dict[str, Any]], object]] = []

  def train(self) -> dict[str, Any]:
    """Trains from the last checkpoint to the end and returns the summary.

    Raises:
      CheckpointError: also for an error of the operating system about a file of the run.
    """
    try:
      with contextlib.ExitStack() as opened:
        self._begin(opened)
        signal = signal_of_any(self.processes)
        LOGGER.info("compiling the training step")
        first, last = self.config.train.profile_steps or (0, 0)
        with contextlib.closing(self._steps()) as steps, contextlib.ExitStack() as profile:
          for step in steps:
            if step == max(first, self._records.start + 1) <= last:
              profile.enter_context(profiled(self._traces))
            with jax.profiler.StepTraceAnnotation("train", step_num=step):
              self._take(step)
            if step == last:
              jax.block_until_ready(self.state)
              profile.close()
            self._at_boundary(signal())
        return self._finish()
    except OSError as error:
      path = self.directory.path
      # Checkpoints have absolute paths. Other errors are of the user's code, or of a lost process.
      inside = str(error.filename).startswith((str(path), str(path.absolute())))
      if path.exists() and not inside and error.errno not in STORAGE_ERRORS:
        raise
      failed = f"{error.filename or path} cannot be written: {error.strerror}; {how_to_go_on(path)}"
      raise CheckpointError(f"{failed} once there is room and permission to write") from error

  def _steps(self) -> Generator[int]:
    """Yields the numbers of the steps to take; a terminal has a bar meanwhile."""
    numbers, quiet = range(self.step + 1, self.config.train.steps + 1), not self.console.is_terminal
    yield from rich.progress.track(numbers, "train", console=self.console, disable=quiet)

  def _begin(self, opened: contextlib.ExitStack) -> None:
    """Makes the first state or reads the last checkpoint, and opens what the run writes to."""
    self.iterator: DatasetIterator = self.data.train(self.setup.rows)
    settings, path, processes = self.config.train, self.directory.path, self.processes
    is_tracked = bool(self.trackers or settings.trackers)
    begins, is_tracked = processes.agree(lambda: self._resume(opened), lambda _: is_tracked)
    self._looks_every = self.config.numerics.every if is_tracked else 0
    self.directory.begin(self.data.info)
    show_header(self.setup, self.state, path, begins, processes.count)
    processes.phase("start", "the trackers")
    self._trackers = Trackers(self.config, path, self.step, self.trackers if processes.first else None)
    opened.callback(self._trackers.close, None)
    if processes.first:
      self._metrics = opened.enter_context(open_metrics(path / "metrics.jsonl", self.step))
      log = lambda record: self._metrics.write(json.dumps(record) + "\n")
      self._sinks = [log, self._trackers.write, functools.partial(show_record, self.setup)]
    self._traces = path / "profile" / (f"process_{processes.process}" if processes.count > 1 else "")

  def _resume(self, opened: contextlib.ExitStack) -> str:
    """Restores the newest good checkpoint, or makes the first state; says where the state is from."""
    self.processes.phase("start", "the checkpoint to resume from")
    folder, keep = self.directory.path / "checkpoints", self.config.train.keep_checkpoints
    self.checkpoints = Checkpoints(folder, keep, run=self.config.tree)
    opened.push(self._close_checkpoints)
    resumed = self.checkpoints.restore_latest(self.setup.shapes()[0])
    if resumed is None:
      return self._first_state()
    for unfit in resumed.unfit:
      LOGGER.info(unfit)
    if resumed.loop["fingerprint"] != self.data.info.fingerprint:
      raise ConfigError(
        f"out={self.directory.path}: the data is not what this run began with "
        f"({self.data.info.description}): nothing was changed; bring the data back, or choose another out="
      )
    self.iterator.set_state(resumed.data)
    self.state, self.step = resumed.state, resumed.step
    self._records = Records(self.setup, self.step, resumed.loop["last"])
    return f"resumed after step {self.step}"

  def _close_checkpoints(self, kind: object, error: BaseException | None, _: object) -> None:
    if error is None or self.processes.are_together(error):  # else a pending write would wait for the others
      self.checkpoints.close()

  def _first_state(self) -> str:
    self.state, self._records = self.setup.first_state(), Records(self.setup, 0, {})
    if (given := self.config.train.init_from) is None:
      return ""
    self.state, source = start_from(self.setup, self.state)
    if nan := nan_in(self.state):
      raise ConfigError(f"train.init_from={given}: {nan}: expected a run or export without NaN")
    return source

  def _take(self, step: int) -> None:
    """Takes a step, and tells the record of an earlier one."""
    phase = self.processes.phase
    phase("data", f"the data of step {step}")
    is_first = step == self._records.start + 1
    rows = self._next_rows(self.iterator, f"the data of step {step}")
    phase("compile" if is_first else "step", f"step {step}")
    batch = self.setup.place(rows)
    looks = self._looks_every and step % self._looks_every == 0
    seen = self._watcher.look(self.state, batch) if looks else None
    every = self.config.train.log_every, self.config.train.eval_every, self.config.train.steps
    is_told = is_first or any(step % n == 0 for n in every)
    rate = {"learning_rate": self.setup.learning_rate(self.state)} if is_told else {}
    self.state, metrics = self.setup.step(self.state, batch)
    metrics = rate | metrics  # an optimiser may report its own
    self.step = step
    if is_first:  # so that no later step's time includes compilation
      jax.block_until_ready(metrics)
      phase("step", f"step {step}")
      self._records.restart_clock()
    for value in metrics.values():
      value.copy_to_host_async()
    self._pending.append(_Pending(step, metrics, batch, seen))
    self._tell_but(LAG)

  def _next_rows(self, batches: Iterator[Batch], what: str) -> Batch:
    """Returns this process's rows of the next batch, none at the end."""
    try:
      return next(batches, {})
    except Exception as error:  # a user's data source can raise anything
      then = f"{how_to_go_on(self.directory.path)} once the data is back"
      raise DataError(f"{what} cannot be read: {described(error)}; {then}") from error

  def _fetch(self) -> dict[str, Any]:
    """Returns the record of the oldest pending step; waits for it, and stops a run that is stuck there."""
    pending = self._pending.popleft()
    self.processes.phase("step", f"step {pending.step}")
    record = self._records.of(pending.step, pending.metrics)
    if pending.seen is not None:
      self._trackers.figures(pending.step, *self._watcher.figures(self.processes.fetch(pending.seen)))
    if why := why_stuck(record, self.setup.policy.loss_scaling, self.config.train.max_skips):
      self._stop(pending, record, why)
    return record

  def _tell(self, record: dict[str, Any]) -> None:
    """Keeps the values of a record, and gives it to every sink if it is to be logged."""
    self._records.last |= record
    if "eval_loss" in record or record["step"] % self.config.train.log_every == 0:
      for write in self._sinks:
        write(record)

  def _tell_but(self, left: int) -> None:
    """Tells the records of pending steps but the newest `left`."""
    while len(self._pending) > left:
      self._tell(self._fetch())

  def _at_boundary(self, signum: int | None) -> None:
    """Evaluates, saves or stops where that is due; all of these wait for every step so far.

    Depends only on the step, the metrics and `signum`, which are the same in every process.
    """
    settings, step = self.config.train, self.step
    last = step == settings.steps
    evaluate = last or step % settings.eval_every == 0
    save = last or step % settings.checkpoint_every == 0 or signum is not None
    if not (evaluate or save):
      return
    self._tell_but(1)
    record, eval_loss = self._fetch(), None
    if evaluate:
      scores = self._evaluate()
      record |= plain_data(scores)
      eval_loss = scores["eval_loss"]
    self._tell(record)
    save |= eval_loss is not None and self._records.is_best(eval_loss)
    if save and (nan := self._save(eval_loss)):
      # NaN spreads and does not go away: further steps would be useless.
      raise Stuck(f"stopped at step {step}: {_not_saved(nan)}\n{self._way_on()}")
    self._records.restart_clock()
    if signum is not None and not last:
      self.checkpoints.wait()
      saved = f"{signal_name(signum)}: checkpoint of step {step} saved in {self.directory.path}"
      raise Interrupted(signum, f"{saved}; the same command resumes from it")

  def _stop(self, pending: _Pending, record: dict[str, Any], why: str) -> NoReturn:
    """Saves the state and the failing batch, and raises `Stuck` with the diagnosis."""
    self._tell(record)
    for later in self._pending:
      self._tell(self._records.of(later.step, later.metrics))
    nan = self._save()
    file = self.directory.path / f"nonfinite_batch_{pending.step}.npz"
    arrays: dict[str, Any] = self.processes.fetch(pending.batch)
    if self.processes.first:
      np.savez(file, **arrays)
    if nan:
      report = _not_saved(nan)
    elif self.processes.count > 1:  # the search runs operations on this process's devices only
      report = "the run was one of several processes: the command below says which operation began it"
    else:
      report = step_report(self.setup.step, self.state, pending.batch)
    self.checkpoints.wait()
    saved = "" if nan else f"a checkpoint of step {self.step}, up to which steps were under way, and "
    raise Stuck(
      f"stopped at step {pending.step}: the last {self.config.train.max_skips} steps {why}\n"
      f"{report}\n"
      f"saved: {saved}the batch of step {pending.step}, in {file}; mpjax numerics "
      f"{self.directory.path} --hunt searches again, also with another policy\n{self._way_on()}"
    )

  def _way_on(self) -> str:
    """Returns which checkpoint, none of which has NaN, is the last, and how to start from it."""
    step, path = self.checkpoints.latest(), self.directory.path
    skips = self.config.train.skip_nonfinite
    change = "a lower optimizer.learning_rate" if skips else "train.skip_nonfinite=true"
    if step is None:
      return f"no good checkpoint was saved: start over with another out= and, for example, {change}"
    other = f"train.init_from={path} with another out= starts from it, for example with {change}"
    again = "the same command resumes there and takes the same steps again"
    return f"the last good checkpoint is of step {step}: {other}; {again}"

  def _evaluate(self) -> dict[str, float]:
    """Returns the evaluation of the state. Saves nothing: a run resumed from here would skip it."""
    self.processes.phase("evaluation", f"the evaluation after step {self.step}")
    setup, totals = self.setup, collections.defaultdict[str, list[Any]](list)
    model, batches = setup.for_evaluation(self.state), iter(setup.data.eval(setup.rows))
    for number in itertools.count(1):
      if not (rows := self._next_rows(batches, "the evaluation data")):
        break
      for name, value in setup.evaluate(model, setup.place(rows)).items():
        totals[name].append(value)
        jax.block_until_ready(totals[name][-LAG:][0])
      self.processes.phase("evaluation", f"batch {number} of the evaluation")
    return {name: mean_of_batches(values) for name, values in totals.items()}

  def _save(self, eval_loss: float | None = None) -> str:
    """Saves a checkpoint, or returns which leaves of the state hold NaN."""
    self.processes.phase("checkpoint", f"the checkpoint of step {self.step}")
    if self.processes.first:
      os.fsync(self._metrics.fileno())
    last = self._records.last
    loop = {"fingerprint": self.data.info.fingerprint, "last": last}
    skips, data = int(last.get("consecutive_skips", 0)), self.iterator.get_state()
    nan = self.checkpoints.save(self.step, self.state, data, loop, eval_loss, skips)
    if self.config.train.checkpoint_wait:
      self.checkpoints.wait()
    return nan

  def _finish(self) -> dict[str, Any]:
    """Waits for the last checkpoint, exports the weights if asked to, and writes and returns the summary."""
    settings, path, first = self.config.train, self.directory.path, self.processes.first
    step = settings.steps
    self.processes.phase("checkpoint", f"the checkpoint of step {step} to be written")
    self.checkpoints.wait()
    loss = self._records.last["loss"]
    if not math.isfinite(float(loss)):
      said = f"stopped at step {step}, the last: its loss is {loss}, so the run does not count as finished"
      raise Stuck(f"{said}\n{self._way_on()}")
    self.processes.phase("checkpoint", "what the run leaves to be written")
    if settings.export is not None:  # gathered by all, written by one
      weights = jax.jit(functools.partial(weights_of, self.setup.step, masters=settings.export_dtype in WIDE))
      params, model_state = self.processes.fetch((weights(self.state), self.state.model_state))
      if first:
        file = path / "model.safetensors"
        save_safetensors(file, self.config, self.data.info, params, model_state, settings.export_dtype)
        LOGGER.info(export_text(file))
    self.processes.phase("checkpoint", "the summary")
    summary = self._records.summary(self.state, self.processes.seconds)
    self._trackers.close(summary)  # before the run counts as finished
    if first:
      self.directory.write_summary(summary)
      show_summary(summary, path)
    return summary


def _not_saved(nan: str) -> str:
  return f"the state is not finite, and no checkpoint of it was saved: {nan}"
