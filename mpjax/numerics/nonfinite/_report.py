"""`NonfiniteReport`: the first operation that computed NaN or infinity, as data and text, and what to try."""

from __future__ import annotations

import dataclasses
import math
import re

import jax.numpy as jnp
from jax import lax

from mpjax._compat import newer
from mpjax._render.html_sections import Shown
from mpjax._render.text_sections import TextSection, answer_lines, of_rows
from mpjax.loss_scale import NonFinite
from mpjax.numerics.nonfinite._origins import Origin

_MOST_INPUTS = 3  # the most inputs that the verdict names


@dataclasses.dataclass(frozen=True, repr=False)
class NonfiniteReport(Shown):
  """The report of `find_nonfinite`; `str()` gives the short answer, the verdict first.

  ```python
  report = mpjax.find_nonfinite(step, state, batch)
  print(report)  # the verdict, and what to try
  if not report.finite:
    print(report.table("origins"))  # every operation that may be to blame
  ```

  Attributes:
    origin: the first operation to blame; `None` if all is finite or inputs are to blame.
    inputs: inputs that lead to non-finite results, by name (`batch['images']`, `params['w']`).
    others: other operations to blame, independent of the first.
    results: counts of the non-finite results by name, computed operation by operation: `loss`,
      `gradients['w']`; if these are finite, `model state ['mean']`, `updates['w']`,
      `parameters after the step ['w']`, `optimiser state ['0/nu/w']`.
    compiled: counts of the non-finite results of the compiled step, which rounds in other places.
    gradients: number of gradient leaves.
    loss_scale: factor of the loss; 1.0 without loss scaling.
    policy: text of the policy.
    compute_dtype: name of the policy's compute dtype.
    autocast: whether the policy uses autocast, which overrides need.
    parts: the parts of the step that were computed; only the first ones if they are non-finite.
    summed: dtype and devices if gradients are summed over devices in half precision, such as
      `float16 over 8 devices`; else empty.
    in_float32: whether the same step has non-finite results in float32 without loss scaling; `None` if not
      tested.
    reference: the report in float32, or `None`.
  """

  origin: Origin | None
  inputs: dict[str, NonFinite]
  others: tuple[Origin, ...]
  results: dict[str, NonFinite]
  compiled: dict[str, NonFinite]
  gradients: int
  loss_scale: float
  policy: str
  compute_dtype: str
  autocast: bool
  parts: tuple[str, ...] = ("loss", "gradients")
  summed: str = ""
  in_float32: bool | None = None
  reference: NonfiniteReport | None = None

  @property
  def finite(self) -> bool:
    """Returns whether every result is finite when computed operation by operation."""
    return not self.results

  @property
  def of_gradients(self) -> bool:
    """Returns whether the loss or a gradient is non-finite; then the rest of the step was not computed."""
    return any(name == "loss" or name.startswith("gradients") for name in self.results)

  @property
  def largest_scale(self) -> float | None:
    """Returns the largest power of two as loss scale at which the origin's result fits, or `None`.

    It assumes that the result of an overflowing backward operation is proportional to the loss scale.
    """
    origin = self.origin
    if origin is None or not origin.backward or not origin.overflowed or self.loss_scale == 1:
      return None
    unscaled = (origin.float32_largest or 0.0) / self.loss_scale
    return 2.0 ** math.floor(math.log2(float(jnp.finfo(origin.dtype).max) / unscaled)) if unscaled else None

  @property
  def verdict(self) -> str:
    """The operation or input to blame, and whether the same step is finite in float32, in one line."""
    return _finite_text(self).partition("\n")[0] if self.finite else " ".join(_verdict(self))

  def _answer(self) -> list[str]:
    if self.finite:
      return _finite_text(self).split("\n")
    found = _results_text(self.results, self.gradients)
    fine = "" if self.of_gradients else "the loss and the gradients are finite; "
    lines = [*_verdict(self), f"{fine}non-finite: {found}"]
    if not self.compiled:
      lines.append(
        "the compiled step is finite on this batch: it does not round all values between operations"
      )
    if self.others:
      shown = [f"{_where(other)} {_what(other)}" for other in self.others[:3]]
      more = f"; and {len(self.others) - 3} more" if len(self.others) > 3 else ""
      lines.append(f"independent of it: {'; '.join(shown)}{more}")
    first, *others = _advice(self)
    return answer_lines([*lines, f"try: {first}"], [f"  or {other}" for other in others])

  def _sections(self) -> list[TextSection]:
    origins = [*([self.origin] if self.origin else ()), *self.others]
    sections = []
    if origins:
      heading = ["operation", "what it did", "result", "operands", "largest", "zeros"]
      sections.append(of_rows("Origins", [heading, *map(_origin_row, origins)], left=(0, 1), name="origins"))
    for name, title, counts in (
      ("inputs", "Inputs that are not finite", self.inputs),
      ("results", "Results that are not finite, operation by operation", self.results),
      ("compiled", "Results of the compiled step that are not finite", self.compiled),
    ):
      if counts:
        rows = [[key, *map(str, (c.nan, c.posinf, c.neginf, c.size))] for key, c in counts.items()]
        sections.append(of_rows(title, [["array", "NaN", "inf", "-inf", "of"], *rows], name=name))
    return sections


