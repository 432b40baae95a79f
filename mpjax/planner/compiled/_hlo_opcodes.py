"""Sets of HLO operations, for the readers of a program."""

from __future__ import annotations


def _set_of(*names: str) -> frozenset[str]:
  return frozenset(name for several in names for name in several.split())


# Operations whose result is the memory of their operands, and that do not read it.
VIEWS = _set_of("add-dependency after-all bitcast get-tuple-element opt-barrier tuple")
COLLECTIVES = _set_of(
  "all-gather all-reduce all-to-all collective-broadcast collective-permute ragged-all-to-all reduce-scatter"
)
KNOWN = (VIEWS | COLLECTIVES) | _set_of(
  "abs add and async atan2 batch-norm-grad batch-norm-inference batch-norm-training bitcast-convert",
  "broadcast call cbrt ceil cholesky clamp compare complex concatenate conditional constant convert",
  "convolution copy cosine count-leading-zeros custom-call divide domain dot dynamic-reshape dynamic-slice",
  "dynamic-update-slice erf exponential exponential-minus-one fft floor fusion gather get-dimension-size",
  "imag infeed iota is-finite log log-plus-one logistic map maximum minimum multiply negate not or outfeed",
  "pad parameter partition-id popcnt power ragged-dot real recv reduce reduce-precision reduce-window",
  "remainder replica-id reshape reverse rng rng-bit-generator rng-get-and-update-state round-nearest-afz",
  "round-nearest-even rsqrt scaled-dot scan scatter select select-and-scatter send set-dimension-size",
  "shift-left shift-right-arithmetic shift-right-logical sign sine slice sort sqrt stochastic-convert",
  "subtract tan tanh topk transpose triangular-solve tuple while xor",
)
