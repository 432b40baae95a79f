"""`mpjax train`: a config to a trained model, in one process or several."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mpjax.cli._config_arguments import add_config, parse, warn_of_policy
from mpjax.cli._exit_status import outcome_of
from mpjax.train import Config, ConfigError, load_config, load_plugins
from mpjax.train._config_file import read_waits
from mpjax.train._output import Output
from mpjax.train._together import train_together
from mpjax.train.multiprocess import Flags, start


def run(arguments: Sequence[str], prog: str) -> int:
  """Runs the command and returns its exit status."""
  parser = argparse.ArgumentParser(
    prog=prog,
    description="Train what a YAML config says; the same command again resumes an unfinished run.",
    epilog=f"example: {prog} gpt_stdlib policy=fp16 train.steps=200 out=runs/x",
  )
  add_config(parser)
  group = parser.add_argument_group(
    "several processes", "one command each; without these, as Slurm, Kubernetes, Cloud TPU or Open MPI say"
  )
  group.add_argument("--coordinator", metavar="HOST:PORT", help="of process 0; the port is free there")
  group.add_argument("--num-processes", metavar="N", type=int, help="how many there are")
  group.add_argument("--process-id", metavar="I", type=int, help="which one this is, from 0")
  options = parse(parser, list(arguments))
  flags = Flags(options.coordinator, options.num_processes, options.process_id)
  with Output() as output:
    return _train(options, flags, output)


def _train(options: argparse.Namespace, flags: Flags, output: Output) -> int:
  try:
    processes = start(flags, read_waits(options.config, options.overrides))
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2

  def load() -> Config:
    load_plugins(options.plugin)
    config = load_config(options.config, options.overrides)
    if processes.process == 0:
      warn_of_policy(config.policy)
    return config

  return processes.end(lambda: train_together(load, processes, output), outcome_of)
