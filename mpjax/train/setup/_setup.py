"""Builds the data, task, training step and first state of a config, placed on the devices."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import optax

from mpjax._average import Average
from mpjax._types import Array, Mesh, PyTree
from mpjax.casting import Explanation
from mpjax.optim import average_weights
from mpjax.policy import Policy
from mpjax.registry._info import DataInfo
from mpjax.registry._task import Task
from mpjax.sharding import (
  Rows,
  ShardingRules,
  batch_shards,
  lacks_host_memory,
  make_mesh,
  place_rows,
  rows_of_process,
)
from mpjax.step import Layout, TrainState, TrainStep, make_train_step
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import DEFAULT_RECOMPUTE, Config, MeshConfig
from mpjax.train.data import Data, load_data
from mpjax.train.setup._evaluation import evaluate, for_evaluation
from mpjax.train.setup._optimizers import make_optimizer, make_schedule
from mpjax.train.setup._task import make_task, model_errors


@dataclasses.dataclass(frozen=True)
class Setup:
  """The parts of a training run. Allocates nothing on a device."""

  config: Config
  policy: Policy
  data: Data
  task: Task
  step: TrainStep

  @property
  def schedule(self) -> optax.Schedule:
    """Returns the learning rate as a function of the update's number."""
    return make_schedule(self.config.optimizer, self.config.train.steps)

  @property
  def info(self) -> DataInfo:
    """Returns the facts about the data."""
    return self.data.info

  @property
  def layout(self) -> Layout:
    """Returns the layout of the state and the batches on the mesh."""
    assert self.step.layout is not None
    return self.step.layout

  @functools.cached_property
  def rows(self) -> Rows:
    """The rows of each global batch that this process feeds."""
    return rows_of_process(self.layout.batch_sharding, self.config.data.batch_size)

  def first_state(self) -> TrainState:
    """Makes the state before the first step, on its devices."""
    if self.layout.mesh.size == 1:  # compiling one program would take longer than it saves
      return self._init()
    return jax.jit(self._init, out_shardings=self.layout.shardings(self._shapes))()

  def abstract_state(self) -> TrainState:
    """Returns the shapes, dtypes and shardings of the state, to restore a checkpoint."""
    return self._step_shapes()[0]

  def place(self, batch: PyTree) -> PyTree:
    """Makes global arrays from this process's rows of a batch, which are on the host."""
    return place_rows(batch, self.layout.batch_sharding, self.rows, self.config.data.batch_size)

  def check_layout(self) -> None:
    """Raises `ConfigError` if the model has no first state, or rules do not fit its parameters."""
    with model_errors(self.config, self.info):
      shapes = self._shapes
    try:
      self.layout.shardings(shapes)
    except ValueError as error:
      raise ConfigError(f"mesh.rules or the model's sharding: {error}") from error

  def check_step(self) -> None:
    """Traces a step and an evaluation. The run does not trace them again.

    Raises:
      ConfigError: if the loss function or the evaluation is wrong.
    """
    state, batch = self._step_shapes()
    with model_errors(self.config, self.info):
      jax.eval_shape(self.step.jitted, state, batch)
      jax.eval_shape(self.evaluate, jax.eval_shape(self.for_evaluation, state), batch)

  def program(self) -> str:
    """Returns the StableHLO of a step. It depends only on the code and on versions."""
    text: str = self.step.jitted.lower(*self._step_shapes()).as_text()
    return text

  @functools.cached_property
  def for_evaluation(self) -> Callable[[TrainState], TrainState]:
    """Jitted: a state -> the state that `evaluate` takes, with the average of the weights if there is one."""
    return jax.jit(functools.partial(for_evaluation, self.step))

  @functools.cached_property
  def evaluate(self) -> Callable[[TrainState, PyTree], dict[str, Array | Average]]:
    """Jitted: (state of `for_evaluation`, batch) -> means over the batch."""

    def run(state: TrainState, batch: PyTree) -> dict[str, Array | Average]:
      with self.layout.in_mesh():
        return evaluate(self.task, self.policy, state, batch)

    return jax.jit(run)

  def explain(self) -> Explanation:
    """Explains what runs in which dtype under the policy, and why. Computes nothing.

    Raises:
      ConfigError: if an override of the policy matches no module.
    """
    try:
      return self.step.explain(self._shapes, self.batch_shapes())
    except ValueError as error:
      raise ConfigError(str(error)) from error

  def batch_shapes(self) -> PyTree[jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a global batch."""
    return self.info.batch_shapes(self.config.data.batch_size)

  def _step_shapes(self) -> tuple[TrainState, PyTree]:
    return self.layout.shapes(self._shapes, self.batch_shapes())

  @functools.cached_property
  def _shapes(self) -> TrainState:
    """Shapes and dtypes of the first state, traced once."""
    return jax.eval_shape(self._init)

  def _init(self) -> TrainState:
    return init_state(self.config, self.task, self.step, self.batch_shapes())


def make_setup(config: Config) -> Setup:
  """Builds the parts of a run, and makes every check that needs the data or the devices.

  ```python
  setup = mpjax.train.make_setup(mpjax.train.load_config("vit_digits", ["policy=bf16"]))
  state = setup.first_state()
  batch = setup.place(next(setup.data.train(setup.rows)))
  print(setup.explain())
  ```

  Args:
    config: the config, as `load_config` returns it.

  Returns:
    A `Setup` with the attributes `config`, `policy`, `data`, `info`, `task`, `step` and `schedule`, and the
    methods `first_state()`, `place(batch)` and `explain()`.

  Raises:
    ConfigError: if parts of the config do not fit together.
    DataError: if data is missing or cannot be used.
  """
  policy = config.resolve_policy()
  mesh = mesh_of(config)
  data = load_data(config.data, seed=config.seed)
  task, step = build_step(config, data.info, policy, mesh)
  setup = Setup(config, policy, data, task, step)
  setup.check_layout()
  if policy.overrides or policy.fp8:
    setup.explain()
  return setup


def mesh_of(config: Config) -> jax.sharding.Mesh:
  """Makes the mesh of a run, over all processes.

  Raises:
    ConfigError: if the mesh does not fit the devices or the batch, or they cannot do what `offload` says.
  """
  try:
    mesh = make_mesh(config.mesh.sizes, jax.devices())
  except ValueError as error:
    raise ConfigError(f"mesh.{error}") from error
  batch = config.data.batch_size
  micro_batch = batch // config.train.accumulate
  if micro_batch % batch_shards(mesh):
    raise ConfigError(
      f"data.batch_size={batch} in train.accumulate={config.train.accumulate} micro-batches of {micro_batch} "
      f"rows is not divisible by {batch_shards(mesh)} devices (mesh.data x mesh.fsdp)"
    )
  if config.mesh.offload and (why := lacks_host_memory(mesh)):
    raise ConfigError(f"mesh.offload={config.mesh.offload}: {why}")
  return mesh


def on_devices_here(config: Config) -> Config:
  """Returns the config with all state on devices, on one if its mesh does not fit this machine; for tools."""
  here = config.model_copy(update={"mesh": config.mesh.model_copy(update={"offload": None})})
  try:
    mesh_of(here)
  except ConfigError:
    return config.model_copy(update={"mesh": MeshConfig(data=1)})
  return here


def build_step(
  config: Config, info: DataInfo, policy: Policy, mesh: Mesh | None, *, backend: str | None = None
) -> tuple[Task, TrainStep]:
  """Builds the task of a config, and its training step.

  Args:
    config: the config.
    info: facts about the data.
    policy: used in place of the config's own.
    mesh: the mesh; `None` for a step on one device, without the policy's dtypes of transfers.
    backend: the platform to run on; by default this machine's.

  Raises:
    ConfigError: if parts of the config do not fit together.
  """
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  if config.train.average is not None:
    optimizer = average_weights(optimizer, config.train.average)
  task = make_task(config, info, policy, backend=backend)
  recompute = config.train.recompute
  step = make_train_step(
    task.loss_fn,
    optimizer,
    policy if mesh is not None else policy.without_devices(),
    accumulate=config.train.accumulate,
    skip_nonfinite=config.train.skip_nonfinite,
    recompute=DEFAULT_RECOMPUTE if recompute == "blocks" else recompute,  # for `blocks`, the model does
    mesh=mesh,
    sharding=None if mesh is None else ShardingRules(config.mesh.rules, task.sharding),
    gather=config.mesh.gather if mesh is not None else "step",
    offload=config.mesh.offload if mesh is not None else None,
    grad_norm=True,
  )
  return task, step


def init_state(config: Config, task: Task, step: TrainStep, batch: PyTree) -> TrainState:
  """Makes the first state of a run; `batch` is a batch or its shapes."""
  key, step_key = jax.random.split(jax.random.key(config.seed))
  return step.init(
    **task.init_arguments(key),
    rng=step_key if {"rng", "row_rngs"} & set(step.loss.keywords) else None,
    batch=batch if step.needs_batch else None,
  )
