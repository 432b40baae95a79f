"""`StepOptions`: the options of a training step other than its loss function and optimiser."""

from __future__ import annotations

import dataclasses

from mpjax._lazy import nnx
from mpjax.casting._casting_rules import require_recompute
from mpjax.dtypes import did_you_mean
from mpjax.policy import Policy
from mpjax.step._checks import require_honoured
from mpjax.step._layout import Layout
from mpjax.step._trained import Chosen

MODEL_STATES = ("last", "step")


@dataclasses.dataclass(frozen=True)
class StepOptions:
  """The options of a training step: arguments of `make_train_step`, which explains each.

  Its `mesh`, `sharding`, `gather` and `offload` are a `layout` here, `None` without a mesh.
  """

  policy: Policy
  wrt: Chosen | nnx.filterlib.Filter | None = None
  accumulate: int = 1
  skip_nonfinite: bool = False
  cast_batch: bool = True
  donate: bool = True
  recompute: str = "islands"
  layout: Layout | None = None
  grad_norm: bool = False
  model_state: str = "last"

  def __post_init__(self) -> None:
    n = self.accumulate
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
      raise ValueError(f"accumulate={n!r}: expected a positive integer")
    require_honoured(self.policy, over_devices=self.layout is not None)
    require_recompute(self.recompute)
    if self.model_state not in MODEL_STATES:
      raise ValueError(
        f"model_state={self.model_state!r}: expected one of {', '.join(MODEL_STATES)}"
        + did_you_mean(str(self.model_state), MODEL_STATES)
      )

  @property
  def shards(self) -> int:
    """The number of devices that share a batch."""
    return 1 if self.layout is None else self.layout.shards

  @property
  def filter(self) -> nnx.filterlib.Filter:
    """The filter for the parameters of an `nnx.Module`: `nnx.Param`, and what else `wrt` trains."""
    return nnx.Param if self.wrt is None else nnx.Any(nnx.Param, self.wrt)

  def __repr__(self) -> str:
    shown = [f"policy={self.policy.label!r}"]
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name not in ("policy", "wrt", "layout") and value != field.default:
        shown.append(f"{field.name}={value!r}")
    if self.layout is not None:
      shown.append(f"mesh={dict(self.layout.mesh.shape)}")
    return f"StepOptions({', '.join(shown)})"
