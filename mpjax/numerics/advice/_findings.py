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
from mpjax.numerics._tensors import Tensor, is_half
from mpjax.numerics.advice._errors import biases, far_from_float32, of_weight_gradients

# How much an error has to grow to be the one that began it.
_GROWS = 4.0
# A gradient whose error is smaller has not lost what matters, however many small values it lost.
_HARMLESS = 0.05
# Of such an error, the part that what was lost has to account for.
_MISSED = 0.25
# An optimiser that leaves so many weights as they are is not training.
_STALLS = 0.5
# A parameter that makes less of its descent than this part of what all make is named.
_SOME = 0.9
_MAX_EXPONENT = 24
# Binary digits that a difference should keep; the distance of neighbouring angles, as a power of two.
_FEW_DIGITS, _FINE_ANGLE = 4, -4


def find(report: NumericsReport) -> tuple[Finding, ...]:
  """Findings, problems first, then in the order of the program."""
  found = [*_nonfinite(report), *_scale_dependent(report)]
  found += [*_overflows(report), *_gradient_overflows(report), *_underflows(report)]
  found += [*_lost_updates(report), *_stored(report), *_errors(report)]
  found += [*_fragile(report)]
  known = any(f.severity == "problem" and f.kind != "lost updates" for f in found)
  found += [*of_weight_gradients(report, known), *biases(report), *_reference(report)]
  # Of a module the first of a kind says it all.
  first = {(f.kind, f.severity, f.module): f for f in reversed(found)}
  kept = [f for f in found if first[f.kind, f.severity, f.module] is f]
  return tuple(sorted(kept, key=lambda f: f.severity != "problem"))


def _fragile(report: NumericsReport) -> Iterator[Finding]:
  """Yields what half precision takes away of differences and angles, and what it may of loops and orders."""
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
      text += f"digits; {percent(1 - kept / digits)} of them cancel"
      yield Finding("fragile", "note", t.module, text)
    largest = t.magnitudes.range[1] + 1 if t.fragile == "angle" and t.magnitudes.range else -math.inf
    if largest - digits > _FINE_ANGLE:
      text = f"{_name(t)}: angles of up to 2^{largest} that a product in {dtype.name} makes; numbers of that "
      text += f"size are {2.0 ** (largest - digits):.2g} apart, a period is 6.3"
      yield Finding("fragile", "note", t.module, text)
  for found in report.fragile:
    yield Finding("fragile", "note", found.path, f"{found.primitive} ({found.line}): {found.why}")


def overflows(report: NumericsReport) -> list[Tensor]:
  """Returns the activations with values in float32 that the dtype they are held in does not have."""
  return [
    t
    for t in report.of("activation")
    if is_half(t.dtype)
    and t.magnitudes.shares(t.dtype).overflow > 0
    and not (t.magnitudes.inf + t.magnitudes.nan)
  ]


def products_in(report: NumericsReport) -> Callable[[str], str]:
  """Returns the dtype that a module's matrix products are in under the policy, by module path."""
  policy = report.policy
  overrides = Overrides(policy, None)
  scopes = {t.module: t.scope for t in report.tensors}

  def dtype(module: str) -> str:
    half = overrides.half_at(scopes.get(module, module)) if policy.autocast else policy.compute_dtype
    return "float32" if half is None else half.name

  return dtype


def half_products(report: NumericsReport) -> list[tuple[Tensor, str]]:
  """Returns the weight gradients that leave their product in half precision, each with the dtype of that.

  Under autocast the gradients of float32 weights are float32 from the product on, whose range no loss scale
  leaves; but for one that is not finite in the policy's own run, where all that it is made of is.
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
  """Returns the gradients of activations that lose more than the chosen share and are far from float32's."""
  at = report.loss_scale if scale is None else scale
  lossy = [
    t
    for t in report.of("activation gradient")
    if is_half(t.dtype) and t.magnitudes.underflow(t.dtype, at) > 1 - report.keep
  ]
  # The smallest values of a tensor may all be lost and not be missed.
  missed = lambda t: t.magnitudes.lost_norm(t.dtype, at) > _MISSED * min(t.error or 1.0, 1.0)
  return [t for t in lossy if missed(t) and (t.error is None or not t.error <= _HARMLESS)]


def stalled(report: NumericsReport) -> list[Tensor]:
  """Returns the updates that leave most weights of a parameter as they are, in the dtype it is kept in."""
  return [t for t in report.of("update") if t.lost_here > _STALLS]


