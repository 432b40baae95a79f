"""Sets of HLO operations, for the readers of a program."""

from __future__ import annotations


def _set_of(*names: str) -> frozenset[str]:
  return frozenset(name for several in names for name in several.split())


# Operations whose result is the memory of their operands, and that do not read it.
VIEWS = _set_of("add-dependency after-all bitcast get-tuple-element opt-barrier tuple")
COLLECTIVES = _set_of(
  "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all reduce-scatter"
)
# One FLOP an element, by the compilers' own count.
ARITHMETIC = _set_of(
  "abs add and bitcast-convert ceil clamp compare convert count-leading-zeros divide floor is-finite maximum",
  "minimum multiply negate not or popcnt reduce-precision remainder round-nearest-afz round-nearest-even",
  "select shift-left shift-right-arithmetic shift-right-logical sign subtract xor",
)
_OTHERS = _set_of(
  "async atan2 batch-norm-grad batch-norm-inference batch-norm-training broadcast call cbrt cholesky",
  "complex concatenate conditional constant convolution copy cosine custom-call domain dot dynamic-reshape",
  "dynamic-slice dynamic-update-slice erf exponential exponential-minus-one fft fusion gather",
  "get-dimension-size imag infeed iota log log-plus-one logistic map outfeed pad parameter partition-id",
  "power ragged-dot real recv reduce reduce-window replica-id reshape reverse rng rng-bit-generator",
  "rng-get-and-update-state rsqrt scaled-dot scan scatter select-and-scatter send set-dimension-size sine",
  "slice sort sqrt stochastic-convert tan tanh topk transpose triangular-solve tuple while",
)
KNOWN = VIEWS | COLLECTIVES | ARITHMETIC | _OTHERS
