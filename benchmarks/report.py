"""Writes the tables and pictures of benchmarks/README.md and docs/ from benchmarks/results.

    python -m benchmarks.report

A table stands between `<!-- name -->` and `<!-- end -->`, where `name.json` is the report of the suite of
that name, or one that was made once.
"""

from __future__ import annotations

import functools
import importlib
import json
import pathlib
import re
from typing import Any

from benchmarks import _headlines, _measured_on_gpus, ablation, layerwise
from benchmarks.__main__ import SUITES
from benchmarks._runner import ROOT, provenance
from mpjax._render.picture_style import save_figure

RESULTS = ROOT / "benchmarks" / "results"
PAGES = (ROOT / "benchmarks" / "README.md", ROOT / "docs" / "benchmarks.md")
# Reports that no suite of their name makes.
OTHERS = _measured_on_gpus.TABLES | {"ablation_v5e": ablation.table}
_BLOCK = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@functools.cache
def read(name: str) -> dict[str, Any]:
  """A committed report."""
  report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
  return report


def table(name: str) -> str:
  """What stands under a name."""
  if name == "headlines":
    return _headlines.table(_headlines.headlines(read))
  if name in SUITES:
    made = importlib.import_module(f"benchmarks.{name}").table(read(name))
  else:
    made = OTHERS[name](read(name))
  return f"{made}\n\n{provenance(read(name))}"


def written(page: pathlib.Path) -> str:
  """The text of a page with its tables as the reports have them."""
  return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}\n{table(found[1])}\n\n", page.read_text())


def main() -> None:
  """Writes all tables and pictures."""
  for page in PAGES:
    page.write_text(written(page))
  save_figure(
    _headlines.picture(_headlines.headlines(read)), ROOT / "benchmarks" / "pictures" / "headlines.png"
  )
  save_figure(layerwise.pictures(read("layerwise"))["layerwise"], ROOT / "docs" / "layerwise.png")


if __name__ == "__main__":
  main()
