"""A config's training step with trained parameters and real batches: for `mpjax numerics` and `tune`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import pathlib

import jax
import numpy as np
from grain import DatasetIterator

from mpjax._types import PyTree
from mpjax.step import TrainState
from mpjax.train import Config, ConfigError, make_setup
from mpjax.train.config._config_file import find_config
from mpjax.train.setup._experiment import Place, Setup
from mpjax.train.setup._saved_run import SavedRun


def open_subject(
  config: Config, checkpoint: str | None, steps: int = 0, count: int = 1
) -> tuple[Setup, TrainState, list[PyTree]]:
  """Returns a config's step, its first state or a checkpoint's, and `count` batches from there on, placed.

  The config's policy may differ from that of the checkpoint's run. Takes `steps` steps first.

  Raises:
    ConfigError: if there is no such checkpoint, or it belongs to another model.
    DataError: if data is missing or cannot be used.
  """
  setup = make_setup(config, Place.of_tools(config))
  iterator = setup.data.train()
  if checkpoint is None:
    state = setup.first_state()
  else:
    setup, state = _restored(setup, iterator, checkpoint)
  batches = map(setup.place, iterator)
  for batch in itertools.islice(batches, steps):
    state, _ = setup.step(state, batch)
    jax.block_until_ready(state.step)
  return setup, state, list(itertools.islice(batches, count))


def _restored(setup: Setup, iterator: DatasetIterator, checkpoint: str) -> tuple[Setup, TrainState]:
  """Returns a step, and a checkpoint's state as it takes it; moves the iterator to the batches after it."""
  saved, which = locate(checkpoint)
  config, theirs = setup.config, saved.config
  models = [(each.model, each.data.kind) for each in (theirs, config)]
  if models[0] != models[1]:
    raise ConfigError(
      f"checkpoint={checkpoint} is of another model or data than the config's ({theirs.model.kind} of "
      f"{theirs.data.kind}): give the run directory in place of the config"
    )
  # The run's own policy and optimiser decide the shape of the saved state; the devices are those here.
  original = saved.experiment(setup.at)
  restored = saved.restore(which, original)
  if restored.loop["fingerprint"] == setup.data.info.fingerprint and config.data == theirs.data:
    iterator.set_state(restored.data)
  same_optimizer = (config.optimizer, config.train.average) == (theirs.optimizer, theirs.train.average)
  if setup.policy == original.policy and same_optimizer:
    return setup, restored.state
  # A run under another policy has no amax histories for delayed scaling.
  setup = dataclasses.replace(setup, policy=setup.policy.without_histories())
  return setup, setup.step.adopt(restored.state, original.step, warn=False)


def load_batch(file: str, checkpoint: str, like: PyTree) -> tuple[str, dict[str, np.ndarray]]:
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
  rows = lambda tree: {name: f"{x.dtype}{list(x.shape[1:])}" for name, x in tree.items()}
  if rows(batch) != rows(like):
    raise ConfigError(f"--hunt {file}: holds rows of {rows(batch)}, expected rows of {rows(like)}")
  return file, batch


def run_or_config(options: argparse.Namespace) -> tuple[pathlib.Path, str | None]:
  """Returns the config file and the checkpoint of a command line. A run directory is both.

  Raises:
    ConfigError: if both a checkpoint and a run directory are given, or there is no such config.
  """
  config, checkpoint = options.config, options.own.get("checkpoint")
  if pathlib.Path(config).is_dir():
    if checkpoint is not None:
      raise ConfigError(f"checkpoint={checkpoint} and the run directory {config}: expected one of them")
    checkpoint = config
  return find_config(config), checkpoint


def locate(checkpoint: str) -> tuple[SavedRun, str]:
  """Returns the run of a directory, or of a folder in its `checkpoints/`, and which of its checkpoints."""
  path = pathlib.Path(checkpoint)
  if path.name.isdecimal() and path.parent.name == "checkpoints":
    return SavedRun(path.parent.parent), path.name
  return SavedRun(path), "latest"
