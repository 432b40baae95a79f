"""One inspected tensor: its magnitudes, and its error against float32."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.formats import FORMATS
from mpjax.numerics._summary import Summary

# In the order of reports.
KINDS = ("activation", "activation gradient", "parameter", "weight gradient", "update")
GRADIENTS = ("activation gradient", "weight gradient")
# The formats for which shares are counted.
INTEREST = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Before recipes round to these formats, they scale each tensor by its largest value.
FP8 = tuple(name for name in INTEREST if name.startswith("float8"))
# Binades of the histograms: all values below the first are counted together, and so are those above the last.
BINS = tuple(range(-64, 32))


def is_half(dtype: str) -> bool:
  """Returns whether a dtype has fewer than 19 bits, thus fewer digits than any float32 computation."""
  return dtype in FORMATS and FORMATS[dtype].bits < 19


class Shares(NamedTuple):
  """Fractions of a tensor's values that underflow, become subnormal or overflow in a format.

  Attributes:
    underflow: share of values that are not zero and are rounded to zero.
    subnormal: share of values that are rounded to a subnormal number, which has fewer digits.
    overflow: share of values that are rounded to infinity or NaN, or are not finite already.
  """

  underflow: float
  subnormal: float
  overflow: float


_LARGEST = float(np.finfo(np.float32).max)


@functools.lru_cache(1 << 14)  # a report asks often
def _bits_of(magnitude: float) -> int:
  """Returns the bits of the smallest float32 that is at least `magnitude`."""
  rounded = np.float32(magnitude)
  return int(rounded.view(np.uint32)) + bool(float(rounded) < magnitude)


@functools.cache
def full_summary(scale: float) -> Summary:
  """Returns the summary of a float32 tensor: binades, and the formats' edges at scale 1 and at `scale`."""
  magnitudes = [2.0**e for e in BINS]
  for name in INTEREST:
    for factor in {1.0, scale}:
      magnitudes += [m for m in _edges(name, factor) if m < float(np.finfo(np.float32).max)]
  return Summary.of(magnitudes, sketch=True)


@functools.cache
def binades() -> Summary:
  """Returns the summary of a tensor for histograms alone: binades, and the formats' edges at scale 1."""
  return Summary(full_summary(1.0).edges)


@functools.lru_cache(1 << 12)
def _edges(name: str, scale: float) -> tuple[float, float, float]:
  """Returns the least magnitudes for which a number times a scale is not zero, is normal, and overflows."""
  known = FORMATS[name]
  above_zero = np.nextafter(known.underflow_edge / scale, math.inf)
  return float(above_zero), known.normal_edge / scale, known.overflow_edge / scale


