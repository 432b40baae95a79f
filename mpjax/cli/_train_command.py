"""`mpjax train`: trains a config's model, in one process or several."""

from __future__ import annotations

import argparse
import io
import sys

from mpjax.cli._exit_status import outcome_of
from mpjax.cli._start_processes import Flags, start
from mpjax.policy import bare_dtype_advice
from mpjax.train import Config, ConfigError, load_config, load_plugins
from mpjax.train.config._config_file import read_waits
from mpjax.train.loop._output import LOGGER, Output
from mpjax.train.loop._run import train_together


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""
  if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it lacks appears as its code
    sys.stdout.reconfigure(errors="backslashreplace")
  with Output() as output:
    return _train(options, output)


def _train(options: argparse.Namespace, output: Output) -> int:
  flags = Flags(options.coordinator, options.num_processes, options.process_id)
  try:
    processes = start(flags, read_waits(options.config, options.overrides), options.interrupt)
  except ConfigError as error:
    print(f"error: {error}", file=sys.stderr)
    return 2

  def load() -> Config:
    load_plugins(options.plugin)
    config = load_config(options.config, options.overrides)
    advice = bare_dtype_advice(config.policy)
    if processes.first and advice is not None:
      LOGGER.warning(f"warning: {advice}")
    return config

  return processes.end(lambda: train_together(load, processes, output), outcome_of)
