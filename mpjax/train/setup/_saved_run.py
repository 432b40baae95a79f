"""Reads the config and a checkpoint of a run directory, and changes nothing there."""

from __future__ import annotations

import contextlib
import pathlib

from mpjax.step import TrainState
from mpjax.train._errors import CheckpointError, ConfigError
from mpjax.train.checkpoints import Checkpoints, quiet
from mpjax.train.checkpoints._checkpoints import Restored
from mpjax.train.config._config import Config
from mpjax.train.config._config_file import load_config


def run_config(directory: pathlib.Path) -> Config:
  """Returns the config of a run directory.

  Raises:
    ConfigError: if there is none, or it is damaged.
  """
  file = directory / "config.yaml"
  if not file.is_file():
    raise ConfigError(f"{directory} is not a run directory (no config.yaml)")
  return load_config(file)


def read_checkpoint(directory: pathlib.Path, which: str, like: TrainState) -> Restored:
  """Returns a checkpoint of a run, which may be in progress.

  Args:
    directory: the run directory.
    which: `"best"` (lowest evaluation loss), `"latest"`, or a step number as text.
    like: the shapes, dtypes and shardings of the state.

  Raises:
    CheckpointError: if it is damaged, not finite, or not like `like`.
    ConfigError: if there is no such checkpoint.
  """
  with quiet(), contextlib.closing(Checkpoints(directory / "checkpoints", read_only=True)) as checkpoints:
    steps = checkpoints.steps()
    step = {"best": checkpoints.best(), "latest": checkpoints.latest()}.get(which)
    if step is None and which.isdecimal() and int(which) in steps:
      step = int(which)
    if step is None:
      there = f"{', '.join(map(str, steps))}, best, latest" if steps else "none"
      raise ConfigError(f"{directory} has no checkpoint {which!r}: there are {there}")
    try:
      return checkpoints.restore(step, like)
    except CheckpointError:
      if (directory / "checkpoints" / str(step)).exists():
        raise
  return read_checkpoint(directory, which, like)  # the run has deleted it meanwhile