@dataclasses.dataclass(frozen=True)
class Magnitudes:
  """Magnitudes of the values of a tensor.

  Attributes:
    edges: float32 bit patterns, ascending.
    above: for each edge, the number of magnitudes at or above it, with NaN.
    count: number of values.
  """

  edges: tuple[int, ...]
  above: tuple[float, ...]
  count: float

  @staticmethod
  def of(summary: Summary, kept: Sequence[float] | np.ndarray) -> Magnitudes:
    """Returns the magnitudes from the figures of a `Summary`."""
    n = len(summary.edges)
    values = np.asarray(kept[: n + 1], np.float64)
    return Magnitudes(summary.edges, tuple(values[:n].tolist()), float(values[n]))

  def __add__(self, other: Magnitudes) -> Magnitudes:
    """Adds up the magnitudes of two tensors."""
    total = tuple(a + b for a, b in zip(self.above, other.above, strict=True))
    return Magnitudes(self.edges, total, self.count + other.count)

  @property
  def nan(self) -> float:
    """Number of NaN."""
    return self.above[-1]

  @property
  def inf(self) -> float:
    """Number of infinities."""
    return self.above[-2] - self.above[-1]

  @property
  def zero(self) -> float:
    """Number of zeros."""
    return self.count - self.above[0]

  @property
  def histogram(self) -> tuple[float, list[float]]:
    """Counts of finite nonzero values: below the first of `BINS`, and in each of them."""
    above = [self.at_least(2.0**e) for e in BINS]
    ends = [*above[1:], self.inf + self.nan]
    return self.above[0] - above[0], [max(a - b, 0.0) for a, b in zip(above, ends, strict=True)]

  @property
  def range(self) -> tuple[int, int] | None:
    """The binades of the smallest and the largest finite nonzero value; `None` without such values."""
    below, counts = self.histogram
    there = [e for e, count in zip(BINS, counts, strict=True) if count > 0]
    there = [BINS[0] - 1, *there] if below > 0 else there
    return (there[0], there[-1]) if there else None

  def at_least(self, magnitude: float) -> float:
    """Returns the number of values at or above a magnitude, with evenly spread logarithms between edges."""
    if magnitude <= 0:
      return self.count
    if magnitude > _LARGEST:
      return self.above[-2]
    bits = _bits_of(magnitude)
    i = bisect.bisect_left(self.edges, bits)
    if self.edges[i] == bits or i == 0:
      return self.above[i]
    low, high = (float(np.uint32(b).view(np.float32)) for b in self.edges[i - 1 : i + 1])
    if not math.isfinite(high) or i == 1:
      return self.above[i]
    part = math.log(magnitude / low) / math.log(high / low)
    return self.above[i - 1] + part * (self.above[i] - self.above[i - 1])

  def shares(self, name: str, scale: float = 1.0) -> Shares:
    """Returns the shares of the values times a scale that underflow or overflow in a format.

    `name` is a key of `mpjax.formats.FORMATS`. The shares are exact for the formats of interest at scale 1
    and at the run's loss scale; otherwise they are interpolated within a binade.
    """
    if not self.count:
      return Shares(0.0, 0.0, 0.0)
    above_zero, normal, overflow = (self.at_least(m) for m in _edges(name, scale))
    part = lambda n: max(n, 0.0) / self.count
    return Shares(part(self.above[0] - above_zero), part(above_zero - normal), part(overflow))

  def own_scale(self, name: str) -> float:
    """Returns the power of two that brings the largest finite value just below a format's largest number."""
    known = self.range
    if known is None:
      return 1.0
    return 2.0 ** (math.frexp(FORMATS[name].max)[1] - 1 - (known[1] + 1))

  def underflow(self, name: str, scale: float = 1.0) -> float:
    """Returns the share of the nonzero values that a format rounds to zero."""
    there = self.above[0]
    return self.shares(name, scale).underflow * self.count / there if there else 0.0

  def lost_norm(self, name: str, scale: float = 1.0) -> float:
    """Returns the norm of values that a format rounds to zero over the norm of all finite values."""
    below, counts = self.histogram
    edge = _edges(name, scale)[0]
    # Up to a factor that is equal for all binades: the mean square over the square of the lower edge.
    energy = [count * 4.0**e for e, count in zip(BINS, counts, strict=True)]
    smallest = below * 4.0 ** (BINS[0] - 1)
    gone = smallest + sum(x for e, x in zip(BINS, energy, strict=True) if 2.0 ** (e + 1) <= edge)
    return math.sqrt(gone / (smallest + sum(energy))) if gone else 0.0

  def kept(self, name: str, scale: float = 1.0) -> float:
    """Returns the share of the nonzero values that a format neither rounds to zero nor overflows."""
    there = self.above[0]
    if not there:
      return 1.0
    shares = self.shares(name, scale)
    return 1 - (shares.underflow + shares.overflow) * self.count / there


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One tensor of an inspected step.

  Attributes:
    kind: one of `KINDS`; an update's magnitudes are those of |update / weight|.
    module: module path, such as `GPT/blocks/0/qkv`; with a number, `layers[3]`, for a step of a loop.
    name: the primitive or function that computes it, or the parameter's name.
    line: line of the user's program, such as `model.py:31`; empty for parameters.
    dtype: its dtype under the policy.
    shape: its shape in one batch.
    order: its position in the program.
    magnitudes: magnitudes in float32 (unscaled), over all batches; those of the policy's run without a
      float32 run.
    policy: (NaN, infinities, zeros) in the policy's run, or `None`.
    error: |policy - float32| / |float32| over all its values, or `None`; infinite if float32's is zero.
    cosine: cosine of the angle between both, or `None`.
    bias: mean of policy - float32, with its sign, over the root mean square of float32's values, or `None`.
    gain: <policy - float32, float32> / |float32|^2, or `None`; below 0 if the values are too small overall.
    norm: norm of float32's values over all batches, or of an update itself; `None` if not known.
    lost: share of the nonzero updates that do not change the weight, for weights in `bfloat16` and `float16`
      (rounded to nearest), and in bfloat16 with the corrections `int8` (on average) and `int16`.
    descent: for the updates u, <the weight's change, u> / |u|^2 in `float32` and the formats of `lost`: 1 if
      the weight takes the updates exactly, 0 if it does not move (arXiv 2405.18710).
    moved: number of updates that are not zero.
    held: for a parameter and its update, what keeps its digits: `dtype`, or the correction from the policy's
      `master_weights`.
    path: tree path of the parameter that it belongs to, or empty.
    index: the loop steps at the end of `module`.
    fragile: `difference` for a difference of matrix products, `angle` for an angle that a product computes;
      else empty.
  """

  kind: str
  module: str
  name: str
  line: str
  dtype: str
  shape: tuple[int, ...]
  order: int
  magnitudes: Magnitudes
  policy: tuple[float, float, float] | None = None
  error: float | None = None
  cosine: float | None = None
  bias: float | None = None
  gain: float | None = None
  norm: float | None = None
  lost: Mapping[str, float] | None = None
  descent: Mapping[str, float] | None = None
  moved: float = 0.0
  held: str = ""
  path: str = ""
  index: tuple[int, ...] = ()
  fragile: str = ""

  @property
  def scope(self) -> str:
    """The module path without loop steps, which overrides match."""
    return self.module.removesuffix("".join(f"[{i}]" for i in self.index))

  @property
  def lost_here(self) -> float:
    """The share of updates that the weight loses in its own format: 0 with all digits of float32."""
    return (self.lost or {}).get(self.held, 0.0) if self.held not in ("int8", "int16") else 0.0

  @property
  def descent_here(self) -> float:
    """The share of the intended descent that the weight makes in its own format; on average if stochastic."""
    shares = self.descent or {}
    return 1.0 if self.held == "stochastic" else shares.get(self.held, shares.get("float32", 1.0))

  @property
  def not_finite(self) -> bool:
    """Whether it has NaN or infinity under the policy."""
    nan, inf = (self.magnitudes.nan, self.magnitudes.inf) if self.policy is None else self.policy[:2]
    return nan + inf > 0

  def to_dict(self, loss_scale: float) -> dict[str, Any]:
    """Returns plain data, as in the report's JSON."""
    m = self.magnitudes
    below, counts = m.histogram
    shares = lambda scale: {name: m.shares(name, scale)._asdict() for name in INTEREST}
    keys = ("nan", "inf", "zero")
    return {
      "kind": self.kind,
      "module": self.module,
      "name": self.name,
      "line": self.line,
      "dtype": self.dtype,
      "shape": list(self.shape),
      "order": self.order,
      "count": m.count,
      "zero": m.zero,
      "below": below,
      "counts": counts,
      "nan": m.nan,
      "inf": m.inf,
      "shares": shares(1.0),
      "scaled_shares": shares(loss_scale) if self.kind in GRADIENTS else None,
      "own_scale_shares": {name: m.shares(name, m.own_scale(name))._asdict() for name in FP8},
      "policy": None if self.policy is None else dict(zip(keys, self.policy, strict=True)),
      "error": self.error,
      "cosine": self.cosine,
      "bias": self.bias,
      "gain": self.gain,
      "norm": self.norm,
      "lost": None if self.lost is None else dict(self.lost),
      "descent": None if self.descent is None else dict(self.descent),
      "held": self.held,
    }


