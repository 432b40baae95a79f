"""What a config builds: data, task, training step and first state, placed on the devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from mpjax.casting.explain import Explanation
from mpjax.policy import Policy
from mpjax.step import TrainState, TrainStep, make_train_step
from mpjax.train.config import Config, ConfigError, step_recompute
from mpjax.train.data import Data, DataInfo, load_data
from mpjax.train.optimizers import make_optimizer
from mpjax.train.tasks import Task, make_task


@dataclasses.dataclass(frozen=True)
class Setup:
  """The parts of a training run; nothing is allocated on a device yet."""

  config: Config
  policy: Policy
  data: Data
  task: Task
  step: TrainStep
  mesh: jax.sharding.Mesh | None

  @property
  def info(self) -> DataInfo:
    """What the data looks like."""
    return self.data.info

  @property
  def device_count(self) -> int:
    """Devices that the run uses."""
    return 1 if self.mesh is None else self.mesh.size

  def first_state(self) -> TrainState:
    """The state before the first step."""
    return jax.device_put(self._init(), self._state_sharding())

  def abstract_state(self) -> TrainState:
    """Shapes, dtypes and shardings of the state, for a restore."""
    sharding = self._state_sharding()
    return jax.tree.map(lambda leaf: leaf.update(sharding=sharding), jax.eval_shape(self._init))

  def place(self, batch: Any) -> Any:
    """A host batch with its rows over the devices."""
    if self.mesh is None:
      return batch
    return jax.device_put(batch, NamedSharding(self.mesh, PartitionSpec("data")))

  def explain(self) -> Explanation:
    """What runs in which dtype under the policy, and why; nothing is computed.

    Raises:
      ConfigError: for an override of the policy that matches no module.
    """
    try:
      return self.step.explain(self.abstract_state(), next(self.data.train()))
    except ValueError as error:
      raise ConfigError(str(error)) from error

  def _init(self) -> TrainState:
    key, step_key = jax.random.split(jax.random.key(self.config.seed))
    batch = next(self.data.train()) if self.step.needs_batch else None
    return self.step.init(**self.task.init(key), rng=step_key, batch=batch)

  def _state_sharding(self) -> Sharding:
    if self.mesh is None:
      return SingleDeviceSharding(jax.devices()[0])
    return NamedSharding(self.mesh, PartitionSpec())


def make_setup(config: Config) -> Setup:
  """Builds what the config says, and makes every check that needs the data or the devices.

  Raises:
    ConfigError: for what does not fit together.
    DataError: for data that is missing or unfit.
  """
  policy = config.resolve_policy()
  mesh = _make_mesh(config)
  optimizer = make_optimizer(config.optimizer, config.train.steps)
  data = load_data(config.data, seed=config.seed)
  task = make_task(config, data.info, policy)
  step = make_train_step(
    task.loss_fn,
    optimizer,
    policy,
    accumulate=config.train.accumulate,
    skip_nonfinite=config.train.skip_nonfinite,
    recompute=step_recompute(config.train.recompute),
  )
  setup = Setup(config, policy, data, task, step, mesh)
  if policy.overrides or policy.fp8:
    setup.explain()
  return setup


def _make_mesh(config: Config) -> jax.sharding.Mesh | None:
  devices = jax.devices()
  count = len(devices) if config.mesh.data == -1 else config.mesh.data
  if count > len(devices):
    raise ConfigError(f"mesh.data={count}: there are {len(devices)} devices")
  micro_batch = config.data.batch_size // config.train.accumulate
  if micro_batch % count:
    raise ConfigError(
      f"data.batch_size={config.data.batch_size} in train.accumulate={config.train.accumulate} micro-batches "
      f"of {micro_batch} rows is not divisible by {count} devices"
    )
  return (
    None
    if count == 1
    else jax.make_mesh((count,), ("data",), devices=devices[:count], axis_types=(jax.sharding.AxisType.Auto,))
  )
