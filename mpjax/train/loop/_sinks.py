"""Where a run's lines and numbers go: console, `metrics.jsonl`, TensorBoard, wandb, trackers of a caller."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import os
import pathlib
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TextIO, runtime_checkable

import jax
import numpy as np
import rich.console
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from mpjax._render.plain_text import bytes_text, pip_install, power_of_two_text
from mpjax.fp8 import in_force
from mpjax.step import TrainState
from mpjax.train._errors import ConfigError, described, one_line
from mpjax.train._files import write_atomically
from mpjax.train.config._config import Config
from mpjax.train.setup._experiment import Setup
from mpjax.train.setup._optimizers import describe_optimizer

LOGGER = logging.getLogger("mpjax.train")


@contextlib.contextmanager
def goes_on_without(what: str) -> Iterator[None]:
  """Says that a run goes on without a part that fails in its block: no tracker or profile is worth a run."""
  try:
    yield
  except Exception as error:  # others' code can raise anything
    LOGGER.info(f"the run goes on without {what}: {described(error)}")


class Output(logging.Handler):
  """Shows what is logged within its block: warnings and errors on stderr, the rest on a console.

  A full disk, or a reader that goes away, does not end a run, which goes on without that stream. The console
  is standard output by default.
  """

  def __init__(self, console: rich.console.Console | None = None) -> None:
    super().__init__()
    if console is None and isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors="backslashreplace")  # a character that it lacks appears as its code
    self.console = console or rich.console.Console()

  def __enter__(self) -> Output:
    LOGGER.addHandler(self)
    return self

  def __exit__(self, *_: object) -> None:
    LOGGER.removeHandler(self)

  def emit(self, record: logging.LogRecord) -> None:
    """Shows a record."""
    line, is_warning = self.format(record), record.levelno >= logging.WARNING
    try:
      if is_warning:
        print(line, file=sys.stderr, flush=True)
      else:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)
    except (Exception, SystemExit) as error:  # rich exits where nobody reads
      nowhere = open(os.devnull, "w")  # noqa: SIM115 (otherwise Python's last flush would fail, too)
      if is_warning:
        sys.stderr = nowhere
        return
      if self.console.file is sys.stdout:
        sys.stdout = nowhere
      self.console = rich.console.Console(quiet=True)
      reason = one_line(str(error.__context__ or error))
      LOGGER.warning(f"warning: the run goes on without output, which cannot be written ({reason})")


def show_record(setup: Setup, record: Mapping[str, Any]) -> None:
  """Shows the record of a step."""
  units, has_scale = setup.task.units[0], setup.policy.loss_scaling is not None
  step = f"step {record['step']}/{setup.config.train.steps}"
  scores = [(name[5:], value) for name, value in record.items() if name.startswith("eval_")]
  if scores:
    LOGGER.info(f"{step}  eval: {'  '.join(f'{name} {_number(value)}' for name, value in scores)}")
  parts = [step, f"loss {_number(record['loss'])}"]
  if has_scale:
    parts.append(f"scale {power_of_two_text(record['loss_scale'])}")
  if has_scale or record["skipped_steps"]:
    parts.append(f"skipped {record['skipped_steps']}")
  if (speed := record[f"{units}_per_s"]) is not None:
    parts.append(f"{speed:,.0f} {units}/s")
  LOGGER.info("  ".join(parts))


def show_header(
  setup: Setup, state: TrainState, directory: pathlib.Path, begins: str, processes: int
) -> None:
  """Shows what the run is about to do; `begins` says where its first state comes from."""
  policy, config, mesh = setup.policy, setup.config, setup.layout.mesh
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.arrays))
  devices = f"{mesh.size} x {jax.devices()[0].device_kind}"
  if mesh.size > 1:
    devices += f" ({' x '.join(f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1)})"
  if setup.layout.shards > 1:
    devices += f", gradients cross in {np.dtype(policy.reduce_dtype or np.float32)}"
  scaling, decay = policy.loss_scaling, config.train.average
  rows = {
    "policy": policy.reason or policy.full_label,
    "fp8": policy.fp8 and in_force(policy.fp8),
    "loss scale": scaling and f"{scaling.kind}, from {scaling.init_scale:g}",
    "model": f"{config.model.kind}, {parameters:,} parameters",
    "data": setup.info.description,
    "optimizer": describe_optimizer(config.optimizer, config.train.steps),
    "average": decay and f"of the weights, decay {decay:g}",
    "devices": devices + (f", in {processes} processes" if processes > 1 else ""),
    "run": f"{directory}" + (f", {begins}" if begins else ""),
  }
  for name, value in rows.items():
    if value:
      LOGGER.info(f"{name:>10}  {value}")


def show_summary(summary: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Shows the figures of a finished run, and its directory."""
  LOGGER.info("run finished")
  hidden = {"resolved_policy"}
  if not (summary["skipped_steps"] or "loss_scale" in summary):
    hidden.add("skipped_steps")
  for name, value in summary.items():
    if name not in hidden:
      LOGGER.info(f"{name.replace('_', ' '):>20}  {_figure(name, value)}")
  LOGGER.info(f"run directory: {directory}")


