"""`inspect_numerics` and `find_nonfinite`: what a policy does to the numbers of a program."""

from mpjax.numerics._inspection import inspect_numerics
from mpjax.numerics._report import NumericsReport
from mpjax.numerics.nonfinite import NonfiniteReport, find_nonfinite

__all__ = [
  "NonfiniteReport",
  "NumericsReport",
  "find_nonfinite",
  "inspect_numerics",
]
