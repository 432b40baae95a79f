"""Findings of an inspection: overflows, lost gradients and updates, errors, each with its module."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator

from mpjax._render.plain_text import percent, power_of_two_text
from mpjax.casting._overrides import Overrides
from mpjax.formats import FORMATS
from mpjax.numerics._conclusions import Finding
from mpjax.numerics._report import NumericsReport
from mpjax.numerics._seen import is_half
from mpjax.numerics._tensors import Tensor
from mpjax.numerics.advice._errors import biases, far_from_float32, of_weight_gradients

# An error must grow by this factor for its tensor to count as the origin.
_GROWS = 4.0
# A gradient with a smaller error has not lost what matters, however many small values it lost.
_HARMLESS = 0.05
# The lost values must account for this share of a gradient's error.
_MISSED = 0.25
# A parameter is not training if a larger share of its updates is lost.
_STALLS = 0.5
# A parameter is named if its share of the descent is below this part of the overall share.
_SOME = 0.9
_MAX_EXPONENT = 24
# The binary digits that a difference should keep; the distance between neighbouring angles as a power of two.
_FEW_DIGITS, _FINE_ANGLE = 4, -4


def find(report: NumericsReport) -> tuple[Finding, ...]:
  """Returns the findings: problems first, then in program order."""
  found = [*_nonfinite(report)]
  found += [*_overflows(report), *_gradient_overflows(report), *_underflows(report)]
  found += [*_lost_updates(report), *_errors(report)]
  found += [*_fragile(report)]
  known = any(f.severity == "problem" and f.kind != "lost updates" for f in found)
  found += [*of_weight_gradients(report, known), *biases(report), *_reference(report)]
  # The first finding of each kind for a module says enough.
  first = {(f.kind, f.severity, f.module): f for f in reversed(found)}
  kept = [f for f in found if first[f.kind, f.severity, f.module] is f]
  return tuple(sorted(kept, key=lambda f: f.severity != "problem"))


def _fragile(report: NumericsReport) -> Iterator[Finding]:
  """Yields the digits that differences and angles lose in half precision."""
  dtype = report.policy.compute_dtype
  if dtype.itemsize != 2:
    return
  digits = int(FORMATS[dtype.name].mantissa_bits) + 1
  for t in report.of("activation"):
    if t.fragile == "difference" and t.error is not None and t.error > 2.0**-_FEW_DIGITS:
      kept = max(0.0, -math.log2(t.error)) if t.error else float(digits)
      text = (
        f"{_name(t)}: a difference of products in {dtype.name} keeps {kept:.1f} of their {digits} binary "
      )
      text += f"digits; {percent(1 - kept / digits)} of the digits cancel"
      yield Finding("fragile", "note", t.module, text)
    largest = t.magnitudes.range[1] + 1 if t.fragile == "angle" and t.magnitudes.range else -math.inf
    if largest - digits > _FINE_ANGLE:
      text = f"{_name(t)}: a product in {dtype.name} computes angles of up to 2^{largest}; numbers of that "
      text += f"size are {2.0 ** (largest - digits):.2g} apart, and a period is 6.3"
      yield Finding("fragile", "note", t.module, text)


def overflows(report: NumericsReport) -> list[Tensor]:
  """Returns the activations with float32 values that overflow their dtype."""
  return [
    t
    for t in report.of("activation")
    if is_half(t.dtype)
    and t.magnitudes.shares(t.dtype).overflow > 0
    and not (t.magnitudes.inf + t.magnitudes.nan)
  ]


def products_in(report: NumericsReport) -> Callable[[str], str]:
  """Returns a function from a module path to the dtype of its matrix products under the policy."""
  policy = report.policy
  overrides = Overrides(policy, None)
  scopes = {t.module: t.scope for t in report.tensors}

  def dtype(module: str) -> str:
    half = overrides.half_at(scopes.get(module, module)) if policy.autocast else policy.compute_dtype
    return "float32" if half is None else half.name

  return dtype


def half_products(report: NumericsReport) -> list[tuple[Tensor, str]]:
  """Returns the weight gradients that leave their product in half precision, each with that dtype.

  Under autocast, a product returns the gradients of float32 weights in float32, whose range no loss scale
  leaves. They are left out, unless such a gradient is not finite in the policy's run although all activation
  gradients are finite.
  """
  policy, at = report.policy, products_in(report)
  casts = policy.autocast or policy.compute_dtype.itemsize == 4
  wide = casts and (policy.grad_dtype is None or policy.grad_dtype.itemsize == 4)
  from_finite = not any(t.not_finite for t in report.of("activation gradient"))
  return [
    (t, at(t.module))
    for t in report.of("weight gradient")
    if len(t.shape) > 1 and not (wide and t.dtype == "float32" and not (t.not_finite and from_finite))
  ]


def harmful_underflows(report: NumericsReport, scale: float | None = None) -> list[Tensor]:
  """Returns the activation gradients that lose more than the chosen share and are far from float32's."""
  at = report.loss_scale if scale is None else scale
  lossy = [
    t
    for t in report.of("activation gradient")
    if is_half(t.dtype) and t.magnitudes.underflow(t.dtype, at) > 1 - report.keep
  ]
  # A tensor may lose all its smallest values without harm.
  missed = lambda t: t.magnitudes.lost_norm(t.dtype, at) > _MISSED * min(t.error or 1.0, 1.0)
  return [t for t in lossy if missed(t) and (t.error is None or not t.error <= _HARMLESS)]


