"""One inspected tensor: its magnitudes, and its error against float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

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
    norm: norm of float32's values over all batches; `None` if not known.
    lost: share of the nonzero updates that do not change the weight, for weights in `bfloat16` and `float16`
      (rounded to nearest), and in bfloat16 with the corrections `int8` (on average) and `int16`.
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
  norm: float | None = None
  lost: Mapping[str, float] | None = None
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
  def not_finite(self) -> bool:
    """Whether it has NaN or infinity under the policy."""
    nan, inf = (self.magnitudes.nan, self.magnitudes.inf) if self.policy is None else self.policy[:2]
    return nan + inf > 0

  def to_dict(self, loss_scale: float) -> dict[str, Any]:
    """Returns plain data, as in the report's JSON."""
    m = self.magnitudes
    below, counts = m.histogram
    shares = lambda scale: {name: m.shares(name, scale)._asdict() for name in INTEREST}
    own = self.policy and dict(zip(("nan", "inf", "zero"), self.policy, strict=True))
    return {
      **{key: value for key, value in vars(self).items() if key not in ("magnitudes", "index")},
      **{"count": m.count, "nan": m.nan, "inf": m.inf, "zero": m.zero, "below": below, "counts": counts},
      "shares": shares(1.0),
      "scaled_shares": shares(loss_scale) if self.kind in GRADIENTS else None,
      "policy": own,
    }
