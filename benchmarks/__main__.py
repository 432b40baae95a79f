"""Measures mpjax beside what one would use instead: python scripts/bench.py SUITE [options] [--json FILE].

`config` times a step of a config of yours. The other suites are the tables of benchmarks/README.md, and
`--match` chooses of their rows. `pip install -e ".[bench]"` has what they compare with; `plan-cuda` and
`plan-tpu` have the compilers of devices that are not there.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import _runner

INSTALL = 'the benchmarks need `pip install -e ".[bench]"`'
# What each suite measures; its module has that name.
SUITES = {
  "config": "what a step of a config of yours costs by policy",
  "memory": "peak memory of a training step by policy, batch and model size",
  "autocast": "autocast beside casts by hand: compiled memory",
  "ablation": "what each mechanism of autocast earns, on eight kinds of model",
  "large_vocabulary": "the loss in chunks of rows beside that of whole logits",
  "gather": "when divided parameters are gathered: compiled memory and collectives",
  "scaling": "weak scaling on 1 to 256 described chips",
  "few_bytes": "optimiser state and weights in few bytes: memory",
  "quality": "evaluation loss by policy over several seeds",
  "overhead": "what a step costs beside hand-written ones and other libraries'",
  "loss_scale": "what a loss scale costs in a compiled program",
  "layerwise": "a deep float16 network that only layer-wise scales train",
  "fp8_devices": "what low precision costs and gains on each device, by its compiler",
  "plan_accuracy": "the analytic plan of memory beside a compiler's",
  "step_time": "planned times of steps beside published rates",
  "numerics": "what an inspection of the numbers costs",
  "tune": "what a search for a policy finds",
  "gpu": "a step on this GPU beside PyTorch's",
  "chaos": "training runs under faults, beside undisturbed twins",
  "parity": "whether two checkouts make the same programs and plans",
}


def main(arguments: Sequence[str], prog: str = "python -m benchmarks") -> int:
  """Runs a suite; returns the exit status."""
  parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n")[0])
  suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
  module = chosen = None
  for name, text in SUITES.items():
    suite = suites.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if [name] == list(arguments[:1]):
      module, chosen = _load(name), suite
      suite.description = module.__doc__
      getattr(module, "add_arguments", _runner.add_arguments)(suite)
      suite.add_argument("--json", type=pathlib.Path, metavar="FILE", help="where the report goes")
  if module is None or chosen is None:
    parser.parse_args(arguments)  # help, or an error
    return 2
  options = chosen.parse_intermixed_args(arguments[1:])
  if options.json is not None and not options.json.parent.is_dir():
    parser.error(f"--json {options.json}: there is no folder {options.json.parent}")
  if options.json is not None and options.json.is_dir():
    parser.error(f"--json {options.json}: a folder, expected a file")
  try:
    rows = hasattr(module, "rows")
    outcome = _runner.run(module, arguments[0], options) if rows else module.run(options)
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")
  if isinstance(outcome, int):
    return outcome
  _runner.write(outcome, options.json)
  return 0


def _load(name: str) -> Any:
  try:
    return importlib.import_module(f"benchmarks.{name}")
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
