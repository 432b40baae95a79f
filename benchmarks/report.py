"""Writes the tables and the picture of benchmarks/README.md from benchmarks/results.

    python -m benchmarks.report

A table stands between `<!-- name -->` and `<!-- end -->`, where `name.json` is the report of the suite of
that name, or one that was made once.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any

from benchmarks import _headlines
from benchmarks.__main__ import SUITES
from benchmarks._picture_style import save_figure
from benchmarks._runner import ROOT, markdown, provenance

RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "benchmarks" / "README.md"
_BLOCK = re.compile(r"(?<=<!-- )(?!end )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@functools.cache
def read(name: str) -> dict[str, Any]:
  """A committed report."""
  report: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
  return report


def table(name: str) -> str:
  """What stands under a name."""
  if name in SUITES:
    made = importlib.import_module(f"benchmarks.{name}").table(read(name))
  else:
    made = OTHERS[name](read(name))
  return f"{made}\n\n{provenance(read(name))}"


def measured_once(report: dict[str, Any]) -> str:
  """A GPT's steps on a GPU beside each other."""
  (model,) = report["models"].values()
  lines = [
    [name, f"{1e3 * row['seconds']:.1f}", f"{row['units_per_s']:.0f}", f"{row['peak_bytes'] / 1e9:.1f}"]
    for name, row in model["rows"].items()
    if "seconds" in row
  ]
  return markdown([model["title"], "ms", "tokens/s", "peak GB"], lines)


# Reports that no suite of their name makes.
OTHERS = {
  "gpu_h200_124m": measured_once,
  "gpu_h200_1b": measured_once,
}


def written() -> str:
  """The text of the page with its tables as the reports have them."""
  return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}{table(found[1])}\n", PAGE.read_text())


def main() -> None:
  """Writes all tables, and the picture."""
  PAGE.write_text(written())
  picture = _headlines.picture(_headlines.headlines(read))
  save_figure(picture, ROOT / "benchmarks" / "pictures" / "headlines.png")


if __name__ == "__main__":
  main()