def _origin_row(origin: Origin) -> list[str]:
  column = lambda value: "\n".join(value(operand) for operand in origin.operands)
  operands, largest = column(lambda o: o.dtype), column(lambda o: f"{o.largest:.3g}")
  result = f"{origin.dtype}: {_counts_text(origin.nonfinite)}"
  return [_where(origin), _what(origin), result, operands, largest, column(lambda o: str(o.zeros))]


def _verdict(report: NonfiniteReport) -> list[str]:
  """Returns the sentences of the verdict."""
  text = f"{_cause(report, full=True)}."
  if report.in_float32 is False:
    return [text, "In float32 the same step is finite."]
  if report.reference is None:
    return [text]
  return [text, f"In float32 it is non-finite too: {_cause(report.reference)}."]


def _cause(report: NonfiniteReport, full: bool = False) -> str:
  if report.inputs:
    said = [f"{name} holds {counts}" for name, counts in report.inputs.items()]
    more = len(said) - _MOST_INPUTS
    return "; ".join([*said[:_MOST_INPUTS], *([f"and {more} more inputs"] if more > 0 else [])])
  if report.origin is None:
    return "no operation was found to blame"
  origin = report.origin
  text = f"{_where(origin)} {_what(origin)}"
  if not full:
    return text
  scaled = f" at loss scale {report.loss_scale:g}" if origin.backward and report.loss_scale != 1 else ""
  text += f": {_counts_text(origin.nonfinite)}"
  if origin.operands and not origin.whole:
    largest = [f"{operand.largest:.3g}" for operand in origin.operands]
    text += f"; the largest {'operand is' if len(largest) == 1 else 'operands are'} {' and '.join(largest)}"
    text += f" ({' and '.join(dict.fromkeys(operand.dtype for operand in origin.operands))}{scaled})"
  if origin.overflowed and origin.primitive != lax.convert_element_type_p.name:
    text += f", and the result would reach {origin.float32_largest:.3g}"
  return text


def _where(origin: Origin) -> str:
  line = f" ({origin.line})" if origin.line else ""
  return f"{origin.module + ': ' if origin.module else ''}{origin.primitive}{line}"


_DIVIDE = {
  lax.div_p.name: "divided by zero",
  lax.log_p.name: "took the logarithm of zero",
  str(newer("log2_p")): "took the logarithm of zero",
  lax.rsqrt_p.name: "took the reciprocal of zero",
  lax.pow_p.name: "raised zero to a negative power",
  lax.integer_pow_p.name: "raised zero to a negative power",
}


