"""`NonfiniteReport`: the first operation that computed NaN or infinity, as data and text, and what to try."""

from __future__ import annotations

import dataclasses
import math
import re

import jax.numpy as jnp
from jax import lax

from mpjax._compat import newer
from mpjax._render.tables import Shown, Table, answer_lines
from mpjax.loss_scale import NonFinite
from mpjax.numerics.nonfinite._origins import Origin

_MOST = 3  # the most names in a list of a sentence
_LOWER_RATE = "a lower learning rate, clipped gradients or an earlier checkpoint"


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
    readers: for each of `inputs`, the first operation that computes with it and passes NaN or infinity on.
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
  readers: dict[str, Origin] = dataclasses.field(default_factory=dict)

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
    return _finite_answer(self)[0] if self.finite else " ".join(_verdict(self))

  def _answer(self) -> list[str]:
    if self.finite:
      return _finite_answer(self)
    fine = "" if self.of_gradients else "the loss and the gradients are finite; "
    lines = [*_verdict(self), f"{fine}non-finite: {_names(self.results, self.gradients)}"]
    if not self.compiled:
      lines.append("the compiled step, which rounds in fewer places, is finite on this batch")
    if self.others:
      lines.append(f"independent of it: {_listed([_said(other) for other in self.others], '; ')}")
    first, *others = _advice(self)
    return answer_lines([*lines, f"try: {first}"], [f"  or {other}" for other in others])

  def _sections(self) -> list[Table]:
    origins = [*([self.origin] if self.origin else ()), *self.others]
    sections = []
    if origins:
      heading = ["operation", "what it did", "result", "operands", "largest", "zeros"]
      sections.append(Table("origins", "Origins", [heading, *map(_origin_row, origins)], left=(0, 1)))
    for name, title, counts in (
      ("inputs", "Inputs that are not finite", self.inputs),
      ("results", "Results that are not finite, operation by operation", self.results),
      ("compiled", "Results of the compiled step that are not finite", self.compiled),
    ):
      if counts:
        rows = [[key, *map(str, (c.nan, c.posinf, c.neginf, c.size))] for key, c in counts.items()]
        sections.append(Table(name, title, [["array", "NaN", "inf", "-inf", "of"], *rows]))
    return sections


def _origin_row(origin: Origin) -> list[str]:
  column = lambda value: "\n".join(value(operand) for operand in origin.operands)
  operands, largest = column(lambda o: o.dtype), column(lambda o: f"{o.largest:.3g}")
  result = f"{origin.dtype}: {origin.nonfinite}"
  did = f"{_fault(origin)[0]}, {_when(origin)}"
  return [_where(origin), did, result, operands, largest, column(lambda o: str(o.zeros))]


def _verdict(report: NonfiniteReport) -> list[str]:
  """Returns the sentences of the verdict."""
  text = f"{_cause(report)}."
  if report.in_float32 is False:
    return [text, "In float32 the same step is finite."]
  wide = report.reference
  if wide is None:
    return [text]
  same = wide.inputs or (wide.origin and report.origin and _said(wide.origin) == _said(report.origin))
  return [text, f"In float32 it is non-finite too{'' if same else f': {_cause(wide)}'}."]


def _cause(report: NonfiniteReport) -> str:
  if report.inputs:
    return _listed([_input_text(report, name) for name in report.inputs], "; ")
  origin = report.origin
  if origin is None:
    return "no operation was found to blame"
  text = f"{_said(origin)}: {origin.nonfinite}"
  if origin.operands and not origin.whole and not _fault(origin)[1]:
    largest = " and ".join(f"{operand.largest:.3g}" for operand in origin.operands)
    several = "s" if len(origin.operands) > 1 else ""
    dtypes = " and ".join(dict.fromkeys(operand.dtype for operand in origin.operands))
    scaled = f" at loss scale {report.loss_scale:g}" if origin.backward and report.loss_scale != 1 else ""
    text += f"; operand{several} up to {largest} ({dtypes}{scaled})"
  if origin.overflowed and origin.primitive != lax.convert_element_type_p.name:
    text += f", result up to {origin.float32_largest:.3g}"
  return text


def _input_text(report: NonfiniteReport, name: str) -> str:
  reader = report.readers.get(name)
  read = f", first read by {_where(reader)}, {_when(reader)}" if reader else ""
  return f"{name} holds {report.inputs[name]}{read}"


def _said(origin: Origin) -> str:
  return f"{_where(origin)} {_fault(origin)[0]}, {_when(origin)}"


def _where(origin: Origin) -> str:
  line = f" ({origin.line})" if origin.line else ""
  return f"{origin.module + ': ' if origin.module else ''}{origin.primitive}{line}"


def _when(origin: Origin) -> str:
  phase = "optimiser" if origin.of_optimizer else "backward pass" if origin.backward else "forward pass"
  return ", ".join([phase, *map(str, origin.iterations)])


# What an operation did to an operand of zero, and to finite operands that gave NaN.
_DID = {
  lax.div_p.name: ("divided by zero", ""),
  lax.log_p.name: ("took the logarithm of zero", "took the logarithm of a negative number"),
  str(newer("log2_p")): ("took the logarithm of zero", "took the logarithm of a negative number"),
  lax.log1p_p.name: ("", "took the logarithm of a negative number"),
  lax.sqrt_p.name: ("", "took the root of a negative number"),
  lax.rsqrt_p.name: ("took the reciprocal of zero", "took the root of a negative number"),
  lax.pow_p.name: ("raised zero to a negative power", ""),
  lax.integer_pow_p.name: ("raised zero to a negative power", ""),
  lax.gather_p.name: ("", "read at an index out of range, which JAX fills with NaN"),
}


