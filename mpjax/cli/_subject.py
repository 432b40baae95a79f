"""A config's training step with trained parameters and real batches: for `mpjax numerics` and `tune`."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator

import jax
import numpy as np

from mpjax._types import PyTree
from mpjax.step import TrainState
from mpjax.train import Config, ConfigError, make_setup
from mpjax.train.config._config_file import find_config
from mpjax.train.setup._experiment import Place, Setup
from mpjax.train.setup._saved_run import SavedRun


@dataclasses.dataclass
class Subject:
  """A training step to look at.

  Attributes:
    setup: has the step under the config's policy.
    state: its state, which `train` updates.
    batches: the training batches from there on.
  """

  setup: Setup
  state: TrainState
  batches: Iterator[PyTree]

  def next_batch(self) -> PyTree:
    """Returns the next training batch, on the devices."""
    return self.setup.place(next(self.batches))

  def train(self, steps: int, advance: Callable[[str], None]) -> None:
    """Takes training steps; calls `advance` before each."""
    for _ in range(steps):
      advance("training")
      self.state, _ = self.setup.step(self.state, self.next_batch())
      jax.block_until_ready(self.state.step)


def open_subject(config: Config, checkpoint: str | None) -> Subject:
  """Builds a config's step with its first state, or with a checkpoint's state and the batches after it.

  Args:
    config: the config; its policy may differ from the run's.
    checkpoint: as for `locate`.

  Raises:
    ConfigError: if there is no such checkpoint, or it belongs to another model.
    DataError: if data is missing or cannot be used.
  """
  setup = make_setup(config, Place.of_tools(config))
  batches = setup.data.train()
  if checkpoint is None:
    return Subject(setup, setup.first_state(), batches)
  saved, which = locate(checkpoint)
  theirs = saved.config
  models = [(each.with_any_attention().model, each.data.kind) for each in (theirs, config)]
  if models[0] != models[1]:
    raise ConfigError(
      f"checkpoint={checkpoint} is of another model or data than the config's ({theirs.model.kind} of "
      f"{theirs.data.kind}): give the run directory in place of the config"
    )
  # The run's own policy and optimiser decide the shape of the saved state; the devices are those here.
  original = saved.experiment(setup.at)
  restored = saved.restore(which, original)
  if restored.loop["fingerprint"] == setup.data.info.fingerprint and config.data == theirs.data:
    batches.set_state(restored.data)
  same_optimizer = (config.optimizer, config.train.average) == (theirs.optimizer, theirs.train.average)
  if config.resolve_policy() == original.policy and same_optimizer:
    return Subject(setup, restored.state, batches)
  # A run under another policy has no amax histories for delayed scaling.
  setup = dataclasses.replace(setup, policy=setup.policy.without_histories())
  return Subject(setup, setup.step.adopt(restored.state, original.step, warn=False), batches)


def load_batch(file: str, checkpoint: str, like: dict[str, np.ndarray]) -> tuple[str, dict[str, np.ndarray]]:
  """Returns the name of an npz file, by default that of the newest batch that stopped a run, and its arrays.

  Raises:
    ConfigError: if there is none, or it cannot be read as a batch like `like`.
  """
  if not file:
    run = locate(checkpoint)[0].directory
    files = list(run.glob("nonfinite_batch_*.npz"))
    if not files:
      raise ConfigError(
        f"{run} holds no nonfinite_batch_*.npz, which a run writes when it stops with non-finite gradients: "
        "name a batch, as in --hunt batch.npz"
      )
    file = str(max(files, key=lambda file: (len(file.name), file.name)))  # by the number of its step
  try:
    with np.load(file, allow_pickle=False) as archive:
      batch = {name: archive[name] for name in archive.files}
  except Exception as error:  # a damaged archive can raise anything
    raise ConfigError(f"--hunt {file}: cannot be read as a batch ({error})") from error
  rows = lambda tree: {name: f"{x.dtype}{list(np.shape(x)[1:])}" for name, x in tree.items()}
  if rows(batch) != rows(like):
    raise ConfigError(f"--hunt {file}: holds rows of {rows(batch)}, expected rows of {rows(like)}")
  return file, batch


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


def locate(checkpoint: str) -> tuple[SavedRun, str]:
  """Returns the run of a directory, or of a folder in its `checkpoints/`, and which of its checkpoints.

  Raises:
    ConfigError: if there is no run.
  """
  path = pathlib.Path(checkpoint)
  if path.name.isdecimal() and path.parent.name == "checkpoints":
    return SavedRun(path.parent.parent), path.name
  return SavedRun(path), "latest"
