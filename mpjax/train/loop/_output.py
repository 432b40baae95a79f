"""What a run shows: the records of the logger `mpjax.train`, its header, its progress, its summary."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pathlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import rich.console
import rich.progress

from mpjax._render.plain_text import bytes_text, power_of_two_text
from mpjax.fp8._hardware import in_force
from mpjax.policy import Policy
from mpjax.step import Layout, TrainState
from mpjax.train._errors import one_line
from mpjax.train.setup._experiment import Setup
from mpjax.train.setup._optimizers import describe_optimizer

LOGGER = logging.getLogger("mpjax.train")


@contextlib.contextmanager
def goes_on_without(what: str) -> Iterator[None]:
  """Says that a run goes on without a part that fails in its block: no tracker or profile is worth a run."""
  try:
    yield
  except Exception as error:  # others' code can raise anything
    LOGGER.info(f"the run goes on without {what}: {' '.join(f'{type(error).__name__}: {error}'.split())}")


class Output(logging.Handler):
  """Shows what its thread logs within its block: warnings and errors on stderr, the rest on a console.

  A full disk, or a reader that goes away, does not end a run, which goes on without that stream. The console
  is standard output by default.
  """

  def __init__(self, console: rich.console.Console | None = None) -> None:
    super().__init__()
    if console is None and isinstance(sys.stdout, io.TextIOWrapper):
      sys.stdout.reconfigure(errors="backslashreplace")  # a character that it lacks appears as its code
    self.console = console or rich.console.Console()
    thread = threading.get_ident()
    self.addFilter(lambda record: record.thread == thread)

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


class Progress:
  """Shows progress as a bar on a terminal; elsewhere as one line per logged step.

  `start` is the step that the run resumes from, `units` that of the speed: tokens or images.
  """

  def __init__(self, console: rich.console.Console, steps: int, start: int, units: str, has_scale: bool):
    self._steps = steps
    self._units = units
    self._has_scale = has_scale
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("[bold]{task.description}"),
      rich.progress.BarColumn(bar_width=None),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn("{task.fields[status]}"),
      rich.progress.TimeRemainingColumn(),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._bar.add_task("train", total=steps, completed=start, status="compiling")
    # Lines that repeat what a bar shows are for those who ask for them.
    self._level = logging.DEBUG if console.is_terminal else logging.INFO

  def __enter__(self) -> Progress:
    self._bar.start()
    LOGGER.log(self._level, "compiling the training step")
    return self

  def __exit__(self, *_: object) -> None:
    self._bar.stop()

  def write(self, record: Mapping[str, Any], is_logged: bool) -> None:
    """Shows the record of a step."""
    step = f"step {record['step']}/{self._steps}"
    scores = {name: value for name, value in record.items() if name.startswith("eval_")}
    if scores:
      shown = "  ".join(f"{name.removeprefix('eval_')} {_number(value)}" for name, value in scores.items())
      LOGGER.info(f"{step}  eval: {shown}")
    parts = [f"loss {_number(record['loss'])}"]
    if self._has_scale:
      parts.append(f"scale {power_of_two_text(record['loss_scale'])}")
    if self._has_scale or record["skipped_steps"]:
      parts.append(f"skipped {record['skipped_steps']}")
    if (speed := record[f"{self._units}_per_s"]) is not None:
      parts.append(f"{speed:,.0f} {self._units}/s")
    status = "  ".join(parts)
    self._bar.update(self._task, completed=record["step"], status=status)
    if is_logged:
      LOGGER.log(self._level, f"{step}  {status}")


def show_header(
  setup: Setup, state: TrainState, directory: pathlib.Path, begins: str, processes: int
) -> None:
  """Shows what the run is about to do; `begins` says where its first state comes from."""
  policy = setup.policy
  parameters = sum(leaf.size for leaf in jax.tree.leaves(state.arrays))
  scaling, config = policy.loss_scaling, setup.config
  rows = {
    "policy": policy.reason or policy.full_label,
    **({} if policy.fp8 is None else {"fp8": in_force(policy.fp8)}),
    **({} if scaling is None else {"loss scale": f"{scaling.kind}, from {scaling.init_scale:g}"}),
    "model": f"{setup.config.model.kind}, {parameters:,} parameters",
    "data": setup.info.description,
    "optimizer": describe_optimizer(config.optimizer, config.train.steps),
    **({} if (decay := config.train.average) is None else {"average": f"of the weights, decay {decay:g}"}),
    "devices": _devices(setup.layout, policy) + (f", in {processes} processes" if processes > 1 else ""),
    "run": f"{directory}" + (f", {begins}" if begins else ""),
  }
  for name, value in rows.items():
    LOGGER.info(f"{name:>10}  {value}")


def _devices(layout: Layout, policy: Policy) -> str:
  text = f"{layout.mesh.size} x {jax.devices()[0].device_kind}"
  if layout.mesh.size == 1:
    return text
  axes = " x ".join(f"{axis} {size}" for axis, size in layout.mesh.shape.items() if size > 1)
  dtype = "float32" if policy.reduce_dtype is None else policy.reduce_dtype.name
  return f"{text} ({axes})" + (f", gradients cross in {dtype}" if layout.shards > 1 else "")


def show_summary(summary: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Shows the figures of a finished run, and its directory."""
  LOGGER.info("run finished")
  for name, value in summary.items():
    title, text = _SHOWN.get(name, (name.replace("_", " "), _number))
    hidden = name == "skipped_steps" and not value and "loss_scale" not in summary
    if name != "resolved_policy" and not hidden:
      LOGGER.info(f"{title:>20}  {'unknown' if value is None else text(value)}")
  LOGGER.info(f"run directory: {directory}")


def _number(value: float | str) -> str:
  if isinstance(value, str):
    return value
  return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _parts(seconds: Mapping[str, float]) -> str:
  """Returns the sum of a time by part, and each part's share of it."""
  total = sum(seconds.values())
  return f"{total:.4g} s: " + ", ".join(f"{part} {n / (total or 1):.0%}" for part, n in seconds.items())


# The title of a value of the summary and how it is shown, if not as a number.
_SHOWN: dict[str, tuple[str, Callable[[Any], str]]] = {
  "loss_scale": ("loss scale", power_of_two_text),
  "peak_memory_bytes": ("peak memory", bytes_text),
  "time_s": ("time", _parts),
}