def stalled(report: NumericsReport) -> list[Tensor]:
  """Returns the updates that do not change most weights of a parameter, in the parameter's own format."""
  return [t for t in report.of("update") if t.lost_here > _STALLS]


def broken_updates(report: NumericsReport) -> list[Tensor]:
  """Returns the non-finite updates of an optimiser in half precision whose gradients are finite."""
  if report.policy.optimizer_dtype is not None:
    return []
  fine = {t.path for t in report.of("weight gradient") if not t.not_finite}
  return [
    t
    for t in report.of("update")
    if t.path in fine and is_half(t.held) and t.magnitudes.nan + t.magnitudes.inf > 0
  ]


def scale_limits(report: NumericsReport) -> tuple[float | None, float | None]:
  """Returns the least loss scale that keeps the chosen share of gradients in float16, and the largest.

  They are powers of two from 1 to 2**24, with a factor of two to spare below float16's largest number, or
  `None` if no scale fits. Activation gradients decide what is kept; weight gradients that leave their product
  in half precision also decide what overflows. Under a policy that computes in float16, modules in another
  format do not count.
  """
  own, at = report.policy.compute_dtype.name, products_in(report)
  counts = lambda t: own != "float16" or at(t.module) == "float16"
  tensors = [t for t in report.of("activation gradient") if t.magnitudes.range is not None and counts(t)]
  products = [t for t, _ in half_products(report) if counts(t)]
  added = lambda found: functools.reduce(operator.add, [t.magnitudes for t in found]) if found else None
  gradients, everything = added(tensors), added([*tensors, *products])
  low = high = None
  for exponent in range(_MAX_EXPONENT + 1):
    scale = 2.0**exponent
    if everything and everything.shares("float16", 2 * scale).overflow:
      break
    high = scale
    if low is None and (not gradients or gradients.kept("float16", scale) >= report.keep):
      low = scale
  return low, high


def error_grows(report: NumericsReport, kind: str) -> Tensor | None:
  """Returns the first tensor of a kind, in execution order, whose error is a problem."""
  limit = far_from_float32(report)
  tensors = [t for t in report.of(kind) if t.error is not None and not math.isnan(t.error)]
  if kind == "activation gradient":
    tensors.reverse()
  before = 0.0
  for tensor in tensors:
    assert tensor.error is not None
    if tensor.error > limit and tensor.error > _GROWS * before:
      return tensor
    before = max(before, tensor.error)
  return None


def _nonfinite(report: NumericsReport) -> Iterator[Finding]:
  if report.reference_loss is None:
    return
  # A parameter that is not finite comes before all that reads it.
  ordered = [*report.of("parameter"), *(t for t in report.tensors if t.kind != "update")]
  bad = [t for t in ordered if t.magnitudes.nan + t.magnitudes.inf > 0]
  where, what = "", f"the loss is {report.reference_loss}"
  if bad:
    where, what = bad[0].module, f"{_name(bad[0])} has NaN or infinity"
  if bad and bad[0].kind == "parameter" and is_half(bad[0].dtype):
    text = (
      f"{what}: the largest {bad[0].dtype} is {FORMATS[bad[0].dtype].max:g}; start again with "
      "param_dtype: float32"
    )
    yield Finding("nonfinite", "problem", where, text)
  elif bad or not math.isfinite(report.reference_loss):
    text = f"{what} in float32, too, so no policy helps: find the cause with mpjax.find_nonfinite, lower the "
    yield Finding("nonfinite", "problem", where, f"{text}learning rate, or check the data")


