"""The data of an inspection, and what follows from it: what a report shows, and what advice is made of."""

from __future__ import annotations

import dataclasses

from mpjax._render.plain_text import power_of_two_text
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._tensors import KINDS, Tensor, descent_quality, share_lost
from mpjax.policy import Policy


@dataclasses.dataclass(frozen=True, repr=False)
class NumericsFigures:
  """The data of a report.

  Attributes:
    title: what was inspected.
    policy: the policy.
    loss_scale: the loss scale of the run; 1 without loss scaling.
    step: number of training steps before the state.
    batches, rows: numbers of inspected batches and rows.
    rows_given: number of rows of these batches.
    loss: mean loss under the policy over batches.
    reference_loss: mean loss in float32; `None` without a float32 run.
    tensors: the tensors, sorted by kind and position in the program.
    keep: share of nonzero gradients that a loss scale should keep in range.
    narrow_reference: modules that compute in less than float32 in the float32 run, by the model's own casts.
    own_scale: whether the optimiser itself scales the loss; then a policy does not change the loss scale.
    findings: the findings, problems first.
    advice: the policy to use instead; `None` before it is known.
  """

  title: str
  policy: Policy
  loss_scale: float
  step: int
  batches: int
  rows: int
  rows_given: int
  loss: float
  reference_loss: float | None
  tensors: tuple[Tensor, ...]
  keep: float = 0.999
  narrow_reference: tuple[str, ...] = ()
  own_scale: bool = False
  findings: tuple[Finding, ...] = ()
  advice: Advice | None = None

  def __post_init__(self) -> None:
    place = {kind: i for i, kind in enumerate(KINDS)}
    ordered = sorted(self.tensors, key=lambda t: (place[t.kind], t.order))
    object.__setattr__(self, "tensors", tuple(ordered))

  def of(self, kind: str, module: str | None = None) -> list[Tensor]:
    """Returns the tensors of a kind, in program order; only those of `module` if it is given."""
    return [t for t in self.tensors if t.kind == kind and module in (None, t.module)]

  def lost(self, kind: str, name: str, scale: float | None = 1.0) -> float:
    """Returns the share of a kind's values that a format rounds to zero; see `share_lost`."""
    return share_lost(self.of(kind), name, scale)

  def lost_updates(self) -> dict[str, float]:
    """Returns the share of the step's nonzero updates that weights of each format lose.

    The keys are `bfloat16`, `float16`, `int8` and `int16`, as in `Tensor.lost`, and `stochastic`, which loses
    nothing on average. Empty without updates.
    """
    moved = [t for t in self.of("update") if t.lost and t.moved]
    total = sum(t.moved for t in moved)
    if not moved:
      return {}
    names = moved[0].lost or {}
    shares = {name: sum((t.lost or {})[name] * t.moved for t in moved) / total for name in names}
    return shares | {"stochastic": 0.0}

  @property
  def descent_quality(self) -> float | None:
    """The share of the updates' intended descent that the weights make in their own formats.

    `<actual update, intended update> / |intended update|^2` over all parameters: 1 if nothing is lost, 0 if
    no weight moves along it (the effective descent quality of arXiv 2405.18710). `None` without updates.
    """
    return descent_quality(self.of("update"))

  def descent_quality_in(self, held: str) -> float | None:
    """Returns `descent_quality` for weights in another format: `bfloat16`, `float16`, `int8`..."""
    return descent_quality(self.of("update"), held)

  def error_by_module(self, kind: str) -> dict[str, float]:
    """Returns the largest error against float32 in each module, in program order."""
    worst: dict[str, float] = {}
    for tensor in self.of(kind):
      if tensor.error is not None:
        worst[tensor.module] = max(worst.get(tensor.module, 0.0), tensor.error)
    return worst

  def heading(self) -> list[str]:
    """Returns two lines that say what was inspected."""
    title = f"numerics of {self.title}" if self.title else "numerics"
    against = "" if self.reference_loss is None else f" (float32: {self.reference_loss:.6g})"
    scale = f"loss scale {power_of_two_text(self.loss_scale)}" if self.loss_scale != 1 else "no loss scale"
    return [
      f"{title}: policy {self.policy.full_label}, {self.batches_text()}, step {self.step}",
      f"loss {self.loss:.6g}{against}, {scale}",
    ]

  def batches_text(self) -> str:
    """Returns the numbers of inspected batches and rows, in words."""
    rows = f"{self.rows}" if self.rows == self.rows_given else f"{self.rows} of {self.rows_given}"
    return f"{'1 batch' if self.batches == 1 else f'{self.batches} batches'} ({rows} rows)"
