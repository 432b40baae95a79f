"""A config's training step with trained parameters and real batches: for `mpjax numerics` and `tune`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator

import jax
import numpy as np

from mpjax._types import PyTree
from mpjax.policy import get_policy
from mpjax.step import TrainState, TrainStep
from mpjax.train import Config, ConfigError, make_setup
from mpjax.train.config._config_file import find_config
from mpjax.train.setup._experiment import Experiment, Place, Setup
from mpjax.train.setup._saved_run import SavedRun

_REFERENCE = {"base": "fp32", "matmul_precision": "highest"}


class Subject:
  """A training step to inspect, and its state.

  Attributes:
    step: the training step under the config's policy.
    state: its state; `train` updates it.
    reference: the training step in float32.
  """

  def __init__(self, setup: Setup, state: TrainState, batches: Iterator[PyTree]):
    self._setup, self._batches = setup, batches
    self.step: TrainStep = setup.step
    self.state = state
    self.reference = Experiment(setup.config, setup.info, get_policy(_REFERENCE), Place(None)).step

  @property
  def parameters(self) -> int:
    """Returns the number of trained parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(self.state.arrays))

  def next_batch(self) -> PyTree:
    """Returns the next training batch, on the devices."""
    return self.place(next(self._batches))

  def place(self, batch: PyTree) -> PyTree:
    """Puts a batch from the host on the devices."""
    return self._setup.place(batch)

  def train(self) -> None:
    """Takes one training step."""
    self.state, _ = self.step(self.state, self.next_batch())
    jax.block_until_ready(self.state.step)


def open_subject(config: Config, checkpoint: str | None) -> Subject:
  """Builds a config's step with its first state, or with a checkpoint's state and the batches after it.

  Args:
    config: the config; its policy may differ from the run's.
    checkpoint: a run directory, for its newest checkpoint, or one of the folders in its `checkpoints/`.

  Raises:
    ConfigError: if there is no such checkpoint, or it belongs to another model.
    DataError: if data is missing or cannot be used.
  """
  setup = make_setup(config, Place.of_tools(config))
  batches = setup.data.train()
  if checkpoint is None:
    return Subject(setup, setup.first_state(), batches)
  run, step = locate(checkpoint)
  # The run's own policy and optimiser decide the shape of the saved state.
  saved = SavedRun(run)
  theirs = saved.config
  models = [(each.model.model_dump(), each.data.kind) for each in (theirs, config)]
  if models[0] != models[1]:
    raise ConfigError(
      f"checkpoint={checkpoint} is of another model or data {models[0]} than the config's {models[1]}: give "
      "the run directory in place of the config"
    )
  # On the devices of this machine, whatever the run used.
  original = saved.experiment(setup.at)
  restored = saved.restore("latest" if step is None else str(step), original)
  if restored.loop["fingerprint"] == setup.data.info.fingerprint and config.data == theirs.data:
    batches.set_state(restored.data)
  same_optimizer = (config.optimizer, config.train.average) == (theirs.optimizer, theirs.train.average)
  if config.resolve_policy() == original.policy and same_optimizer:
    return Subject(setup, restored.state, batches)
  # A run under another policy has no amax histories for delayed scaling.
  setup = dataclasses.replace(setup, policy=setup.policy.without_histories())
  return Subject(setup, setup.step.adopt(restored.state, original.step, warn=False), batches)


def find_batch(checkpoint: str) -> pathlib.Path:
  """Returns the newest batch that a run saved when it stopped with non-finite gradients.

  Raises:
    ConfigError: if the run saved no batch.
  """
  run, _ = locate(checkpoint)
  files = list(run.glob("nonfinite_batch_*.npz"))
  if not files:
    raise ConfigError(
      f"{run} holds no nonfinite_batch_*.npz, which a run writes when it stops with non-finite gradients: "
      "name a batch, as in --hunt batch.npz"
    )
  return max(files, key=lambda file: (len(file.name), file.name))  # by the number of its step


def load_batch(path: pathlib.Path, like: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Reads a batch from an npz file.

  Args:
    path: the file.
    like: a batch of the config's data. The file must have the same names, dtypes and row shapes.

  Raises:
    ConfigError: if the file cannot be read, or does not fit the data.
  """
  try:
    with np.load(path, allow_pickle=False) as file:
      batch = {name: file[name] for name in file.files}
  except Exception as error:  # a damaged archive can raise anything
    raise ConfigError(f"--hunt {path}: cannot be read as a batch ({error})") from error
  rows = lambda tree: {name: f"{x.dtype}{list(np.shape(x)[1:])}" for name, x in tree.items()}
  if rows(batch) != rows(like):
    raise ConfigError(f"--hunt {path}: holds rows of {rows(batch)}, expected rows of {rows(like)}")
  return batch


def run_or_config(config: str, checkpoint: str | None) -> tuple[pathlib.Path, str | None]:
  """Returns the config file and the checkpoint. If `config` is a run directory, both are the run's.

  Raises:
    ConfigError: if both a checkpoint and a run directory are given, or there is no such config.
  """
  if not pathlib.Path(config).is_dir():
    return find_config(config), checkpoint
  if checkpoint is not None:
    raise ConfigError(f"checkpoint={checkpoint} and the run directory {config}: expected one of them")
  return pathlib.Path(config) / "config.yaml", config


def locate(checkpoint: str) -> tuple[pathlib.Path, int | None]:
  """Returns the run directory of a checkpoint, and the step if one is named.

  Raises:
    ConfigError: if there is no run.
  """
  path = pathlib.Path(checkpoint)
  if path.name.isdecimal() and path.parent.name == "checkpoints":
    run, step = path.parent.parent, int(path.name)
  else:
    run, step = (path.parent if path.name == "checkpoints" else path), None
  if not (run / "config.yaml").exists():
    raise ConfigError(f"checkpoint={checkpoint}: {run} is not a run directory (no config.yaml)")
  return run, step