# Reasons for NaN from finite operands.
_OUTSIDE = {
  lax.sqrt_p.name: "took the root of a negative number",
  lax.rsqrt_p.name: "took the root of a negative number",
  lax.log_p.name: "took the logarithm of a negative number",
  lax.log1p_p.name: "took the logarithm of a negative number",
  lax.gather_p.name: "read at an index out of range, which JAX fills with NaN",
}


def _at_zero(origin: Origin) -> bool:
  operands = origin.operands
  return (
    origin.primitive in _DIVIDE
    and bool(operands)
    and operands[origin.primitive == lax.div_p.name and -1].zeros > 0
  )


def _from_infinities(origin: Origin) -> bool:
  return any(o.nonfinite.posinf or o.nonfinite.neginf for o in origin.operands) and origin.nonfinite.nan > 0


def _what(origin: Origin) -> str:
  phase = "optimiser" if origin.of_optimizer else "backward pass" if origin.backward else "forward pass"
  where = ", ".join([phase, *map(str, origin.iterations)])
  if origin.constant:
    value = "NaN" if origin.nonfinite.nan else "an infinity"
    return f"reads {value} that the program itself holds, {where}"
  if origin.whole:
    return f"gave non-finite values as a whole, although each iteration alone is finite, {where}"
  if origin.overflowed:
    return f"overflowed in {origin.dtype}, {where}"
  if _from_infinities(origin):
    return f"made NaN from infinities, {where}"
  if _at_zero(origin):
    return f"{_DIVIDE[origin.primitive]}, {where}"
  if origin.nonfinite.nan:
    return f"{_OUTSIDE.get(origin.primitive, 'made NaN from finite values')}, {where}"
  return f"overflowed in {origin.dtype}, {where}"


def _counts_text(counts: NonFinite) -> str:
  kinds = ((counts.nan, "NaN"), (counts.posinf, "inf"), (counts.neginf, "-inf"))
  bad = " and ".join(f"{n} {kind}" for n, kind in kinds if n)
  return f"{bad} of {counts.size} {'value' if counts.size == 1 else 'values'}"


def _results_text(results: dict[str, NonFinite], gradients: int) -> str:
  names = [name for name in results if name.startswith("gradients")]
  parts = ["the loss"] if "loss" in results else []
  if names:
    paths = ["/".join(re.findall(r"\w+", name.removeprefix("gradients"))) for name in names]
    shown = ", ".join(paths[:3]) + (", ..." if paths[3:] else "")
    parts.append(f"{len(names)} of {gradients} gradients ({shown})")
  return " and ".join(parts) if parts else _after_text(results)


def _after_text(results: dict[str, NonFinite]) -> str:
  """Returns the names of non-finite results after finite gradients, at most three of each kind."""
  kinds: dict[str, list[str]] = {}
  for name, counts in results.items():
    hidden = "" if counts.size else ", which the loss scale inside the optimiser replaces with zeros"
    kinds.setdefault(name.partition("[")[0], []).append(name + hidden)
  more = lambda of_kind: f" and {len(of_kind) - 3} more" if of_kind[3:] else ""
  return ", ".join(", ".join(of_kind[:3]) + more(of_kind) for of_kind in kinds.values())


def _finite_text(report: NonfiniteReport) -> str:
  text = (
    f"every value is finite when the step is computed operation by operation ({', '.join(report.parts)}): "
  )
  text += "the failure does not repeat"
  if not report.compiled:
    return f"{text} on this batch, and the compiled step does not give NaN or infinity either"
  if report.summed and "loss" not in report.compiled and any(n.startswith("grad") for n in report.compiled):
    found = _results_text(report.compiled, report.gradients)
    return (
      f"the sum of gradients in {report.summed} overflowed: {found}; each device's gradients are finite\n"
      "try: policy: {reduce_dtype: float32}, or bfloat16; or a lower loss scale, to which a dynamic one "
      "falls by skipping steps if loss_scaling.min_scale allows it"
    )
  return (
    f"{text}, but the compiled step gives {_results_text(report.compiled, report.gradients)}: compiled "
    "code rounds in other places, and a value here is at the edge of its dtype's range\n"
    "try: policy: bf16, which has float32's range; or policy: fp32; or a lower loss scale"
  )