def share_lost(tensors: Sequence[Tensor], name: str, scale: float | None = 1.0) -> float:
  """Returns the share of the tensors' nonzero values that a format rounds to zero.

  Args:
    tensors: the tensors; all their values count equally.
    name: name of a format.
    scale: factor of the values; `None`: each tensor's own, which brings its largest value just into the
      format's range.
  """
  all_of = [t.magnitudes for t in tensors]
  there = sum(m.above[0] for m in all_of)
  gone = sum(
    m.shares(name, m.own_scale(name) if scale is None else scale).underflow * m.count for m in all_of
  )
  return gone / there if there else 0.0


def descent_quality(updates: Sequence[Tensor], held: str | None = None) -> float | None:
  """Returns the share of the updates' intended descent that the weights make, or `None` without updates.

  Args:
    updates: tensors of kind `update`.
    held: a key of `Tensor.descent`; `None`: each weight's own format.
  """
  there = [(t, t.norm) for t in updates if t.descent and t.norm]
  whole = sum(norm**2 for _, norm in there)
  if not whole or not math.isfinite(whole):
    return None
  return sum((t.descent_here if held is None else (t.descent or {})[held]) * n**2 for t, n in there) / whole


@dataclasses.dataclass
class Distance:
  """The distance between two arrays over several batches, from their sketches."""

  squared: float = 0.0
  of_first: float = 0.0
  of_second: float = 0.0
  product: float = 0.0
  summed: float = 0.0

  def add(self, first: np.ndarray, second: np.ndarray) -> None:
    """Adds a batch: sum and sketch ([..., 1 + n]) of the policy's array and of the float32 array."""
    a, b = np.asarray(first, np.float64), np.asarray(second, np.float64)
    self.summed += float(np.sum(a[..., 0] - b[..., 0]))
    a, b = a[..., 1:], b[..., 1:]
    self.squared += float(np.sum((a - b) ** 2))
    self.of_first += float(np.sum(a * a))
    self.of_second += float(np.sum(b * b))
    self.product += float(np.sum(a * b))

  @property
  def error(self) -> float:
    """Returns the norm of the difference over the norm of the second array."""
    if not self.of_second:
      return 0.0 if not self.squared else math.inf
    return math.sqrt(self.squared / self.of_second)

  def figures(self, count: float, finite: bool) -> dict[str, float | None]:
    """Returns the figures for a `Tensor`.

    Args:
      count: number of values of each array.
      finite: whether all values were finite; the mean of a part of them says nothing.
    """
    known = finite and self.of_second > 0
    return {
      "error": self.error,
      "cosine": self.cosine,
      "bias": self.summed / math.sqrt(count * self.of_second) if known else None,
      "gain": self.product / self.of_second - 1 if known else None,
    }

  @property
  def cosine(self) -> float | None:
    """Returns the cosine of the angle between both arrays; `None` if one is zero."""
    norms = math.sqrt(self.of_first * self.of_second)
    return self.product / norms if norms else None