def _figure(name: str, value: Any) -> str:
  """Returns a value of the summary for a person."""
  if value is None:
    return "unknown"
  if name == "loss_scale":
    return power_of_two_text(value)
  if name == "peak_memory_bytes":
    return bytes_text(value)
  if name == "time_s":
    total = sum(value.values())
    return f"{total:.4g} s: " + ", ".join(f"{part} {s / (total or 1):.0%}" for part, s in value.items())
  return _number(value)


def _number(value: float | str) -> str:
  if isinstance(value, str):
    return value
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def open_metrics(path: pathlib.Path, resume_step: int) -> TextIO:
  """Opens `metrics.jsonl`, which takes one JSON object per line, in the order of steps, and holds none back.

  Drops records of steps after `resume_step`, which the resumed run writes again, and lines that are not
  records, such as one that a kill cut off. It keeps the first record of a step.
  """
  kept: dict[int | None, bytes] = {}
  for line in path.read_bytes().splitlines() if path.exists() else []:
    kept.setdefault(_step(line), line + b"\n")
  if wrong := kept.pop(None, None):
    LOGGER.info(f"{path.name}: dropped what is not a record: {wrong[:60]!r}")
  write_atomically(path, b"".join(line for step, line in kept.items() if step and step <= resume_step))
  return path.open("a", buffering=1, encoding="utf-8")


def _step(line: bytes) -> int | None:
  """Returns the step of a record; `None` for a line that is not a record."""
  try:
    return int(json.loads(line)["step"])
  except (ValueError, KeyError, TypeError, IndexError, RecursionError):
    return None


