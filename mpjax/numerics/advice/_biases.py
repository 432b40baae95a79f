"""Findings on products whose error has a direction: what rounding adds up to, rather than averages out."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpjax.numerics._conclusions import Finding
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._summary import SKETCH
from mpjax.numerics._tensors import Tensor

# The part of an error that is a bias worth a word, its standard errors from 0, and the least error.
_PART = 0.25
_SURE = 6.0
_LEAST = 2.0**-13


def biases(report: NumericsReport) -> Iterator[Finding]:
  """Yields a word on the product with the largest bias for its error: mean error, or too small throughout."""
  products = [
    t for t in report.of("activation") if t.name.startswith(("dot_general", "conv_general_dilated"))
  ]
  found = [(t, *worst) for t in products if (worst := _bias(t))]
  if not found:
    return
  t, what, _ = max(found, key=lambda one: one[2] / (one[0].error or 1.0))
  more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
  name = f"{t.module or 'the function'}: {t.name}{f' ({t.line})' if t.line else ''}"
  text = f"{name}{more}: its rounding is biased: {what}, where its whole error is {t.error:.2g}"
  yield Finding("bias", "note", t.module, f"{text}; errors of one direction add up over layers and steps")


def _bias(t: Tensor) -> tuple[str, float] | None:
  """Returns what is biased in a product's result, and by how much; `None` if nothing is for sure."""
  if t.error is None or not math.isfinite(t.error) or t.error < _LEAST or t.bias is None or t.gain is None:
    return None
  # What is common to the values of a column is no evidence: a rounded weight, where inputs have a mean.
  columns = t.shape[-1] if t.shape else 1
  limits = (
    max(_PART, _SURE / math.sqrt(columns)) * t.error,
    max(_PART, _SURE * math.sqrt(1 / columns + 2 / SKETCH)) * t.error,
  )
  if abs(t.gain) > limits[1]:
    way = "small" if t.gain < 0 else "large"
    return f"its values are {100 * abs(t.gain):.2g}% too {way} throughout", abs(t.gain)
  if abs(t.bias) > limits[0]:
    return f"the mean of its error is {t.bias:+.2g} of the values' rms", abs(t.bias)
  return None
