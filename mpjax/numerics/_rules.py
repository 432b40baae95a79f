"""The rules of the findings: what each looks for, from where on it counts, and what it says."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

from mpjax._render.plain_text import percent, power_of_two_text
from mpjax.formats import FORMATS
from mpjax.numerics._loss_scales import half_products, scale_limits
from mpjax.numerics._report import Finding, NumericsReport
from mpjax.numerics._seen import is_half
from mpjax.numerics._tensors import Tensor

# A larger error against float32 is a problem: 26 roundings to bfloat16 (2^-8), 8 to E4M3 (2^-4).
_FAR = {"half": 0.1, "fp8": 0.5}
# A gradient this much smaller than others (float32 has 24 binary digits) is only rounding.
_NOISE, _ROUNDING = 2.0**-18, 2.0**-22

# A tensor, or `None` for the step, and what is said of it.
Said = tuple[Tensor | None, str]


@dataclasses.dataclass(eq=False)
class Rule:
  """A rule of the findings: decorates a function of a `Look` that yields what is `Said`.

  The thresholds of a rule are the defaults of its function's other arguments.

  Attributes:
    kind: kind of the findings.
    severity: their severity, or a function from the look and the tensor to it.
    unless: rules that explain the findings if they find anything.
    unless_before: rules that explain a finding if a problem of theirs comes before: earlier in the forward
      pass, or for gradients in the backward pass.
  """

  # The order of the rows is that of the findings on the whole step, and of several on one tensor.
  rows: ClassVar[list[Rule]] = []

  kind: str
  severity: str | Callable[[Look, Any], str]
  unless: Sequence[Rule] = ()
  unless_before: Sequence[Rule] = ()

  def __call__(self, find: Callable[..., Iterator[Said]]) -> Rule:
    self._find = find
    self.rows.append(self)
    return self

  def findings(self, look: Look) -> Iterator[Finding]:
    """Yields what the rule finds and no other rule explains."""
    if look.found(*self.unless):
      return
    earlier = [finding.order for finding in look.problems(*self.unless_before)]
    for t, text in self._find(look):
      severity = self.severity if isinstance(self.severity, str) else self.severity(look, t)
      if t is None:
        yield Finding(self.kind, severity, "", text)
      elif not any(order >= t.order if "gradient" in t.kind else order <= t.order for order in earlier):
        module = t.path if t.kind == "update" and t.path else t.module
        # A parameter that is not finite comes before all that reads it.
        order = -1 if t.kind == "parameter" else t.order
        yield Finding(self.kind, severity, module, text, t.path or t.name, order)


class Look:
  """What the rules find in a report.

  Attributes:
    report: the report.
    far: the error against float32 that is a problem.
    scales: the least and the largest good loss scale; see `scale_limits`.
  """

  def __init__(self, report: NumericsReport):
    self.report = report
    self.far = _FAR["fp8" if report.policy.fp8 else "half"]
    self.scales = scale_limits(report)
    self._of = functools.cache(lambda rule: tuple(rule.findings(self)))

  def found(self, *rules: Rule) -> list[Finding]:
    """Returns the findings of some rules."""
    return [finding for rule in rules for finding in self._of(rule)]

  def problems(self, *rules: Rule) -> list[Finding]:
    """Returns the findings of some rules that are problems."""
    return [finding for finding in self.found(*rules) if finding.severity == "problem"]

  def findings(self) -> tuple[Finding, ...]:
    """Returns all findings: problems first, then in the order of the program."""
    every = sorted(self.found(*Rule.rows), key=lambda finding: (finding.severity != "problem", finding.order))
    # The first of each kind for a module says enough.
    first: dict[Any, Finding] = {}
    for finding in every:
      first.setdefault((finding.kind, finding.severity, finding.module), finding)
    return tuple(first.values())


@Rule("nonfinite", "problem")
def nonfinite(look: Look) -> Iterator[Said]:
  """Finds what is not finite in float32: the first tensor, or the loss alone."""
  loss, report = look.report.reference_loss, look.report
  ordered = [*report.of("parameter"), *(t for t in report.tensors if t.kind != "update")]
  t = next((t for t in ordered if not _is_finite(t)), None)
  if loss is None or (t is None and math.isfinite(loss)):
    return
  what = f"the loss is {loss}" if t is None else f"{_name(t)} has NaN or infinity"
  if t is not None and t.kind == "parameter" and is_half(t.dtype):
    yield t, f"{what}: the largest {t.dtype} is {_largest(t)}; start again with param_dtype: float32"
  else:
    help_ = "find the cause with mpjax.find_nonfinite, lower the learning rate, or check the data"
    yield t, f"{what} in float32, too, so no policy helps: {help_}"


@Rule("overflow", "problem")
def overflow(look: Look) -> Iterator[Said]:
  """Finds activations with float32 values that overflow their dtype."""
  for t in look.report.of("activation"):
    share = t.magnitudes.shares(t.dtype).overflow if is_half(t.dtype) and _is_finite(t) else 0.0
    if share:
      largest = f"the largest {t.dtype} is {_largest(t)}"
      yield t, f"{_name(t)} has values up to {_top(t)}, but {largest}: {percent(share)} overflow"


@Rule("overflow", "problem", unless=[overflow])
def hidden_overflow(look: Look) -> Iterator[Said]:
  """Finds the first activation that is finite in float32 alone, or else such a loss."""
  wide, loss = look.report.reference_loss, look.report.loss
  t = next((t for t in look.report.of("activation") if t.not_finite and _is_finite(t)), None)
  if t is not None:
    yield t, f"{_name(t)} is finite only in float32: something inside the module overflows"
  elif wide is not None and math.isfinite(wide) and not math.isfinite(loss):
    what = f"the loss is {loss} under the policy and {wide:.6g} in float32"
    yield None, f"{what}: what computes it from the model's outputs overflows; mpjax.find_nonfinite finds it"


def _will_fall(look: Look) -> bool:
  """Returns whether a loss scale that is too large falls to one that fits."""
  scaling = look.report.policy.loss_scaling
  return scaling is not None and scaling.kind == "dynamic" and look.scales[1] is not None


@Rule("gradient overflow", lambda look, t: "note" if _will_fall(look) else "problem", unless=[overflow])
def gradient_overflow(look: Look) -> Iterator[Said]:
  """Finds gradients that overflow at the loss scale: the largest, or all if no scale fits them."""
  # A gradient that is finite in the policy's own run, in the dtype in which it is read, did not overflow.
  gradients, (_, high) = look.report.of("activation gradient"), look.scales
  pairs = [(t, t.dtype) for t in gradients if t.not_finite or t.held == "float32" != t.dtype]
  over = [
    (t, dtype)
    for t, dtype in [*pairs, *half_products(look.report)]
    if is_half(dtype) and _is_finite(t) and t.magnitudes.shares(dtype, look.report.loss_scale).overflow > 0
  ]
  falls = ""
  if high and _will_fall(look) and any(t.not_finite for t in look.report.of("weight gradient")):
    falls = f"; the scale will fall towards {power_of_two_text(high)}, and each fall skips a step"
  for t, dtype in sorted(over, key=lambda pair: -_binade(pair[0]))[: 1 if high else None]:
    yield t, f"{_name(t)}: its gradient times the loss scale of {_scale(look)} overflows {dtype}{falls}"


# A gradient with half of the error that is a problem has not lost what matters, however many small values it
# lost; what is lost must account for a quarter of the error.
@Rule("underflow", "problem")
def underflow(look: Look, harmless: float = 0.05, missed: float = 0.25) -> Iterator[Said]:
  """Finds activation gradients that lose more than the chosen share, and so are far from float32's."""
  scale = look.report.loss_scale
  for t in look.report.of("activation gradient"):
    error = 1.0 if t.error is None else t.error
    lost = t.magnitudes.underflow(t.dtype, scale) if is_half(t.dtype) and error > harmless else 0.0
    if lost > 1 - look.report.keep and t.magnitudes.lost_norm(t.dtype, scale) > missed * min(error, 1.0):
      at = f"underflow to zero in {t.dtype} at loss scale {_scale(look)}"
      error_is = f"its error against float32 is {_error(t)}"
      yield t, f"{_name(t)}: {percent(lost)} of its gradient's values {at}; {error_is}"


