"""Findings on errors: of weight gradients against float32, and of products whose rounding is biased."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpjax._render.plain_text import percent
from mpjax.numerics._conclusions import Finding
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._summary import SKETCH
from mpjax.numerics._tensors import Tensor

# An error against float32 that is a problem.
_FAR = {"half": 0.1, "fp8": 0.5}
# Binades below others where a gradient is what rounding has left of 0, of the 24 that float32 has.
_NOISE = 18
_ROUNDING = 2.0**-22


def far_from_float32(report: NumericsReport) -> float:
  """Returns the error against float32 from which on it is a problem under the report's policy."""
  return _FAR["fp8" if report.policy.fp8 else "half"]


def of_weight_gradients(report: NumericsReport, known: bool) -> Iterator[Finding]:
  """Yields a word on every large error of a weight gradient: the largest that is noise, and that is none.

  Args:
    report: the report.
    known: whether another finding is a problem already, which errors here may come from.
  """
  far = [
    t for t in report.of("weight gradient") if t.error is not None and t.error > far_from_float32(report)
  ]
  noise = {t: text for t in far if (text := _is_noise(t, report))}
  if noise:
    worst = max(noise, key=lambda t: t.error or 0.0)
    more = f" and {len(noise) - 1} more" if len(noise) > 1 else ""
    yield Finding(
      "weight gradient",
      "note",
      worst.module,
      f"{worst.path or worst.name}{more}: its gradient is 0 but for rounding, {noise[worst]}, as that of a "
      f"bias before a norm: its error against float32, {_text(worst.error)}, says nothing",
    )
  whole = math.sqrt(sum((t.norm or 0.0) ** 2 for t in report.of("weight gradient")))
  rest = [t for t in far if t not in noise]
  if not rest or not whole or known:
    return
  part = lambda t: (t.norm or 0.0) * (t.error or 0.0) / whole
  worst = max(rest, key=part)
  more = f" (and {len(rest) - 1} more)" if len(rest) > 1 else ""
  text = (
    f"{worst.path or worst.name}{more}: the error of its gradient against float32 is {_text(worst.error)}"
  )
  text += f", and that error is {percent(part(worst))} of the norm of the whole gradient"
  problem = part(worst) > far_from_float32(report)
  if not problem:
    text += ": little for SGD; Adam, which divides by each gradient's own size, takes it for a direction"
  yield Finding("gradient error", "problem" if problem else "note", worst.module, text)


def _is_noise(t: Tensor, report: NumericsReport) -> str:
  """Returns beside what a gradient is no more than float32's rounding; empty if it is more."""
  if not t.magnitudes.range:
    return ""
  if len(t.shape) < 2 and t.norm is not None:
    # Sums of random values have the norm of the values; sums of n that are 0 but for an offset, as a norm's
    # rounding leaves it, sqrt(n) times the rounding.
    terms = [s for s in report.of("activation gradient", t.module) if s.norm]
    if terms:
      most = max(terms, key=lambda s: s.norm or 0.0)
      n = most.magnitudes.count / max(t.magnitudes.count, 1)
      ratio = t.norm / (most.norm or 1.0)
      noise = ratio < max(2.0**-_NOISE, _ROUNDING * math.sqrt(n))
      return f"{ratio:.1g} of the norm of what it is a sum of" if noise else ""
  top = t.magnitudes.range[1]
  tops = [g.magnitudes.range[1] for g in report.of("weight gradient") if g.magnitudes.range]
  return f"at most 2^{top + 1} in float32" if top < max(tops) - _NOISE else ""


def _text(error: float | None) -> str:
  return "" if error is None else f"{error:.2g}"


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
