"""Runs in one process or several: what they agree on before the first step, and how they end."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import rich.console
import yaml

from mpjax.train.config._config import Config
from mpjax.train.config._differences import config_mismatch
from mpjax.train.config._plugins import plugin_digests
from mpjax.train.data import data_mismatch
from mpjax.train.loop._loop import TrainingRun
from mpjax.train.loop._output import LOGGER, Output
from mpjax.train.loop._progress import show_summary
from mpjax.train.loop._run_directory import RunDirectory
from mpjax.train.loop._trackers import Tracker, check_trackers
from mpjax.train.processes import Processes, code_mismatch, digest, versions
from mpjax.train.setup._setup import Setup, make_setup


def train_together(
  load: Callable[[], Config],
  processes: Processes,
  output: Output,
  console: rich.console.Console | None = None,
  trackers: Sequence[Tracker] = (),
) -> dict[str, Any]:
  """Does `mpjax.train.run` in one of several processes. Each process loads the config itself."""
  began = time.perf_counter()
  console = output.show_on(console, quiet=not processes.first)
  config, _ = processes.agree(load, _tell_config, _config_mismatch)
  processes.directory = pathlib.Path(str(config.out))

  def set_up() -> Setup:
    if processes.first:
      check_trackers(config)
    made = make_setup(config)
    made.check_step()
    return made

  # A run of one process does not need the text of its program, which is long.
  tell = _tell_setup if processes.count > 1 else lambda setup: None
  setup, _ = processes.agree(set_up, tell, _setup_mismatch)
  directory, summary = processes.agree(
    lambda: RunDirectory(config, owner=processes.first), lambda directory: directory.summary()
  )
  try:
    if processes.first:
      output.log_to(directory.path)
    if summary is not None:
      LOGGER.info("this run has finished already; choose another out= for a new one")
      show_summary(summary, directory.path)
      return summary
    return _train(TrainingRun(config, setup, directory, processes, console, trackers, began))
  finally:
    directory.close()


def _train(run: TrainingRun) -> dict[str, Any]:
  try:
    with run.storage_errors():
      summary = run.train()
  except BaseException as error:
    if run.processes.are_together(error):  # otherwise a pending write would wait for the others
      run.checkpoints.close()
    raise
  run.checkpoints.close()
  return summary


def _tell_config(config: Config) -> dict[str, Any]:
  return {"config": yaml.safe_load(config.to_yaml()), "code": versions() | plugin_digests()}


def _config_mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  differ = config_mismatch(first["config"], other["config"], process)
  return differ or code_mismatch(first["code"], other["code"], process)


def _tell_setup(setup: Setup) -> dict[str, Any]:
  return {"data": setup.info.fingerprint, "code": {"program of the step": digest(setup.program())}}


def _setup_mismatch(first: dict[str, Any], other: dict[str, Any], process: int) -> str | None:
  differ = data_mismatch(first["data"], other["data"], process)
  return differ or code_mismatch(first["code"], other["code"], process)