def _advice(report: NonfiniteReport) -> list[str]:
  if report.inputs:
    return [_input_advice(name) for name in dict.fromkeys(re.split(r"\W", name)[0] for name in report.inputs)]
  origin = report.origin
  if origin is None:
    return ["policy: fp32"]
  at = f" at {origin.line}" if origin.line else ""
  if origin.of_optimizer and not origin.constant:
    return _optimizer_advice(report, origin, at)
  options = []
  if origin.constant:
    options.append(f"a finite number in its place{at}")
  elif origin.overflowed:
    scale = report.largest_scale
    if scale is not None:
      options.append(
        f"a loss scale of at most {scale:g}, to which a dynamic one falls by skipping steps if loss_scaling."
        "min_scale allows it"
      )
    if origin.dtype != report.compute_dtype:
      options.append(f"float32 instead of {origin.dtype}{at}")
    elif origin.module:
      needs = "" if report.autocast else "autocast: true and "
      options.append(f"in the policy, {needs}overrides: {{{_quoted(origin.module)}: fp32}}")
    elif scale is None:
      options.append(f"mpjax.full_precision around the computation{at}")
    if origin.dtype == report.compute_dtype == "float16":
      options.append("policy: bf16, which has float32's range")
  elif _from_infinities(origin):
    options.append(f"a mask that leaves an entry in each row, or a large finite number for -inf{at}")
  elif _at_zero(origin):
    options.append(f"an operand that is kept away from zero{at}, with an epsilon or with jnp.where")
  elif origin.primitive == lax.gather_p.name:
    options.append(f"data with indices from 0 to below the size of the table{at}")
  elif origin.primitive in _OUTSIDE:
    options.append(f"an operand that is kept in range{at}, with jnp.maximum or jnp.where")
  elif origin.whole:
    options.append("policy: fp32")
  if report.in_float32 and not origin.constant:
    too = " since float32 fails too:" if report.reference else ""
    options.append(f"{too} a lower learning rate, clipped gradients or an earlier checkpoint".strip())
  return options or ["policy: fp32, to see whether the model itself diverges", "a lower learning rate"]


def _optimizer_advice(report: NonfiniteReport, origin: Origin, at: str) -> list[str]:
  """Returns what to change in an optimiser, or in the dtype in which it computes."""
  options = []
  half = origin.dtype in ("float16", "bfloat16")
  if half and not any(name.startswith("updates") for name in report.results):
    options.append("param_dtype: float32 in the policy, where the updated parameters fit")
  elif half:
    options.append(f"optimizer_dtype: float32 in the policy, instead of {origin.dtype}")
  if _at_zero(origin) and not origin.line:
    least = float(jnp.finfo(origin.dtype).smallest_subnormal)
    small = ": 1e-8" if origin.dtype != "float16" else f" in float16 (the least is {least:.1g}): 1e-4"
    options.append(f"an eps (or eps_root) of the optimiser that is not 0{small}")
  elif _at_zero(origin):
    options.append(f"an operand that is kept away from zero{at}")
  elif origin.primitive in _OUTSIDE:
    options.append(f"an operand that is kept in range{at or ', with an eps_root'}")
  elif not _from_infinities(origin):
    options.append("clipped gradients (optax.clip_by_global_norm), or a lower learning rate")
  return options or ["an earlier checkpoint, and from there a lower learning rate"]


# Names that the inputs of a step begin with; those of a loss function are its own.
_OF_STATE = ("params", "arrays", "opt_state", "model_state", "fp8_state", "rng", "step")


def _input_advice(kind: str) -> str:
  if kind == "batch":
    return "fix the data: the batch itself holds NaN or infinity"
  if kind not in _OF_STATE:
    return f"fix the argument {kind}: it holds NaN or infinity itself"
  return "an earlier checkpoint, and from there a lower learning rate"


def _quoted(module: str) -> str:
  escaped = re.escape(module)
  return f'"{module}"' if escaped == module else f"'{escaped}'"
