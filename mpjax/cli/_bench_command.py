"""`mpjax bench`: the benchmarks of a checkout; the wheel does not contain them."""

from __future__ import annotations

import importlib
import pathlib
import sys
from collections.abc import Sequence

import mpjax


def run(arguments: Sequence[str], prog: str) -> int:
  """Runs the `benchmarks` of the checkout around the package or in this folder; returns the exit status."""
  for root in (pathlib.Path(mpjax.__file__).resolve().parents[1], pathlib.Path.cwd()):
    if (root / "pyproject.toml").is_file() and (root / "benchmarks" / "__main__.py").is_file():
      sys.path.insert(0, str(root))
      status: int = importlib.import_module("benchmarks.__main__").main(list(arguments), prog)
      return status
  print(f"error: {prog}: run it from a checkout of mpjax, which has the folder benchmarks/", file=sys.stderr)
  return 2