@Rule("range", "note")
def scales_in_range(look: Look) -> Iterator[Said]:
  """Says what float16 loses of the activation gradients, and which loss scales are good."""
  report, (low, high) = look.report, look.scales
  kinds = [t for t in report.of("activation gradient") if t.magnitudes.range is not None]
  in_float16 = report.policy.compute_dtype.name == "float16"
  # A run only in float16 does not show what it lost, and values that are not finite do not have a range.
  if not kinds or (report.reference_loss is None and in_float16) or not all(map(_is_finite, kinds)):
    return
  scale, keep = report.loss_scale, f"keep {percent(report.keep)} of them"
  lost = lambda scale: percent(report.lost("activation gradient", "float16", scale))
  if low and high:
    # The run's scale is above the advised one if the largest gradient has less than a factor of two left.
    near = high < scale <= 2 * high and not look.found(gradient_overflow)
    most = power_of_two_text(scale if near else high)
    good = f"loss scales from {power_of_two_text(low)} to {most} {keep} without an overflow"
  elif high:
    good = f"the largest without an overflow, {power_of_two_text(high)}, does not {keep}"
  else:
    good = "every loss scale from 1 up overflows"
  text = f"{lost(1.0)} of the nonzero activation gradients underflow to zero in float16 at loss scale 1"
  yield None, f"{text}{f', {lost(scale)} at {_scale(look)}' if scale != 1 else ''}; {good}"


