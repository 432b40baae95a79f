"""`find_nonfinite`: the first operation that computed NaN or infinity."""

from mpjax.numerics.nonfinite._find_nonfinite import find_nonfinite
from mpjax.numerics.nonfinite._origins import Origin
from mpjax.numerics.nonfinite._report import NonfiniteReport

__all__ = [
  "NonfiniteReport",
  "Origin",
  "find_nonfinite",
]