def broken_updates(report: NumericsReport) -> list[Tensor]:
  """Returns the updates that are not finite, of an optimiser in half precision whose gradients are."""
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

  Powers of two from 1 to 2**24, with a factor of two to spare below float16's largest number; `None` if no
  scale does. What is kept counts for the gradients of activations; what overflows also for those of weights
  that leave their product in half precision. Under a policy that computes in float16 the modules that it
  leaves in another format do not count.
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
  """Returns the first tensor of a kind, in the order of computation, whose error is a problem."""
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
  # A parameter that is not finite comes before whatever reads it.
  ordered = [*report.of("parameter"), *(t for t in report.tensors if t.kind != "update")]
  bad = [t for t in ordered if t.magnitudes.nan + t.magnitudes.inf > 0]
  where, what = "", f"the loss is {report.reference_loss}"
  if bad:
    where, what = bad[0].module, f"{_name(bad[0])} has NaN or infinity"
  if bad and bad[0].kind == "parameter" and is_half(bad[0].dtype):
    text = (
      f"{what}: {bad[0].dtype} ends at {FORMATS[bad[0].dtype].max:g}; start again from param_dtype: float32"
    )
    yield Finding("nonfinite", "problem", where, text)
  elif bad or not math.isfinite(report.reference_loss):
    text = f"{what} in float32 as well: no policy mends that; see mpjax.find_nonfinite, a lower learning "
    yield Finding("nonfinite", "problem", where, f"{text}rate, or the data")


def _scale_dependent(report: NumericsReport) -> Iterator[Finding]:
  """Yields the gradients that depend on the loss scale, all in one."""
  if not report.scale_dependent:
    return
  first, *others = report.scale_dependent
  more = f" (and that of {len(others)} more)" if others else ""
  norms = " and ".join(
    f"{norm:.3g} at a loss scale of {power_of_two_text(scale)}"
    for norm, scale in zip(first.norms, first.scales, strict=True)
  )
  text = (
    f"{first.path}: its gradient{more} depends on the loss scale, in float32, too: its norm is {norms}. A "
  )
  text += "backward rule on the way to it is not linear, such as a custom_vjp that clips cotangents, and is "
  text += (
    "given scaled ones. mpjax.full_precision does not help; divide them by the loss scale inside the rule "
  )
  text += "and multiply what it returns, or use bf16 without a loss scale"
  yield Finding("loss scale", "problem", first.path, text)


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
      f"{_name(t)} has values {top}, and {t.dtype} ends at {FORMATS[t.dtype].max:g}: {percent(share)} "
      "overflow",
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
      f"{_name(t)} is the first that is not finite under the policy, and is finite in float32: something "
      "inside that module overflows",
    )
  elif math.isfinite(report.reference_loss) and not math.isfinite(report.loss):
    text = f"the loss is {report.loss} under the policy and {report.reference_loss:.6g} in float32: what "
    text += "computes it from the model's results overflows; see mpjax.find_nonfinite"
    yield Finding("overflow", "problem", "", text)


def _gradient_overflows(report: NumericsReport) -> Iterator[Finding]:
  if overflows(report):
    return
  scale = report.loss_scale
  # What the policy's own run kept finite, in the dtype in which it is read, did not overflow.
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
      text += f"; the scale will fall towards {power_of_two_text(high)}, and each fall costs a step"
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
      f"{_name(t)}: {t.dtype} loses {percent(lost)} of its gradient's values at loss scale "
      f"{power_of_two_text(report.loss_scale)}{error}",
    )
  kinds = [t for t in report.of("activation gradient") if t.magnitudes.range is not None]
  # A run in float16 alone has no record of what it lost, and no range is right for what is not finite.
  blind = report.reference_loss is None and report.policy.compute_dtype.name == "float16"
  if not kinds or blind or any(t.magnitudes.nan + t.magnitudes.inf for t in kinds):
    return
  at_one, now = (
    report.lost("activation gradient", "float16"),
    report.lost("activation gradient", "float16", report.loss_scale),
  )
  keep = percent(report.keep)
  text = f"float16 loses {percent(at_one)} of the activations' gradients that are not 0 at loss scale 1"
  if report.loss_scale != 1:
    text += f", {percent(now)} at {power_of_two_text(report.loss_scale)}"
  if low and high:
    run = power_of_two_text(report.loss_scale)
    # The run's own is above what is advised where the largest gradient has less than a factor of two left.
    near = high < report.loss_scale <= 2 * high and not any(_gradient_overflows(report))
    scales = f"{power_of_two_text(low)} to {run if near else power_of_two_text(high)}"
    text += f"; loss scales from {scales} keep {keep} of them and overflow none"
    if near:
      text += f"; the run's {run} leaves the largest gradient less than a factor of two"
    elif report.loss_scale < low and not harmful and report.policy.compute_dtype.name == "float16":
      text += f"; what the run's {run} loses is a small part of each gradient's norm, or of its error"
  elif high:
    text += f"; none keeps {keep} of them: the largest that does not overflow is {power_of_two_text(high)}"
  else:
    text += "; every loss scale from 1 on overflows"
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
      f"{t.path}: its update is not finite though the gradients are: the optimiser computes in {t.dtype}, "
      "where what keeps it from dividing by zero (Adam's eps) may be zero itself",
    )
  for t in worst:
    way_out = (
      "a float32 master copy takes them all" if t.held == t.dtype else "master_weights: int16 takes them"
    )
    yield Finding(
      "lost updates",
      "problem",
      t.path or t.module,
      f"{t.path}: {percent(t.lost_here)} of its updates leave the {_weights(t)} weight as it is; {way_out}",
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
    f"{percent(lost['int8'])}, with int16 {percent(lost['int16'])}, rounded stochastically none on average; "
    f"float16 weights {percent(lost['float16'])}; they are kept in {', '.join(held)}",
  )


