"""The report of an inspection as data, text, JSON and a page."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any

import jax

from mpjax._render.html_sections import Shown
from mpjax._render.text_sections import TextSection
from mpjax._version import __version__
from mpjax.formats import FORMATS
from mpjax.numerics._report_figures import NumericsFigures
from mpjax.numerics._seen import BINS, INTEREST
from mpjax.numerics.render import (
  answer,
  figures,
  plain_data,
  save_html,
  sections_of,
  verdict,
)

_TITLES = {"float8_e4m3fn": "E4M3", "float8_e5m2": "E5M2"}


@dataclasses.dataclass(frozen=True, repr=False)
class NumericsReport(Shown, NumericsFigures):
  """The report that `mpjax.inspect_numerics` returns; `str()` gives the short answer.

  ```python
  report = mpjax.inspect_numerics(loss_fn, params, batch, policy="fp16")
  print(report)  # the verdict, the findings, the policy to use
  print(report.table("modules"))  # one table; report.tables has the names
  print(report.error_by_module("weight gradient"))
  ```

  The attributes are those of `mpjax.numerics.NumericsFigures`.
  """

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data; numbers that are not finite are strings, as JSON has none."""
    formats = {
      name: {
        "title": _TITLES.get(name, name),
        "bits": FORMATS[name].bits,
        "max": FORMATS[name].max,
        "smallest_normal": FORMATS[name].smallest_normal,
        "smallest_subnormal": FORMATS[name].smallest_subnormal,
      }
      for name in INTEREST
    }
    advice = None
    if self.advice is not None:
      advice = {
        "policy": dict(self.advice.policy),
        "yaml": self.advice.yaml,
        "lines": [{"key": key, "buys": buys} for key, buys in self.advice.lines],
        "unchanged": self.advice.unchanged,
      }
    return plain_data(
      {
        "version": 1,
        "title": self.title,
        "policy": self.policy.full_label,
        "compute_dtype": self.policy.compute_dtype.name,
        "backend": jax.default_backend(),
        "versions": {"mpjax": __version__, "jax": jax.__version__},
        "loss_scale": self.loss_scale,
        "step": self.step,
        "batches": self.batches,
        "rows": self.rows,
        "loss": {"policy": self.loss, "reference": self.reference_loss},
        "bins": list(BINS),
        "formats": formats,
        "lost_updates": self.lost_updates(),
        "descent_quality": self.descent_quality,
        "tensors": [t.to_dict(self.loss_scale) for t in self.tensors],
        "verdict": {
          "text": verdict(self.findings, self.advice),
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
