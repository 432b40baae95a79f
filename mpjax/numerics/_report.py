"""The report of an inspection: its data, and what follows from them."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from mpjax._render.html_sections import Shown
from mpjax._render.plain_data import plain_data
from mpjax._render.text_sections import TextSection
from mpjax._version import __version__
from mpjax.formats import FORMATS
from mpjax.numerics._conclusions import Advice, Finding
from mpjax.numerics._seen import BINS, INTEREST
from mpjax.numerics._tensors import KINDS, Tensor, descent_quality, share_lost
from mpjax.numerics.render import answer, figures, save_html, sections_of, verdict
from mpjax.policy import Policy

_TITLES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}


@dataclasses.dataclass(frozen=True, repr=False)
class NumericsReport(Shown):
  """The report that `mpjax.inspect_numerics` returns; `str()` gives the short answer.

  ```python
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy="fp16")
  print(report)  # the verdict, the findings, the policy to use
  print(report.table("modules"))  # one table; report.tables has the names
  print(report.error_by_module("weight gradient"))
  ```

  Attributes:
    title: what was inspected.
    policy: the policy.
    loss_scale: the loss scale of the run; 1 without loss scaling.
    step: number of training steps before the state.
    batches, rows: numbers of inspected batches and rows.
    loss: mean loss under the policy over batches.
    reference_loss: mean loss in float32; `None` without a float32 run.
    tensors: the tensors, sorted by kind and position in the program.
    keep: share of nonzero gradients that a loss scale should keep in range.
    narrow_reference: modules that compute in less than float32 in the float32 run, by the model's own casts.
    own_scale: whether the optimiser itself scales the loss; then a policy does not change the loss scale.
    findings: the findings, problems first, then in the order of the program.
    advice: the policy to use instead; `None` if it was not asked for.
    rows_left_out: number of rows of these batches that did not fit in memory.
  """

  title: str
  policy: Policy
  loss_scale: float
  step: int
  batches: int
  rows: int
  loss: float
  reference_loss: float | None
  tensors: tuple[Tensor, ...]
  keep: float = 0.999
  narrow_reference: tuple[str, ...] = ()
  own_scale: bool = False
  findings: tuple[Finding, ...] = ()
  advice: Advice | None = None
  rows_left_out: int = 0

  def __post_init__(self) -> None:
    ordered = sorted(self.tensors, key=lambda t: (KINDS.index(t.kind), t.order))
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
    moved = [(t.moved, t.lost) for t in self.of("update") if t.lost and t.moved]
    total = sum(count for count, _ in moved)
    shares = {
      name: sum(count * lost[name] for count, lost in moved) / total for _, one in moved for name in one
    }
    return shares | {"stochastic": 0.0} if moved else {}

  @property
  def descent_quality(self) -> float | None:
    """The share of the updates' intended descent that the weights make in their own formats.

    `<actual update, intended update> / |intended update|^2` over all parameters: 1 if nothing is lost, 0 if
    no weight moves along it (the effective descent quality of arXiv 2405.18710). `None` without updates.
    """
    return self.descent_quality_in(None)

  def descent_quality_in(self, held: str | None) -> float | None:
    """Returns `descent_quality` for weights in another format: `bfloat16`, `float16`, `int8`..."""
    return descent_quality(self.of("update"), held)

  def error_by_module(self, kind: str) -> dict[str, float]:
    """Returns the largest error against float32 in each module, in program order."""
    worst: dict[str, float] = {}
    for tensor in self.of(kind):
      if tensor.error is not None:
        worst[tensor.module] = max(worst.get(tensor.module, 0.0), tensor.error)
    return worst

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data; numbers that are not finite are strings, as JSON has none."""
    edges = ("bits", "max", "smallest_normal", "smallest_subnormal")
    formats = {
      name: {"title": _TITLES.get(name, name), **{edge: getattr(FORMATS[name], edge) for edge in edges}}
      for name in INTEREST
    }
    advice = self.advice and {
      "policy": self.advice.policy,
      "yaml": self.advice.yaml,
      "lines": [{"key": key, "buys": buys} for key, buys in self.advice.lines],
      "unchanged": self.advice.unchanged,
    }
    same = ("title", "loss_scale", "step", "batches", "rows", "rows_left_out", "descent_quality")
    return plain_data(
      {
        "version": 1,
        **{name: getattr(self, name) for name in same},
        "policy": self.policy.full_label,
        "compute_dtype": self.policy.compute_dtype.name,
        "backend": jax.default_backend(),
        "versions": {"mpjax": __version__, "jax": jax.__version__},
        "loss": {"policy": self.loss, "reference": self.reference_loss},
        "bins": BINS,
        "formats": formats,
        "lost_updates": self.lost_updates(),
        "tensors": [t.to_dict(self.loss_scale) for t in self.tensors],
        "verdict": {
          "text": verdict(self),
          "good": all(f.severity != "problem" for f in self.findings),
          "figures": [figure.to_dict() for figure in figures(self)],
        },
        "findings": [dataclasses.asdict(f) for f in self.findings],
        "advice": advice,
      }
    )

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_dict` as JSON."""
    path = pathlib.Path(path)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(self.to_dict(), allow_nan=False) + "\n")
    temporary.replace(path)

  def save_html(self, path: str | os.PathLike[str]) -> None:
    """Writes one page that needs nothing else and asks nothing of the network."""
    save_html(self.to_dict(), path)

  def _answer(self) -> list[str]:
    return answer(self)

  def _sections(self) -> list[TextSection]:
    return sections_of(self)