@runtime_checkable
class Tracker(Protocol):
  """Takes the numbers of a run, in the order of its steps, in process 0.

  A resumed run gives the steps after its checkpoint again. A tracker that raises is left out from then on.
  """

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Takes the numbers of a step, by name."""

  def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
    """Takes a histogram of a step: n + 1 edges and the counts of the n buckets between them."""

  def close(self, summary: Mapping[str, Any] | None) -> None:
    """Ends the tracking of a run that took steps; `summary` is its own, or `None` if it did not finish."""


class TensorBoard:
  """Writes TensorBoard's file of a run, without a thread or a queue."""

  def __init__(self, config: Config, directory: pathlib.Path, start: int):
    name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{time.time_ns()}"
    file = directory / "tensorboard" / name
    file.parent.mkdir(exist_ok=True)
    self._writer = RecordWriter(file.open("xb"))
    self._write(file_version="brain.Event:2")
    # TensorBoard drops earlier files' events of this step and later ones.
    self._write(step=start + 1, session_log=SessionLog(status=SessionLog.START))
    self._writer.flush()

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Writes one event with all numbers, and passes what was written to the operating system."""
    numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
    self._write(step=step, summary=Summary(value=numbers))
    self._writer.flush()

  def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
    """Writes a histogram with an empty bucket on each side; TensorBoard draws what is between them."""
    histogram = HistogramProto(
      min=edges[0],
      max=edges[-1],
      num=sum(counts),
      bucket_limit=[*edges, math.inf],
      bucket=[0.0, *counts, 0.0],
    )
    self._write(step=step, summary=Summary(value=[Summary.Value(tag=name, histo=histogram)]))

  def close(self, summary: Mapping[str, Any] | None) -> None:
    """Flushes and closes the file."""
    self._writer.close()

  def _write(self, **event: Any) -> None:
    self._writer.write(Event(wall_time=time.time(), **event).SerializeToString())


class WandB:
  """Logs a run to Weights & Biases, with the settings of the environment, such as `WANDB_PROJECT`.

  A resumed run continues the same run there; its id is in the run directory's file `wandb-id`.
  """

  def __init__(self, config: Config, directory: pathlib.Path, start: int):
    import wandb

    file = directory / "wandb-id"
    if not file.exists():
      write_atomically(file, uuid.uuid4().hex.encode())
    self._histogram = wandb.Histogram
    self._run = wandb.init(
      dir=str(directory.absolute()),
      id=file.read_text(),
      resume="allow",
      reinit="create_new",  # otherwise it returns a run that the caller has open
      config=config.tree,
      allow_val_change=True,  # a resumed run may have more steps
      settings={"console": "off"},
    )
    self._from: int = self._run.step  # wandb has all earlier steps, and would warn about each

  def scalars(self, step: int, values: Mapping[str, float]) -> None:
    """Logs the numbers of a step that wandb does not have yet."""
    if step >= self._from:
      self._run.log(dict(values), step=step)

  def histogram(self, step: int, name: str, edges: Sequence[float], counts: Sequence[float]) -> None:
    """Logs a histogram."""
    if step >= self._from:
      self._run.log({name: self._histogram(np_histogram=(list(counts), list(edges)))}, step=step)

  def close(self, summary: Mapping[str, Any] | None) -> None:
    """Waits until all was sent; marks the run there as failed without a summary."""
    self._run.summary.update(dict(summary or {}))
    self._run.finish(exit_code=0 if summary else 1)


class Trackers:
  """The trackers of a run as one. If one fails, the run goes on without it.

  `own` are a caller's, in addition to those of the config; `None` in a process that does not track.
  """

  def __init__(self, config: Config, directory: pathlib.Path, start: int, own: Sequence[Tracker] | None):
    self._trackers: list[Tracker] = list(own or ())
    self._hidden = {"step"} if config.resolve_policy().loss_scaling else {"step", "loss_scale"}
    for name in config.train.trackers if own is not None else ():
      with goes_on_without(name):
        self._trackers.append((WandB if name == "wandb" else TensorBoard)(config, directory, start))

  def write(self, record: Mapping[str, Any]) -> None:
    """Gives the trackers the numbers of a record."""
    is_shown = lambda name, value: isinstance(value, (int, float)) and name not in self._hidden
    scalars = {name: value for name, value in record.items() if is_shown(name, value)}
    self._each(lambda tracker: tracker.scalars(record["step"], scalars))

  def figures(self, step: int, shares: Mapping[str, float], histograms: Mapping[str, Any]) -> None:
    """Gives the trackers what `numerics.every` saw of a step."""

    def give(tracker: Tracker) -> None:
      for name, (edges, counts) in histograms.items():
        tracker.histogram(step, name, edges, counts)
      tracker.scalars(step, {f"numerics/{name}": share for name, share in shares.items()})

    self._each(give)

  def close(self, summary: Mapping[str, Any] | None) -> None:
    """Closes each tracker that is open; `summary` is `None` if the run did not finish."""
    self._each(lambda tracker: tracker.close(summary))
    self._trackers = []

  def _each(self, action: Callable[[Tracker], None]) -> None:
    trackers, self._trackers = self._trackers, []
    for tracker in trackers:
      with goes_on_without(type(tracker).__name__):
        action(tracker)
        self._trackers.append(tracker)


def require_trackers(trackers: Any) -> None:
  """Raises `TypeError` unless these are trackers."""
  is_list = isinstance(trackers, Sequence) and not isinstance(trackers, str)
  if not is_list or any(isinstance(each, type) or not isinstance(each, Tracker) for each in trackers):
    raise TypeError(f"trackers={trackers!r}: expected a list of objects with the methods of a Tracker")


def check_trackers(config: Config) -> None:
  """Raises `ConfigError` if a tracker's package is not installed."""
  if "wandb" in config.train.trackers:
    try:
      from wandb import init  # noqa: F401  (a folder `wandb` in the working directory is a module without it)
    except ImportError:
      needs = "train.trackers has wandb, which needs the package wandb"
      raise ConfigError(f"{needs}: {pip_install('wandb')}") from None
