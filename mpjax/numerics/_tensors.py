"""One inspected tensor: its magnitudes, and its error against float32."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.numerics._seen import INTEREST, Seen

# In the order of reports.
KINDS = ("activation", "activation gradient", "parameter", "weight gradient", "update")
GRADIENTS = ("activation gradient", "weight gradient")


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
  magnitudes: Seen
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
  there = sum(m.there for m in all_of)
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

  @staticmethod
  def between(first: Seen, second: Seen) -> Distance:
    """Returns the distance between the policy's array and the float32 array of one batch."""
    a, b = np.asarray(first.sketch, np.float64), np.asarray(second.sketch, np.float64)
    total = lambda x: float(np.sum(x))
    summed = float(first.total) - float(second.total)
    return Distance(total((a - b) ** 2), total(a * a), total(b * b), total(a * b), summed)

  def __add__(self, other: Distance) -> Distance:
    return Distance(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

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
