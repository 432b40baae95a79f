"""A run directory as a value: its config, facts about its data, its states. Reading changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
from typing import Any

import pydantic

from mpjax.registry._info import DataInfo
from mpjax.train._errors import CheckpointError, ConfigError
from mpjax.train.checkpoints import Checkpoints, Restored
from mpjax.train.config._config import Config
from mpjax.train.config._config_file import load_config
from mpjax.train.data import load_data
from mpjax.train.setup._experiment import Experiment, Place

FACTS = "facts.json"


class SavedRun:
  """A run, which may be in progress.

  Attributes:
    directory: its directory.
    config: its config.

  Raises:
    ConfigError: if the directory has no config, or a damaged one.
  """

  def __init__(self, directory: str | pathlib.Path):
    self.directory = pathlib.Path(directory)
    if not (self.directory / "config.yaml").is_file():
      raise ConfigError(f"{directory} is not a run directory (no config.yaml)")
    self.config = load_config(self.directory)

  def experiment(self, at: Place) -> Experiment:
    """Returns what the run computes, at another place: what decides the shapes of its states.

    Raises:
      DataError: if the directory has no facts about the data, and the data cannot be read either.
    """
    config = self.config.with_any_attention()
    return Experiment(config, facts_of(config, self.directory), config.resolve_policy(), at)

  def restore(self, which: str, experiment: Experiment) -> Restored:
    """Returns a checkpoint.

    Args:
      which: `"best"` (lowest evaluation loss), `"latest"`, or a step number as text.
      experiment: has the shapes, dtypes and shardings of the state.

    Raises:
      CheckpointError: if it is damaged, not finite, or not like the experiment's states.
      ConfigError: if there is no such checkpoint.
    """
    folder = self.directory / "checkpoints"
    with contextlib.closing(Checkpoints(folder, read_only=True)) as checkpoints:
      steps = checkpoints.steps()
      step = {"best": checkpoints.best(), "latest": checkpoints.latest()}.get(which)
      if step is None and which.isdecimal() and int(which) in steps:
        step = int(which)
      if step is None:
        there = f"{', '.join(map(str, steps))}, best, latest" if steps else "none"
        raise ConfigError(f"{self.directory} has no checkpoint {which!r}: there are {there}")
      try:
        return checkpoints.restore(step, experiment.shapes()[0])
      except CheckpointError:
        if (folder / str(step)).exists():
          raise
    return self.restore(which, experiment)  # the run has deleted it meanwhile


def facts_of(config: Config, source: Any = None) -> DataInfo:
  """Returns the facts about a config's data.

  Args:
    config: the config.
    source: what it was loaded from. The facts are those of a run directory, if they are of the same data.

  Raises:
    DataError: if they are to be read from the data, which is missing or cannot be used.
  """
  with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # other contents, or none
    saved = json.loads((pathlib.Path(source) / FACTS).read_bytes())
    if saved["data"] == _which(config):
      return pydantic.TypeAdapter(DataInfo).validate_python(saved["info"])
  # One row is enough to see the shapes.
  return load_data(config.data.model_copy(update={"batch_size": 1, "workers": 0}), seed=config.seed).info


def facts_text(config: Config, info: DataInfo) -> str:
  """Returns the contents of `facts.json`, with which tools and exports need no data."""
  return json.dumps({"data": _which(config), "info": dataclasses.asdict(info)}, indent=1) + "\n"


def _which(config: Config) -> dict[str, Any]:
  """Returns the keys that decide what the facts are."""
  ours = ("batch_size", "eval_batches", "workers")
  return {key: value for key, value in config.tree["data"].items() if key not in ours}
