"""Shows a run: a progress bar on a terminal, lines elsewhere, and tables."""

from __future__ import annotations

import importlib
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

import rich.box
import rich.console
import rich.markup
import rich.progress
import rich.table

# Least time between two updates of a bar in a notebook.
_SECONDS = 0.25


class Display:
  """Shows progress as a bar on a terminal or in a notebook; elsewhere as one line per logged step.

  Args:
    console: where to show it.
    steps: total number of steps.
    start: the step that the run resumes from; 0 for a new run.
    units: the unit of the speed: tokens or images.
    has_scale: whether to show a loss scale.
  """

  def __init__(self, console: rich.console.Console, steps: int, start: int, units: str, has_scale: bool):
    self._console = console
    self._steps = steps
    self._units = units
    self._has_scale = has_scale
    self._live = console.is_terminal or console.is_jupyter
    self._cell: Any = None  # the notebook cell that shows the bar
    self._shown = 0.0
    self._progress = rich.progress.Progress(
      rich.progress.TextColumn("[bold]{task.description}"),
      rich.progress.BarColumn(bar_width=None),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TextColumn("{task.fields[status]}"),
      rich.progress.TimeRemainingColumn(),
      console=console,
      disable=not console.is_terminal,
    )
    self._task = self._progress.add_task("train", total=steps, completed=start, status="compiling")

  def __enter__(self) -> Display:
    self._progress.start()
    if self._console.is_jupyter:  # IPython is enough; rich would need ipywidgets
      display = importlib.import_module("IPython.display").display
      self._cell = display(self._progress, display_id=True)
    if not self._live:
      self.line("compiling the training step")
    return self

  def __exit__(self, *_: object) -> None:
    self._progress.stop()
    self._show(at_once=True)

  def _show(self, at_once: bool = False) -> None:
    now = time.monotonic()
    if self._cell is not None and (at_once or now - self._shown > _SECONDS):
      self._cell.update(self._progress)
      self._shown = now

  def _look(self) -> None:
    """Switches to lines once the terminal is gone."""
    if self._live and not (self._console.is_terminal or self._console.is_jupyter):
      self._live = False
      self._progress.stop()

  def step(self, step: int, record: Mapping[str, Any], logged: bool) -> None:
    """Shows the metrics of a finished step."""
    self._look()
    shown = [f"loss {_number(record['loss'])}"]
    if self._has_scale:
      shown.append(f"scale {_power(record['loss_scale'])}")
    if self._has_scale or record["skipped_steps"]:
      shown.append(f"skipped {record['skipped_steps']}")
    speed = record[f"{self._units}_per_s"]
    if speed is not None:
      shown.append(f"{speed:,.0f} {self._units}/s")
    status = "  ".join(shown)
    self._progress.update(self._task, completed=step, status=status)
    self._show()
    if logged and not self._live:
      self.line(f"step {step}/{self._steps}  {status}")

  def evaluation(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Shows an evaluation."""
    shown = "  ".join(f"{name.removeprefix('eval_')} {_number(value)}" for name, value in metrics.items())
    self.line(f"step {step}/{self._steps}  eval: {shown}")

  def line(self, text: str) -> None:
    """Prints one line, above the bar if one is shown."""
    self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def header(console: rich.console.Console, rows: Mapping[str, Any]) -> None:
  """Prints what the run is about to do."""
  for name, value in rows.items():
    console.print(f"[bold]{name:>10}[/]  {rich.markup.escape(str(value))}", highlight=False, soft_wrap=True)


def summary_table(console: rich.console.Console, summary: Mapping[str, Any], directory: pathlib.Path) -> None:
  """Prints the figures of a finished run, and its directory."""
  table = rich.table.Table(title="run finished", box=rich.box.ROUNDED, show_header=False)
  table.add_column(style="bold")
  table.add_column(justify="right", overflow="fold")  # a policy is written out, however long
  for name, value in summary.items():
    hidden = name == "skipped_steps" and not value and "loss_scale" not in summary
    if not (hidden or isinstance(value, dict)):
      show = _size if name.endswith("_bytes") else _power if name == "loss_scale" else _number
      title = name.removesuffix("_bytes").replace("_", " ")
      table.add_row(rich.markup.escape(title), rich.markup.escape(str(show(value))))
  console.print(table)
  console.print(f"run directory: {directory}", highlight=False, markup=False, soft_wrap=True)


def finished_already(
  console: rich.console.Console, summary: Mapping[str, Any], directory: pathlib.Path
) -> None:
  """Prints the result of a run that has finished already."""
  console.print("this run has finished already; choose another out= for a new one", highlight=False)
  summary_table(console, summary, directory)


def _number(value: float | str | None) -> str:
  if value is None:
    return "unknown"
  return (
    f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
  )


def _power(scale: float) -> str:
  """Returns a power of two as `2^16`, and other numbers as they are."""
  mantissa, exponent = math.frexp(scale)
  return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _size(value: float | None) -> str:
  return "unknown" if value is None else f"{value / 1e6:,.1f} MB"
