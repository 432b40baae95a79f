"""The command lines of `scripts/`: arguments in, exit statuses out.

Statuses: 0 the run finished; 2 a config, data or usage error (one line on stderr); 3 stopped because every
step was skipped; 4 a checkpoint or another file of the run could not be written, or no checkpoint can be
read; 5 another process of the run was lost, or nothing moved for `distributed.hang_timeout_s`; 130 Ctrl-C and
143 SIGTERM, after a checkpoint was saved. Of several processes each ends with the status of the one that
ended the run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from mpjax.train import _loop
from mpjax.train._config import ConfigError, load_config, read_waits
from mpjax.train._export import export_run
from mpjax.train._meshes import on_devices_here
from mpjax.train._setup import make_setup
from mpjax.train.multiprocess import _start
from mpjax.train.multiprocess._interrupt import Interrupted
from mpjax.train.multiprocess._processes import Agreed, status_of


def train(arguments: Sequence[str]) -> int:
  """`scripts/train.py`; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="train.py",
    description="Train what a YAML config says; the same command again resumes an unfinished run.",
    epilog="example: train.py configs/gpt_stdlib.yaml policy=fp16 train.steps=200 out=runs/x",
  )
  parser.add_argument("config", help="a YAML file, such as configs/gpt_stdlib.yaml")
  parser.add_argument("overrides", nargs="*", metavar="key=value", help="dotted keys that override the file")
  group = parser.add_argument_group(
    "several processes", "one command each; without these, as Slurm, Kubernetes, Cloud TPU or Open MPI say"
  )
  group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; the port is free there")
  group.add_argument("--num-processes", metavar="N", type=int, help="how many there are")
  group.add_argument("--process-id", metavar="I", type=int, help="which one this is, from 0")
  options = parser.parse_intermixed_args(arguments)
  flags = _start.Flags(options.coordinator, options.num_processes, options.process_id)

  try:
    processes = _start.start(flags, read_waits(options.config, options.overrides))
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2
  load = lambda: load_config(options.config, options.overrides)
  return processes.end(lambda: _loop.train_together(load, processes), _outcome)


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
    setup = make_setup(on_devices_here(load_config(options.config, options.overrides)))
    print(setup.explain())
    if not setup.policy.autocast and setup.policy.compute_dtype.itemsize < 4:
      print("\nautocast: false in the policy: a run casts parameters and batch instead")

  return guarded(run)


def guarded(run: Callable[[], object]) -> int:
  """Runs a command; its errors become one line on stderr and an exit status."""
  try:
    run()
  except BaseException as error:
    outcome = _outcome(error)
    if outcome is None:
      raise
    status, line = outcome
    print(line, file=sys.stderr)
    return status
  return 0


def _outcome(error: BaseException) -> tuple[int, str] | None:
  """Exit status and line of an error; `None` for one that is not expected."""
  if isinstance(error, Interrupted):
    return 128 + error.signum, str(error)
  if isinstance(error, KeyboardInterrupt):
    return 130, "interrupted"
  status = 3 if isinstance(error, _loop.Stuck) else status_of(error)
  if isinstance(error, Agreed):
    status = error.status
  return None if status is None else (status, f"error: {error}")
