"""Measures mpjax beside what one would use instead: python scripts/bench.py SUITE [options] [--json FILE].

Without a suite it runs `overhead`. `python scripts/bench.py SUITE --help` lists a suite's own options.
Needs the packages of `pip install -e ".[bench]"`; to compile for a device that is not there, those of
`plan-cuda` or `plan-tpu`.
"""

from __future__ import annotations

import argparse
import importlib
import pathlib
import sys
from collections.abc import Sequence
from types import ModuleType

INSTALL = 'the benchmarks need `pip install -e ".[bench]"`'
# What each suite measures, and the module that does: imported by itself, since it sets up JAX in its own way.
SUITES = {
  "config": ("what a step of a config of yours costs by policy", "config._suite"),
  "overhead": ("what a step costs beside hand-written ones and other libraries'", "overhead._suite"),
  "memory": ("peak memory by policy, batch and model size", "memory._suite"),
  "quality": ("evaluation loss by policy over several seeds", "quality._suite"),
  "gpu": ("speed and memory on a GPU, beside PyTorch", "gpu._suite"),
  "autocast": ("autocast beside casts by hand: compiled memory", "autocast._suite"),
  "loss_scale": ("what a loss scale costs in a compiled program", "loss_scale._suite"),
  "fp8_devices": ("what low precision costs and gains on each device, by its compiler", "fp8._devices"),
  "layerwise": ("a deep float16 network that only layer-wise scales train", "layerwise._suite"),
  "few_bytes": ("optimiser state and weights in few bytes: memory", "few_bytes._suite"),
  "large_vocabulary": ("the loss in chunks of rows beside that of whole logits", "large_vocabulary._suite"),
  "numerics": ("what an inspection of the numbers costs", "numerics._suite"),
  "plan": ("the analytic plan of memory beside a compiler's", "plan._accuracy"),
  "plan_measured": ("plans of memory beside what a GPU takes", "plan._measured"),
  "step_time": ("planned times of steps beside published rates and measured ones", "step_time._suite"),
  "scaling": ("weak scaling on 1 to 256 described chips", "scaling._suite"),
  "gather": ("when divided parameters are gathered: compiled memory and collectives", "gather._suite"),
  "tune": ("what a search for a policy finds", "tune._suite"),
  "chaos": ("training runs under faults, beside undisturbed twins", "chaos._suite"),
  "parity": ("whether two checkouts make the same programs", "parity._suite"),
  "mutations": ("small faults in mpjax, and which test finds each", "mutations._suite"),
}


def main(arguments: Sequence[str], prog: str = "python -m benchmarks") -> int:
  """Runs a suite; returns the exit status."""
  arguments = list(arguments)
  if not arguments or (arguments[0].startswith("-") and arguments[0] not in ("-h", "--help")):
    arguments = ["overhead", *arguments]
  parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").split("\n\n")[0])
  suites = parser.add_subparsers(dest="suite", metavar="SUITE", required=True)
  module = chosen = None
  for name, (text, where) in SUITES.items():
    suite = suites.add_parser(name, help=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if name == arguments[0]:
      module, chosen = _load(where), suite
      suite.description = module.__doc__
      module.add_arguments(suite)
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
    outcome = module.run(options)  # a report, or an exit status
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")
  if isinstance(outcome, int):
    return outcome
  importlib.import_module("benchmarks._record").write(outcome, options.json)
  return 0


def _load(where: str) -> ModuleType:
  try:
    return importlib.import_module(f"benchmarks.{where}")
  except ImportError as error:
    sys.exit(f"{error}: {INSTALL}")


if __name__ == "__main__":
  try:
    sys.exit(main(sys.argv[1:]))
  except KeyboardInterrupt:
    sys.exit(130)
