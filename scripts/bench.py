"""Measures mpjax beside what one would use instead: python scripts/bench.py SUITE [options] [--json FILE].

Suites: `overhead` (time, compiling and memory of a step by hand, by other libraries and by mpjax), `memory`
(peak by policy, batch and model size), `quality` (evaluation loss by policy over several seeds) and `gpu`
(speed on a GPU, beside PyTorch). Without a suite: `overhead`. `python scripts/bench.py SUITE --help` lists a
suite's own options. Needs the packages of `pip install -e ".[bench]"`.
"""

import argparse
import importlib
import pathlib
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
# The checkout that this file is in, installed or not.
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

INSTALL = 'the benchmarks need `pip install -e ".[bench]"`'
SUITES = {
  "overhead": "what a step costs beside hand-written ones and other libraries'",
  "memory": "peak memory by policy, batch and model size",
  "quality": "evaluation loss by policy over several seeds",
  "gpu": "speed and memory on a GPU, beside PyTorch",
}


def main(arguments: list[str]) -> int:
  """Runs a suite and returns an exit status."""
  if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
    arguments = ["overhead", *arguments]
  description = (__doc__ or "").split("\n\n")[0]
  parser = argparse.ArgumentParser(prog="bench.py", description=description)
  suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
  chosen = arguments[0]
  module = None
  for name, text in SUITES.items():
    suite = suites.add_parser(name, help=text)
    if name == chosen:
      # Of the one that runs alone: a suite's modules set up JAX, and the peers', in their own way.
      module = load(name)
      suite.description = (module.__doc__ or "").split("\n")[0]
      module.add_arguments(suite)
      suite.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the report goes")
  options = parser.parse_args(arguments)
  assert module is not None
  if options.json is not None and not options.json.parent.is_dir():
    parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
  if options.json is not None and options.json.is_dir():
    parser.error(f"--json {options.json}: a folder, expected a file")
  try:
    report = module.run(options)
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")
  load("record").write(report, options.json)
  return 0


def load(name: str) -> Any:
  """A module of the benchmarks."""
  try:
    return importlib.import_module(name)
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