def _overflows(report: NumericsReport) -> Iterator[Finding]:
  culprits = overflows(report)
  for t in culprits:
    largest = t.magnitudes.range
    top = f"up to 2^{largest[1] + 1}" if largest else "infinite"
    share = t.magnitudes.shares(t.dtype).overflow
    yield Finding(
      "overflow",
      "problem",
      t.module,
      f"{_name(t)} has values {top}, but the largest {t.dtype} is {FORMATS[t.dtype].max:g}: "
      f"{percent(share)} overflow",
    )
  if culprits or report.reference_loss is None:
    return
  broken = [t for t in report.of("activation") if t.not_finite and not t.magnitudes.nan + t.magnitudes.inf]
  if broken:
    t = broken[0]
    yield Finding(
      "overflow",
      "problem",
      t.module,
      f"{_name(t)} is the first value that is not finite under the policy; it is finite in float32, so "
      "something inside the module overflows",
    )
  elif math.isfinite(report.reference_loss) and not math.isfinite(report.loss):
    text = f"the loss is {report.loss} under the policy and {report.reference_loss:.6g} in float32: its "
    text += "computation from the model's outputs overflows; find the operation with mpjax.find_nonfinite"
    yield Finding("overflow", "problem", "", text)


def _gradient_overflows(report: NumericsReport) -> Iterator[Finding]:
  if overflows(report):
    return
  scale = report.loss_scale
  # A gradient that is finite in the policy's own run, in the dtype in which it is read, did not overflow.
  gradients = report.of("activation gradient")
  pairs = [(t, t.dtype) for t in gradients if t.not_finite or t.held == "float32" != t.dtype]
  pairs += half_products(report)
  over = {
    t: dtype
    for t, dtype in pairs
    if is_half(dtype)
    and t.magnitudes.shares(dtype, scale).overflow > 0
    and not t.magnitudes.inf + t.magnitudes.nan
  }
  if not over:
    return
  _, high = scale_limits(report)
  scaling = report.policy.loss_scaling
  dynamic = scaling is not None and scaling.kind == "dynamic"
  skipped = any(t.not_finite for t in report.of("weight gradient"))
  largest = max(over, key=lambda t: t.magnitudes.range[1] if t.magnitudes.range else 0)
  for t in [largest] if high else over:
    text = f"{_name(t)}: its gradient times the loss scale of {power_of_two_text(scale)} overflows {over[t]}"
    if dynamic and high and skipped:
      text += f"; the scale will fall towards {power_of_two_text(high)}, and each fall skips a step"
    severity = "note" if dynamic and high else "problem"
    yield Finding("gradient overflow", severity, t.module, text)


def _underflows(report: NumericsReport) -> Iterator[Finding]:
  low, high = scale_limits(report)
  harmful = harmful_underflows(report)
  for t in harmful:
    lost = t.magnitudes.underflow(t.dtype, report.loss_scale)
    error = "" if t.error is None else f"; its error against float32 is {t.error:.2g}"
    yield Finding(
      "underflow",
      "problem",
      t.module,
      f"{_name(t)}: {percent(lost)} of its gradient's values underflow to zero in {t.dtype} at loss scale "
      f"{power_of_two_text(report.loss_scale)}{error}",
    )
  kinds = [t for t in report.of("activation gradient") if t.magnitudes.range is not None]
  # A run only in float16 does not show what it lost, and values that are not finite do not have a range.
  blind = report.reference_loss is None and report.policy.compute_dtype.name == "float16"
  if not kinds or blind or any(t.magnitudes.nan + t.magnitudes.inf for t in kinds):
    return
  at_one, now = (
    report.lost("activation gradient", "float16"),
    report.lost("activation gradient", "float16", report.loss_scale),
  )
  keep = percent(report.keep)
  text = f"{percent(at_one)} of the nonzero activation gradients underflow to zero in float16 at loss scale 1"
  if report.loss_scale != 1:
    text += f", {percent(now)} at {power_of_two_text(report.loss_scale)}"
  if low and high:
    run = power_of_two_text(report.loss_scale)
    # The run's scale is above the advised one if the largest gradient has less than a factor of two left.
    near = high < report.loss_scale <= 2 * high and not any(_gradient_overflows(report))
    scales = f"{power_of_two_text(low)} to {run if near else power_of_two_text(high)}"
    text += f"; loss scales from {scales} keep {keep} of them without an overflow"
    if near:
      text += f"; at the run's {run} the largest gradient is less than a factor of two below an overflow"
    elif report.loss_scale < low and not harmful and report.policy.compute_dtype.name == "float16":
      text += (
        f"; at the run's {run} the lost values are a small part of each gradient's norm, or of its error"
      )
  elif high:
    text += f"; no loss scale keeps {keep} of them: the largest without an overflow is "
    text += power_of_two_text(high)
  else:
    text += "; every loss scale from 1 up overflows"
  yield Finding("range", "note", "", text)