@Rule("lost updates", "problem")
def broken_update(look: Look) -> Iterator[Said]:
  """Finds the first non-finite update of an optimiser in half precision whose gradient is finite."""
  fine = {t.path for t in look.report.of("weight gradient") if not t.not_finite}
  broken = [t for t in look.report.of("update") if t.path in fine and is_half(t.held) and not _is_finite(t)]
  for t in broken[:1] if look.report.policy.optimizer_dtype is None else ():
    why = f"the optimiser computes in {t.dtype}, where the term against a division by zero (eps) may be zero"
    yield t, f"{t.path}: its update is not finite although its gradient is: {why}"


@Rule("lost updates", "problem")  # a weight that most updates leave as it is does not train
def lost_updates(look: Look, stalls: float = 0.5) -> Iterator[Said]:
  """Finds parameters that lose most of their updates in their own format."""
  for t in look.report.of("update"):
    if t.lost_here > stalls:
      lost = f"{percent(t.lost_here)} of its updates do not change the weight ({t.dtype})"
      yield t, f"{t.path}: {lost}; a float32 master copy takes all of them"


@Rule("lost updates", "note", unless=[lost_updates])
def updates_by_format(look: Look) -> Iterator[Said]:
  """Says what weights of each format would lose of the step's updates."""
  lost = {name: percent(share) for name, share in look.report.lost_updates().items()}
  if lost:
    held = ", ".join(sorted({_weights(t) for t in look.report.of("update") if t.moved}))
    corrected = f"with int8 corrections {lost['int8']}, with int16 corrections {lost['int16']}"
    text = f"bfloat16 weights would lose {lost['bfloat16']} of this step's updates, {corrected}"
    yield None, f"{text}; float16 weights {lost['float16']}; the weights here are {held}"


@Rule("error", "problem", unless_before=[overflow])  # 4 times that of all before is the origin
def error(look: Look, grows: float = 4.0) -> Iterator[Said]:
  """Finds the activation at which the error grows large."""
  for t in _growth(look.report.of("activation"), look.far, grows):
    yield t, f"{_name(t)}: its value is the first with a large error against float32, {_error(t)}"


_EXPLAIN_GRADIENTS = [overflow, error, gradient_overflow]


@Rule("gradient error", "problem", unless=_EXPLAIN_GRADIENTS, unless_before=[underflow])
def gradient_error(look: Look, grows: float = 4.0) -> Iterator[Said]:
  """Finds the activation gradient at which the error grows large, on the way back."""
  for t in _growth(look.report.of("activation gradient")[::-1], look.far, grows):
    text = f"{_name(t)}: its gradient is the first with a large error against float32, {_error(t)}"
    yield t, text + _check(look)


def _growth(tensors: Sequence[Tensor], far: float, grows: float) -> Iterator[Tensor]:
  """Yields the first tensor with an error above `far` that is `grows` times any before."""
  before = 0.0
  for t in tensors:
    if t.error is not None and t.error > max(far, grows * before):
      yield t
      return
    before = max(before, t.error or 0.0)


def _check(look: Look) -> str:
  call = "mpjax.loss_scale.check_loss_scaling(step, state, batch)"
  return f"; {call} says whether a backward rule is not linear" if look.report.loss_scale != 1 else ""


# Half of bfloat16's binary digits; a hundredth of a period.
@Rule("fragile", "note")
def fragile(look: Look, digits_kept: float = 4, finest: float = 2.0**-4) -> Iterator[Said]:
  """Finds differences of products in half precision that keep few digits, and angles that are far apart."""
  dtype = look.report.policy.compute_dtype
  digits = int(FORMATS[dtype.name].mantissa_bits) + 1
  for t in look.report.of("activation") if dtype.itemsize == 2 else ():
    apart = 2.0 ** (_binade(t) - digits)
    if t.fragile == "difference" and t.error is not None and t.error > 2.0**-digits_kept:
      kept = f"keeps {max(0.0, -math.log2(t.error)):.1f} of their {digits} binary digits"
      yield t, f"{_name(t)}: a difference of products in {dtype} {kept}"
    elif t.fragile == "angle" and apart > finest:
      text = f"{_name(t)}: a product in {dtype} computes angles of up to {_top(t)}"
      yield t, f"{text}; numbers of that size are {apart:.2g} apart, and a period is 6.3"


