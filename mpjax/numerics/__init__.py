"""Tools that measure what a policy does to the numbers of a program: `inspect_numerics`, `find_nonfinite`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.numerics._arguments import on_axes_of as on_axes_of, step_of as step_of
from mpjax.numerics._batches import listed as listed, rows as rows
from mpjax.numerics._inspection import inspect_numerics
from mpjax.numerics._pass import reference_state as reference_state, reference_step as reference_step
from mpjax.numerics._report import Advice, Finding, NumericsReport
from mpjax.numerics._watcher import Watcher as Watcher
from mpjax.numerics.nonfinite import NonfiniteReport, Origin, find_nonfinite

__all__ = [
  "Advice",
  "Finding",
  "NonfiniteReport",
  "NumericsReport",
  "Origin",
  "find_nonfinite",
  "inspect_numerics",
]


if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
