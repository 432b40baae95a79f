"""`find_nonfinite`: the first operation that gave a value that is not finite."""

from mpjax.numerics.nonfinite._find_nonfinite import NonfiniteReport, find_nonfinite

__all__ = [
  "NonfiniteReport",
  "find_nonfinite",
]