def _descent(report: NumericsReport) -> Iterator[Finding]:
  """Yields how much of the descent that the updates intend the weights make."""
  here, half = report.descent_quality, report.descent_quality_in("bfloat16")
  if here is None or half is None:
    return
  moving = [t for t in report.of("update") if t.norm and t.descent]
  worst = min(moving, key=lambda t: t.descent_here)
  text = f"weights as they are kept make {_share(here)} of the descent that this step's updates intend"
  if worst.descent_here < _SOME * here:
    text += f" ({worst.path} {_share(worst.descent_here)})"
  if any(_weights(t) != "bfloat16" for t in moving):
    text += f", bfloat16 weights would make {_share(half)}"
  yield Finding("descent", "note", "", text)


def _share(part: float) -> str:
  return f"{100 * part:.4g}%"


def _weights(t: Tensor) -> str:
  """Returns what a weight is held in: `bfloat16 with int8 corrections`."""
  if t.held == t.dtype:
    return t.dtype
  return (
    f"{t.dtype}, rounded stochastically" if t.held == "stochastic" else f"{t.dtype} with {t.held} corrections"
  )


def _stored(report: NumericsReport) -> Iterator[Finding]:
  """Yields the slots of an optimiser's state with scales that are not finite, which no later step mends."""
  for slot in report.stored:
    if slot.not_finite:
      yield Finding(
        "stored state",
        "problem",
        slot.slot,
        f"{slot.slot}: {percent(slot.not_finite)} of its {slot.dtype} groups have a scale that is not "
        "finite, and stay so; skip steps whose gradients are not finite (skip_nonfinite, or loss_scaling)",
      )


def _errors(report: NumericsReport) -> Iterator[Finding]:
  """Yields where errors begin, unless what comes before accounts for them."""
  yet = [t.order for t in overflows(report)]
  forward = error_grows(report, "activation")
  if forward is not None and not any(order <= forward.order for order in yet):
    yield _error(forward, "error", "value")
  known = report.scale_dependent or any(f.severity == "problem" for f in _gradient_overflows(report))
  if yet or forward is not None or known:
    return
  backward = error_grows(report, "activation gradient")
  if backward is not None and not any(t.order >= backward.order for t in harmful_underflows(report)):
    yield _error(backward, "gradient error", "gradient")


def _error(t: Tensor, kind: str, word: str) -> Finding:
  text = f"{_name(t)}: the error of its {word} against float32 grows to {t.error:.2g}, the first on the way"
  return Finding(kind, "problem", t.module, text)


def _reference(report: NumericsReport) -> Iterator[Finding]:
  places = report.narrow_reference
  if places:
    more = f" and {len(places) - 1} more" if len(places) > 1 else ""
    yield Finding(
      "reference",
      "note",
      "",
      f"the model computes {places[0]}{more} in the float32 run as well, by casts of its own or since it "
      "takes no float32: errors there are not known, and no policy changes them; take the casts out, or pass "
      "reference= a step without them",
    )


def _name(t: Tensor) -> str:
  where = f" ({t.line})" if t.line else ""
  return f"{t.module or 'the function'}: {t.name}{where}"
