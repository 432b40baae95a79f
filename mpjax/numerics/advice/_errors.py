"""Findings on the errors of weight gradients against float32, and on products with biased rounding."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mpjax._render.plain_text import percent
from mpjax.numerics._conclusions import Finding
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._seen import SKETCH
from mpjax.numerics._tensors import Tensor

# A larger error against float32 is a problem.
_FAR = {"half": 0.1, "fp8": 0.5}
# A gradient this many binades below others (float32 has 24) is only rounding.
_NOISE = 18
_ROUNDING = 2.0**-22


def far_from_float32(report: NumericsReport) -> float:
  """Returns the error against float32 above which it is a problem under the report's policy."""
  return _FAR["fp8" if report.policy.fp8 else "half"]


def of_weight_gradients(report: NumericsReport, known: bool) -> Iterator[Finding]:
  """Yields a finding on the weight gradients that are only rounding, and one on other large errors.

  Args:
    report: the report.
    known: whether another finding is a problem; it may cause errors here, which then are not reported.
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
      f"{worst.path or worst.name}{more}: its gradient is 0 but for rounding ({noise[worst]}), like the "
      f"gradient of a bias before a norm; its error against float32, {_text(worst.error)}, says nothing",
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
  text += f", which is {percent(part(worst))} of the norm of the whole gradient"
  problem = part(worst) > far_from_float32(report)
  if not problem:
    text += ": little for SGD; but Adam divides each gradient by its own size, and so follows the error"
  yield Finding("gradient error", "problem" if problem else "note", worst.module, text)


def _is_noise(t: Tensor, report: NumericsReport) -> str:
  """Returns a text on the size of a gradient that is only float32's rounding; empty for other gradients."""
  if not t.magnitudes.range:
    return ""
  if len(t.shape) < 2 and t.norm is not None:
    # A sum of random values has the norm of the values. A sum of n values that is 0 but for an offset, as the
    # rounding in a norm leaves it, has sqrt(n) times the rounding.
    terms = [s for s in report.of("activation gradient", t.module) if s.norm]
    if terms:
      most = max(terms, key=lambda s: s.norm or 0.0)
      n = most.magnitudes.count / max(t.magnitudes.count, 1)
      ratio = t.norm / (most.norm or 1.0)
      noise = ratio < max(2.0**-_NOISE, _ROUNDING * math.sqrt(n))
      return f"{ratio:.1g} of the norm of the values that it sums" if noise else ""
  top = t.magnitudes.range[1]
  tops = [g.magnitudes.range[1] for g in report.of("weight gradient") if g.magnitudes.range]
  return f"at most 2^{top + 1} in float32" if top < max(tops) - _NOISE else ""


def _text(error: float | None) -> str:
  return "" if error is None else f"{error:.2g}"


# The least share of an error that is reported as bias, its distance from 0 in standard errors, and the least
# error.
_PART = 0.25
_SURE = 6.0
_LEAST = 2.0**-13


def biases(report: NumericsReport) -> Iterator[Finding]:
  """Yields a finding on the product whose bias is the largest share of its error."""
  products = [
    t for t in report.of("activation") if t.name.startswith(("dot_general", "conv_general_dilated"))
  ]
  found = [(t, *worst) for t in products if (worst := _bias(t))]
  if not found:
    return
  t, what, _ = max(found, key=lambda one: one[2] / (one[0].error or 1.0))
  more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
  name = f"{t.module or 'the function'}: {t.name}{f' ({t.line})' if t.line else ''}"
  text = f"{name}{more}: its rounding is biased: {what}, and its whole error is {t.error:.2g}"
  yield Finding("bias", "note", t.module, f"{text}; errors in one direction add up over layers and steps")


def _bias(t: Tensor) -> tuple[str, float] | None:
  """Returns the bias of a product's result, in words and as a number; `None` if it is not significant."""
  if t.error is None or not math.isfinite(t.error) or t.error < _LEAST or t.bias is None or t.gain is None:
    return None
  # Values of a column may share an error, such as a rounded weight's if inputs have a mean: no evidence.
  columns = t.shape[-1] if t.shape else 1
  limits = (
    max(_PART, _SURE / math.sqrt(columns)) * t.error,
    max(_PART, _SURE * math.sqrt(1 / columns + 2 / SKETCH)) * t.error,
  )
  if abs(t.gain) > limits[1]:
    way = "small" if t.gain < 0 else "large"
    return f"its values are {100 * abs(t.gain):.2g}% too {way} overall", abs(t.gain)
  if abs(t.bias) > limits[0]:
    return f"the mean of its error is {t.bias:+.2g} of the values' rms", abs(t.bias)
  return None
