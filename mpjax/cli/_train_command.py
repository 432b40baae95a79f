"""`mpjax train`: trains a config's model, in one process or several."""

from __future__ import annotations

import argparse

from mpjax.cli._exit_status import outcome_of
from mpjax.cli._start_processes import Flags, start
from mpjax.policy import bare_dtype_advice
from mpjax.train import Config, load_config, load_plugins
from mpjax.train.config._config_file import read_waits
from mpjax.train.loop._output import LOGGER, Output
from mpjax.train.loop._run import train_together


def run(options: argparse.Namespace) -> int:
  """Runs the command and returns its exit status."""
  flags = Flags(options.coordinator, options.num_processes, options.process_id)
  processes = start(flags, read_waits(options.config, options.overrides), options.interrupt)

  def load() -> Config:
    load_plugins(options.plugin)
    config = load_config(options.config, options.overrides)
    advice = bare_dtype_advice(config.policy)
    if processes.first and advice is not None:
      LOGGER.warning(f"warning: {advice}")
    return config

  with Output() as output:
    return processes.end(lambda: train_together(load, processes, output), outcome_of)