@Rule("weight gradient", "note")
def gradient_of_zero(look: Look) -> Iterator[Said]:
  """Finds the weight gradient with the largest error of those that are only rounding."""
  found = [one for one in _far_weight_gradients(look) if one[1]]
  if found:
    t, why = max(found, key=lambda one: one[0].error or 0.0)
    like = "like the gradient of a bias before a norm"
    text = f"{t.path or t.name}{_more(found)}: its gradient is 0 but for rounding ({why}), {like}"
    yield t, f"{text}; its error against float32, {_error(t)}, says nothing"


def _part(look: Look, t: Tensor) -> float:
  """Returns the error of a weight's gradient over the norm of all of them."""
  whole = math.sqrt(sum((one.norm or 0.0) ** 2 for one in look.report.of("weight gradient")))
  return t.norm * (t.error or 0.0) / whole if t.norm else 0.0


@Rule(
  "gradient error",
  lambda look, t: "problem" if _part(look, t) > look.far else "note",
  unless=[nonfinite, overflow, hidden_overflow, gradient_overflow, underflow, error, gradient_error],
)
def weight_gradient_error(look: Look) -> Iterator[Said]:
  """Finds the weight gradient that takes the whole gradient farthest from float32's."""
  found = [t for t, why in _far_weight_gradients(look) if not why]
  if found and any(t.norm for t in look.report.of("weight gradient")):
    t = max(found, key=lambda t: _part(look, t))
    text = f"{t.path or t.name}{_more(found)}: the error of its gradient against float32 is {_error(t)}"
    text += f", which is {percent(_part(look, t))} of the norm of the whole gradient"
    little = ": little for SGD; but Adam divides each gradient by its own size, and so follows the error"
    yield t, text + (_check(look) if _part(look, t) > look.far else little)


def _far_weight_gradients(look: Look) -> list[tuple[Tensor, str]]:
  """Returns the weight gradients with a large error, and for those that are only rounding why, in words."""
  gradients = look.report.of("weight gradient")
  top = max(map(_binade, gradients), default=-math.inf)

  def only_rounding(t: Tensor) -> str:
    terms = [one for one in look.report.of("activation gradient", t.module) if one.norm]
    if len(t.shape) < 2 and t.norm is not None and terms:
      # A sum of random values has the norm of the values. A sum of n values that is 0 but for an offset, as
      # the rounding in a norm leaves it, has sqrt(n) times the rounding.
      most = max(terms, key=lambda one: one.norm or 0.0)
      n = most.magnitudes.count / max(t.magnitudes.count, 1)
      ratio = t.norm / (most.norm or 1.0)
      why = f"{ratio:.1g} of the norm of the values that it sums"
      return why if ratio < max(_NOISE, _ROUNDING * math.sqrt(n)) else ""
    return f"at most {_top(t)} in float32" if _binade(t) < top + math.log2(_NOISE) else ""

  far = [t for t in gradients if t.error is not None and t.error > look.far]
  return [(t, only_rounding(t) if t.magnitudes.range else "") for t in far]


@Rule("reference", "note")
def narrow_reference(look: Look) -> Iterator[Said]:
  """Says where the model computes in half precision in the float32 run, too."""
  places = look.report.narrow_reference
  if places:
    text = f"in the float32 run, too, the model computes {places[0]}{_more(places)}, by casts of its own or"
    hides = "it does not accept float32; errors there are unknown, and no policy changes them"
    yield None, f"{text} because {hides}. Remove the casts, or pass a step without them as reference="


def _is_finite(t: Tensor) -> bool:
  """Returns whether the values in float32 are finite."""
  return not t.magnitudes.nan + t.magnitudes.inf


def _binade(t: Tensor) -> float:
  """Returns the power of two above the largest value; minus infinity without finite values."""
  return t.magnitudes.range[1] + 1 if t.magnitudes.range else -math.inf


def _name(t: Tensor) -> str:
  return f"{t.module or 'the function'}: {t.name}{f' ({t.line})' if t.line else ''}"


def _top(t: Tensor) -> str:
  return f"2^{_binade(t):.0f}"


def _largest(t: Tensor) -> str:
  return f"{FORMATS[t.dtype].max:g}"


def _scale(look: Look) -> str:
  return power_of_two_text(look.report.loss_scale)


def _error(t: Tensor) -> str:
  return "not known" if t.error is None else f"{t.error:.2g}"


def _more(found: Sequence[Any]) -> str:
  return f" (and {len(found) - 1} more)" if len(found) > 1 else ""


def _weights(t: Tensor) -> str:
  """Returns the format of a weight in words: `bfloat16 with int8 corrections`."""
  words = (
    f"{t.dtype}, rounded stochastically" if t.held == "stochastic" else f"{t.dtype} with {t.held} corrections"
  )
  return t.dtype if t.held == t.dtype else words
