"""`train.init_from`: starts a new run from the parameters, and the optimiser's state, of another run."""

from __future__ import annotations

import dataclasses
import functools
import pathlib

import jax

from mpjax._types import Array, PyTree
from mpjax.loss_scale import LossScaleState
from mpjax.optim import keeps_other_weights
from mpjax.patterns import named_leaves
from mpjax.step import TrainState, TrainStep, can_adopt, state_of, with_masters
from mpjax.train._errors import CheckpointError, ConfigError
from mpjax.train._export import load_safetensors
from mpjax.train.config._config import Config
from mpjax.train.setup._evaluation import weights_of
from mpjax.train.setup._experiment import Experiment
from mpjax.train.setup._saved_run import SavedRun


def start_from(setup: Experiment, state: TrainState) -> tuple[TrainState, str]:
  """Returns the first state of a run with the parameters that `train.init_from` names, and says whose.

  Args:
    setup: the new run.
    state: the new run's first state, on its devices.

  Raises:
    ConfigError: if there is no such run or export, or its parameters or optimiser do not fit.
  """
  train = setup.config.train
  path = pathlib.Path(str(train.init_from))
  if (path / "config.yaml").is_file():
    return _from_run(path, setup, state)
  if not path.is_file():
    raise ConfigError(f"train.init_from={path}: expected a run directory, or a file that mpjax export wrote")
  if train.init_optimizer:
    raise ConfigError(
      f"train.init_optimizer=true: {path} has only parameters; expected a run directory in train.init_from"
    )
  return _from_export(path, setup, state)


def _from_run(path: pathlib.Path, setup: Experiment, state: TrainState) -> tuple[TrainState, str]:
  saved = SavedRun(path)
  theirs = _like(saved.config, setup.config)
  before = dataclasses.replace(setup, config=theirs, policy=theirs.resolve_policy())
  try:
    restored = saved.restore("latest", before)
  except (CheckpointError, ConfigError) as error:
    raise ConfigError(f"train.init_from={path}: {error}") from error
  old, source = restored.state, f"parameters of step {restored.step} of {path}"
  if not setup.config.train.init_optimizer:
    masters = jax.jit(functools.partial(weights_of, before.step, masters=True))(old)
    average = "the average of the " if keeps_other_weights(old.opt_state) else ""
    return _with_masters(setup, state, masters, old.model_state), f"{average}{source}"
  return _with_optimizer(path, setup.step, state, old, before.step), f"{source}, and its optimizer"


def _with_masters(setup: Experiment, state: TrainState, masters: PyTree, model_state: PyTree) -> TrainState:
  """Returns a run's first state with other master weights, from which its optimiser starts, too."""
  step, places = setup.step, setup.layout.shardings(state)

  def taken(state: TrainState, masters: PyTree) -> tuple[PyTree, PyTree]:
    # An optimiser may keep first weights, and an average starts with them, in the parameters' dtype.
    opt_state = step.tx.init(step.trained.seen(state, setup.policy.cast_to_param(masters)))
    layers = step.layers(state.replace(opt_state=opt_state))
    params, layers = with_masters(setup.policy, step.trained.seen(state, masters), layers)
    return step.trained.whole(state, params, masters), state_of(layers)

  out = (places.arrays, places.opt_state)
  params, opt_state = jax.jit(taken, out_shardings=out)(state, masters)
  return state.replace(arrays=params, opt_state=opt_state, model_state=model_state)


def _like(theirs: Config, ours: Config) -> Config:
  """Returns our config with what decides the shape of another run's state: its policy and optimiser."""
  kept = {name: getattr(theirs.train, name) for name in ("skip_nonfinite", "average")}
  return ours.with_any_attention().model_copy(
    update={
      "policy": theirs.policy,
      "optimizer": theirs.optimizer,
      "train": ours.train.model_copy(update=kept),
    }
  )


def _with_optimizer(
  path: pathlib.Path, step: TrainStep, state: TrainState, old: TrainState, before: TrainStep
) -> TrainState:
  assert step.layout is not None
  if not can_adopt(step.layers(state), before.layers(old)):
    raise ConfigError(
      f"train.init_optimizer=true: the state in {path} is of another optimizer; use that run's optimizer "
      "section and train.average, or train.init_optimizer=false"
    )

  def adopt(old: TrainState) -> tuple[PyTree, PyTree]:
    adopted = step.adopt(old, before, warn=False)
    return adopted.arrays, _without_skips(adopted.opt_state)

  places = step.layout.shardings(state)
  params, opt_state = jax.jit(adopt, out_shardings=(places.arrays, places.opt_state))(old)
  return state.replace(arrays=params, model_state=old.model_state, opt_state=opt_state)


def _without_skips(opt_state: PyTree) -> PyTree:
  """Returns an optimiser's state with the counts of skipped steps at zero."""
  is_scale = lambda x: isinstance(x, LossScaleState)
  reset = lambda x: x._replace(skipped_steps=0 * x.skipped_steps, consecutive_skips=0 * x.consecutive_skips)
  return jax.tree.map(lambda x: reset(x) if is_scale(x) else x, opt_state, is_leaf=is_scale)


def _from_export(path: pathlib.Path, setup: Experiment, state: TrainState) -> tuple[TrainState, str]:
  try:
    model = load_safetensors(path)
  except ConfigError as error:
    raise ConfigError(f"train.init_from={path}: {error}") from error
  places = setup.layout.shardings(state)
  masters = jax.eval_shape(functools.partial(weights_of, setup.step, which="last", masters=True), state)
  theirs = _taken(path, "params", model.params, masters, places.arrays)
  model_state = _taken(path, "model_state", model.model_state, state.model_state, places.model_state)
  return _with_masters(setup, state, theirs, model_state), f"parameters of {path}"


def _taken(path: pathlib.Path, name: str, theirs: PyTree, ours: PyTree, places: PyTree) -> PyTree:
  """Returns the arrays of an export, by name, with the dtypes and shardings of the run's own."""
  found: dict[str, Array] = dict(named_leaves(theirs))
  expected = dict(named_leaves(ours))
  for key in sorted(found.keys() | expected.keys()):
    shapes = [str(list(tree[key].shape)) if key in tree else "not there" for tree in (found, expected)]
    if shapes[0] != shapes[1]:
      raise ConfigError(
        f"train.init_from={path}: {name} {key!r} is {shapes[0]} in it and {shapes[1]} in this model; "
        "expected an export of the same model section and data"
      )
  leaves = [found[key].astype(leaf.dtype) for key, leaf in expected.items()]
  return jax.device_put(jax.tree.unflatten(jax.tree.structure(ours), leaves), places)
