"""`find_nonfinite`: the first operation that gave a value that is not finite."""

from mpjax.numerics.nonfinite._find_nonfinite import NonfiniteReport, find_nonfinite
from mpjax.numerics.nonfinite._origins import Origin

__all__ = [
  "NonfiniteReport",
  "Origin",
  "find_nonfinite",
]