def _lost_updates(report: NumericsReport) -> Iterator[Finding]:
  worst = stalled(report)
  broken = broken_updates(report)
  if broken:
    t = broken[0]
    yield Finding(
      "lost updates",
      "problem",
      t.path,
      f"{t.path}: its update is not finite although its gradient is: the optimiser computes in {t.dtype}, "
      "where the term against a division by zero (Adam's eps) may be zero",
    )
  for t in worst:
    yield Finding(
      "lost updates",
      "problem",
      t.path or t.module,
      f"{t.path}: {percent(t.lost_here)} of its updates do not change the weight ({t.dtype}); a float32 "
      "master copy takes all of them",
    )
  lost = report.lost_updates()
  yield from _descent(report)
  if worst or not lost:
    return
  here = [t for t in report.of("update") if t.moved]
  held = sorted({_weights(t) for t in here})
  yield Finding(
    "lost updates",
    "note",
    "",
    f"bfloat16 weights would lose {percent(lost['bfloat16'])} of this step's updates, with int8 corrections "
    f"{percent(lost['int8'])}, with int16 corrections {percent(lost['int16'])}, with stochastic rounding 0 "
    f"on average; float16 weights {percent(lost['float16'])}; the weights here are {', '.join(held)}",
  )


def _descent(report: NumericsReport) -> Iterator[Finding]:
  """Yields the share of the updates' intended descent that the weights make."""
  here, half = report.descent_quality, report.descent_quality_in("bfloat16")
  if here is None or half is None:
    return
  moving = [t for t in report.of("update") if t.norm and t.descent]
  worst = min(moving, key=lambda t: t.descent_here)
  text = f"the weights make {_share(here)} of the descent that this step's updates intend"
  if worst.descent_here < _SOME * here:
    text += f" ({worst.path} {_share(worst.descent_here)})"
  if any(_weights(t) != "bfloat16" for t in moving):
    text += f", bfloat16 weights would make {_share(half)}"
  yield Finding("descent", "note", "", text)


def _share(part: float) -> str:
  return f"{100 * part:.4g}%"


def _weights(t: Tensor) -> str:
  """Returns the format of a weight in words: `bfloat16 with int8 corrections`."""
  if t.held == t.dtype:
    return t.dtype
  return (
    f"{t.dtype}, rounded stochastically" if t.held == "stochastic" else f"{t.dtype} with {t.held} corrections"
  )


def _errors(report: NumericsReport) -> Iterator[Finding]:
  """Yields the origin of errors, unless an earlier finding explains them."""
  yet = [t.order for t in overflows(report)]
  forward = error_grows(report, "activation")
  if forward is not None and not any(order <= forward.order for order in yet):
    yield _error(forward, "error", "value")
  known = any(f.severity == "problem" for f in _gradient_overflows(report))
  if yet or forward is not None or known:
    return
  backward = error_grows(report, "activation gradient")
  if backward is not None and not any(t.order >= backward.order for t in harmful_underflows(report)):
    yield _error(backward, "gradient error", "gradient")


def _error(t: Tensor, kind: str, word: str) -> Finding:
  text = f"{_name(t)}: its {word} is the first with a large error against float32, {t.error:.2g}"
  return Finding(kind, "problem", t.module, text)


def _reference(report: NumericsReport) -> Iterator[Finding]:
  places = report.narrow_reference
  if places:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    yield Finding(
      "reference",
      "note",
      "",
      f"in the float32 run, too, the model computes {places[0]}{more}, by casts of its own or because it "
      "does not accept float32. Errors there are unknown, and no policy changes them. Remove the casts, or "
      "pass a step without them as reference=",
    )


def _name(t: Tensor) -> str:
  where = f" ({t.line})" if t.line else ""
  return f"{t.module or 'the function'}: {t.name}{where}"
