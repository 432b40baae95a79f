"""Plans of a config's training step, for other policies, batches and devices than it will run with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mpjax.planner.fp8 import policy_on_target
from mpjax.planner.plan import plan
from mpjax.planner.results import Plan
from mpjax.planner.targets import Target
from mpjax.policy import Policy, get_policy
from mpjax.step import TrainState, TrainStep, make_train_step
from mpjax.train.config import DEFAULT_RECOMPUTE, Config, ConfigError, step_recompute
from mpjax.train.data import Data, load_data
from mpjax.train.optimizers import make_optimizer
from mpjax.train.tasks import make_task


class Planner:
  """Plans of one config: its data is looked at once, and never loaded onto a device.

  Attributes:
    config: the config.
    target: the target.
    devices: over which the batch is divided.
    multiple: what a batch size must be a multiple of.
  """

  def __init__(self, config: Config, target: Target):
    self.config = config
    self.target = target
    self.devices = _device_count(config, target)
    self.multiple = self.devices * config.train.accumulate
    # One row is enough to see the shapes.
    small = config.data.model_copy(update={"batch_size": 1, "workers": 0})
    self._data: Data = load_data(small, seed=config.seed)

  def plan(
    self,
    policy: Any = None,
    *,
    batch: int | None = None,
    recompute: str | None = None,
    compile: bool | str = "auto",
    label: str | None = None,
  ) -> Plan:
    """The plan of a policy, batch size and choice of recomputation; those of the config by default.

    Raises:
      ConfigError: for what does not fit together.
    """
    batch = self.config.data.batch_size if batch is None else batch
    if batch % self.multiple:
      raise ConfigError(
        f"data.batch_size={batch}: expected a multiple of {self.multiple}, which is train.accumulate="
        f"{self.config.train.accumulate} times {self.devices} devices"
      )
    spec = self.config.policy if policy is None else policy
    recompute = self.config.train.recompute if recompute is None else recompute
    try:
      asked = get_policy(spec, backend=self.target.kind)
      resolved, note = policy_on_target(asked, self.target)
      step, state = self._step_and_state(resolved, recompute, batch)
      made = plan(
        step,
        self._place(state, self._batch(batch)),
        target=self.target,
        compile=compile,
        label=label or _label(asked, recompute),
      )
    except ConfigError:
      raise
    except ValueError as error:
      raise ConfigError(str(error)) from error
    return dataclasses.replace(made, notes=(*((note,) if note else ()), *made.notes))

  def _step_and_state(self, policy: Policy, recompute: str, batch: int) -> tuple[TrainStep, TrainState]:
    train = self.config.train.model_copy(update={"recompute": recompute})
    config = self.config.model_copy(update={"train": train})
    task = make_task(config, self._data.info, policy, backend=self.target.kind)
    step = make_train_step(
      task.loss_fn,
      make_optimizer(config.optimizer, config.train.steps),
      policy,
      accumulate=config.train.accumulate,
      skip_nonfinite=config.train.skip_nonfinite,
      recompute=step_recompute(recompute),
    )
    shapes = self._batch(batch) if step.needs_batch else None

    def init() -> TrainState:
      key, step_key = jax.random.split(jax.random.key(config.seed))
      return step.init(**task.init(key), rng=step_key, batch=shapes)

    return step, jax.eval_shape(init)

  def _batch(self, size: int) -> Any:
    """Shapes of a batch."""
    row = self._data.train_row(0)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *np.shape(x)), np.asarray(x).dtype), row)

  def _place(self, state: TrainState, batch: Any) -> tuple[TrainState, Any]:
    """The state on every device, and the batch's rows over them."""
    if self.devices == 1:
      return state, batch
    mesh = _mesh(self.devices, self.target)
    put = lambda tree, spec: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree
    )
    return put(state, PartitionSpec()), put(batch, PartitionSpec("data"))


def _device_count(config: Config, target: Target) -> int:
  count = target.devices if config.mesh.data == -1 else config.mesh.data
  if count > target.devices:
    there = "1 device" if target.devices == 1 else f"{target.devices} devices"
    raise ConfigError(
      f"mesh.data={count}: target {target.name} has {there}; name a larger one, as in target=h200:8 or "
      "target=v5e:2x4"
    )
  return count


def _mesh(count: int, target: Target) -> Any:
  if target.is_here:
    devices = jax.devices()[:count]
    return jax.make_mesh((count,), ("data",), devices=devices, axis_types=(AxisType.Auto,))
  return AbstractMesh((count,), ("data",), axis_types=(AxisType.Auto,))


def _label(policy: Policy, recompute: str) -> str:
  name = policy.name or str(policy)
  return name if recompute == DEFAULT_RECOMPUTE else f"{name} recompute={recompute}"
