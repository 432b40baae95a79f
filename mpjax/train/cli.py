"""The command lines of `scripts/`: arguments in, exit statuses out.

Statuses: 0 the run finished; 2 a config, data or usage error (one line on stderr); 3 stopped because every
step was skipped; 130 Ctrl-C and 143 SIGTERM, after a checkpoint was saved.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mpjax.train import loop
from mpjax.train.config import ConfigError, load_config
from mpjax.train.data import DataError
from mpjax.train.export import export_run
from mpjax.train.interrupt import Interrupted
from mpjax.train.setup import make_setup


def train(arguments: Sequence[str]) -> int:
  """`scripts/train.py`; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="train.py",
    description="Train what a YAML config says; the same command again resumes an unfinished run.",
    epilog="example: train.py configs/gpt_stdlib.yaml policy=fp16 train.steps=200 out=runs/x",
  )
  parser.add_argument("config", help="a YAML file, such as configs/gpt_stdlib.yaml")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that override the file")
  options = parser.parse_args(arguments)

  return guarded(lambda: loop.train(load_config(options.config, options.overrides)))


def export(arguments: Sequence[str]) -> int:
  """`scripts/export.py`; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="export.py", description="Write the parameters of a run's checkpoint as safetensors."
  )
  parser.add_argument("directory", help="a run directory")
  parser.add_argument("options", nargs="*", metavar="key=value", help="dtype=, step=best|latest|N, out=FILE")
  options = parser.parse_args(arguments)

  def run() -> None:
    pairs = dict(option.partition("=")[::2] for option in options.options)
    unknown = pairs.keys() - {"dtype", "step", "out"}
    if unknown:
      raise ConfigError(f"unknown key {min(unknown)!r}: expected dtype, step or out")
    print(f"exported {export_run(options.directory, **pairs)}")

  return guarded(run)


def explain(arguments: Sequence[str]) -> int:
  """`scripts/explain.py`; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="explain.py",
    description="Say what runs in which dtype under a config's policy, by module, and why. Computes nothing.",
    epilog="example: explain.py configs/gpt_stdlib.yaml policy=fp16",
  )
  parser.add_argument("config", help="a YAML file, such as configs/gpt_stdlib.yaml")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that override the file")
  options = parser.parse_args(arguments)

  def run() -> None:
    setup = make_setup(load_config(options.config, options.overrides))
    print(setup.explain())
    if not setup.policy.autocast and setup.policy.compute_dtype.itemsize < 4:
      print("\nautocast: false in the policy: a run casts parameters and batch instead")

  return guarded(run)


def guarded(run: Callable[[], object]) -> int:
  """Runs a command; its errors become one line on stderr and an exit status."""
  try:
    run()
  except (ConfigError, DataError) as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  except loop.Stuck as error:
    print(f"error: {error}", file=sys.stderr)
    return 3
  except Interrupted as error:
    print(error, file=sys.stderr)
    return 128 + error.signum
  except KeyboardInterrupt:
    print("interrupted", file=sys.stderr)
    return 130
  return 0
