"""Sets of HLO operations, for the readers of a program."""

from __future__ import annotations

# Operations whose result is in the memory of an operand.
VIEWS = frozenset(
  {
    *("add-dependency", "after-all", "bitcast", "get-tuple-element", "opt-barrier", "optimization-barrier"),
    "tuple",
  }
)
# One FLOP an element, by the compilers' own count.
ARITHMETIC = frozenset(
  {
    *("abs", "add", "and", "ceil", "clamp", "compare", "convert", "divide", "floor", "is-finite", "maximum"),
    *("minimum", "multiply", "negate", "not", "or", "reduce-precision", "remainder", "round-nearest-afz"),
    *("round-nearest-even", "select", "sign", "subtract", "xor", "count-leading-zeros", "popcnt"),
    *("shift-left", "shift-right-arithmetic", "shift-right-logical", "bitcast-convert"),
  }
)
# Also element-wise; compilers count them separately.
_TRANSCENDENTAL = frozenset(
  {
    *("atan2", "cbrt", "cosine", "erf", "exponential", "exponential-minus-one", "log", "log-plus-one"),
    *("logistic", "power", "rsqrt", "sine", "sqrt", "tan", "tanh"),
  }
)
ELEMENTWISE = ARITHMETIC | _TRANSCENDENTAL | {"complex", "copy", "imag", "real", "stochastic-convert"}
# REORDERING: the result has the dtype and the number of elements of the first operand. SAME_DTYPE: the dtype.
REORDERING = frozenset({"copy", "reshape", "reverse", "transpose"})
SAME_DTYPE = REORDERING | {
  *("broadcast", "concatenate", "dynamic-slice", "dynamic-update-slice", "gather", "pad", "reduce-window"),
  *("select-and-scatter", "slice"),
}
COLLECTIVES = frozenset(
  {
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
  }
)
KNOWN = (
  VIEWS
  | ELEMENTWISE
  | SAME_DTYPE
  | COLLECTIVES
  | {
    *("async", "batch-norm-grad", "batch-norm-inference", "batch-norm-training", "call", "cholesky"),
    *("conditional", "constant", "convolution", "custom-call", "domain", "dot", "dynamic-reshape", "fft"),
    *("fusion", "get-dimension-size", "infeed", "iota", "map", "outfeed", "parameter", "partition-id"),
    *("ragged-dot", "recv", "reduce", "replica-id", "rng", "rng-bit-generator", "rng-get-and-update-state"),
    *("scaled-dot", "scan", "scatter", "send", "set-dimension-size", "sort", "topk", "triangular-solve"),
    "while",
  }
)


def is_known(op: str) -> bool:
  """Returns whether HLO has an operation, or the operation that it starts or ends asynchronously."""
  return any(op.removesuffix(end) in KNOWN for end in ("", "-start", "-update", "-done"))
