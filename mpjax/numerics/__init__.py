"""Tools that measure what a policy does to the numbers of a program: `inspect_numerics`, `find_nonfinite`."""

from mpjax.numerics._conclusions import Advice, Finding, Measured
from mpjax.numerics._fp8_recipes import Fp8Comparison, Fp8Operand, compare_fp8_recipes
from mpjax.numerics._inspection import inspect_numerics
from mpjax.numerics._instrumented_step import inspection_programs
from mpjax.numerics._logprob_mismatch import LogprobMismatch, logprob_mismatch
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._report_figures import NumericsFigures
from mpjax.numerics._significant_digits import SignificantDigits, significant_digits
from mpjax.numerics.nonfinite import NonfiniteReport, Origin, find_nonfinite

__all__ = [
  "Advice",
  "Finding",
  "Fp8Comparison",
  "Fp8Operand",
  "LogprobMismatch",
  "Measured",
  "NonfiniteReport",
  "NumericsFigures",
  "NumericsReport",
  "Origin",
  "SignificantDigits",
  "compare_fp8_recipes",
  "find_nonfinite",
  "inspect_numerics",
  "inspection_programs",
  "logprob_mismatch",
  "significant_digits",
]