def _fault(origin: Origin) -> tuple[str, str]:
  """Returns what an operation did, and what to write in its place; empty if the program may stay."""
  nan = origin.nonfinite.nan
  at = f" at {origin.line}" if origin.line else ""
  to_zero, to_finite = _DID.get(origin.primitive, ("", ""))
  if origin.constant:
    value = "NaN" if nan else "an infinity"
    return f"reads {value} that the program itself holds", f"a finite number in its place{at}"
  if origin.whole:
    return "gave non-finite values as a whole, although each iteration alone is finite", ""
  if origin.overflowed:
    return f"overflowed in {origin.dtype}", ""
  if nan and any(operand.nonfinite.posinf or operand.nonfinite.neginf for operand in origin.operands):
    return "made NaN from infinities", f"a mask with an entry in each row, or a finite number for -inf{at}"
  if to_zero and _meets_zero(origin):
    return to_zero, f"an operand kept away from zero{at} (epsilon, jnp.where)"
  if nan and origin.primitive == lax.gather_p.name:
    return to_finite, f"indices below the size of the table{at}"
  if nan and to_finite:
    return to_finite, f"an operand kept in range{at} (jnp.maximum, jnp.where)"
  return ("made NaN from finite values" if nan else f"overflowed in {origin.dtype}"), ""


def _meets_zero(origin: Origin) -> bool:
  operands = origin.operands[-1:] if origin.primitive == lax.div_p.name else origin.operands[:1]
  return any(operand.zeros for operand in operands)


def _listed(texts: list[str], separator: str = ", ") -> str:
  more = [f"and {len(texts) - _MOST} more"] if len(texts) > _MOST else []
  return separator.join([*texts[:_MOST], *more])


def _names(results: dict[str, NonFinite], gradients: int) -> str:
  """Returns the names of non-finite results, the first of each kind."""
  kinds: dict[str, list[str]] = {}
  for name, counts in results.items():
    hidden = "" if counts.size else ", which the loss scale inside the optimiser replaces with zeros"
    kinds.setdefault(name.partition("[")[0], []).append(name + hidden)
  texts = {kind: _listed(names) for kind, names in kinds.items()}
  if "loss" in kinds:
    texts["loss"] = "the loss"
  if found := kinds.get("gradients"):
    paths = ["/".join(re.findall(r"\w+", name.removeprefix("gradients"))) for name in found]
    texts["gradients"] = f"{len(found)} of {gradients} gradients ({_listed(paths)})"
  return " and ".join(texts.values())


def _finite_answer(report: NonfiniteReport) -> list[str]:
  text = f"every value is finite, operation by operation ({', '.join(report.parts)})"
  if not report.compiled:
    return [f"{text}, and the compiled step does not give NaN or infinity"]
  found = _names(report.compiled, report.gradients)
  if report.summed and all(name.startswith("gradients") for name in report.compiled):
    return [
      f"the sum of gradients in {report.summed} overflowed: {found}; each device's gradients are finite",
      "try: policy: {reduce_dtype: float32}, or bfloat16; or a lower loss scale",
    ]
  return [
    f"{text}, but the compiled step, which rounds in other places, gives {found}",
    "try: policy: bf16 or fp32, or a lower loss scale",
  ]


def _advice(report: NonfiniteReport) -> list[str]:
  if report.inputs:
    return [_input_advice(name) for name in dict.fromkeys(re.split(r"\W", name)[0] for name in report.inputs)]
  origin = report.origin
  if origin is None:
    return ["policy: fp32"]
  at = f" at {origin.line}" if origin.line else ""
  change = _fault(origin)[1]
  options = []
  diverges = bool(report.in_float32)
  if origin.of_optimizer and not origin.constant:
    if origin.dtype in ("float16", "bfloat16"):
      of_updates = any(name.startswith("updates") for name in report.results)
      wider = "optimizer_dtype" if of_updates else "param_dtype"
      options.append(f"{wider}: float32 in the policy, instead of {origin.dtype}")
    if not at:  # inside an optax transform
      least = "1e-4, since float16 rounds 1e-8 to 0" if origin.dtype == "float16" else "1e-8"
      eps = f"an eps (or eps_root) of the optimiser that is not 0: {least}"
      change = eps if change and _meets_zero(origin) else ""
    diverges = not change
  elif origin.overflowed:
    options += _wider(report, origin, at)
  options += [change] if change else []
  if diverges and not origin.constant:
    options.append(f"{'since float32 fails too: ' if report.reference else ''}{_LOWER_RATE}")
  return options or ["policy: fp32, to see whether the model itself diverges", "a lower learning rate"]


def _wider(report: NonfiniteReport, origin: Origin, at: str) -> list[str]:
  """Returns what makes a result of the loss or a gradient fit its dtype, or gives it a wider one."""
  options = []
  scale = report.largest_scale
  if scale is not None:
    options.append(f"a loss scale of at most {scale:g} (a dynamic one falls, down to loss_scaling.min_scale)")
  if origin.dtype != report.compute_dtype:
    options.append(f"float32 instead of {origin.dtype}{at}")
  elif origin.module:
    needs = "" if report.autocast else "autocast: true and "
    options.append(f"in the policy, {needs}overrides: {{{_quoted(origin.module)}: fp32}}")
  elif scale is None:
    options.append(f"mpjax.full_precision around the computation{at}")
  if origin.dtype == report.compute_dtype == "float16":
    options.append("policy: bf16, which has float32's range")
  return options


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
