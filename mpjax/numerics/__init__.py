"""Tools that measure what a policy does to the numbers of a program: `inspect_numerics`, `find_nonfinite`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.numerics._inspection import inspect_numerics
from mpjax.numerics._report import Advice, Finding, NumericsReport
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
