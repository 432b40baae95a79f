"""Plans a config's training step for any policy, batch size and device."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
from jax.sharding import AbstractMesh, AxisType

from mpjax._types import Mesh, PolicyLike
from mpjax.planner import Plan, Target, plan, policy_on_target
from mpjax.policy import Policy, get_policy
from mpjax.registry._info import DataInfo
from mpjax.sharding import AXES, BATCH_AXES, axis_sizes, make_mesh
from mpjax.step import GATHERS, Layout
from mpjax.train._errors import ConfigError
from mpjax.train.config._config import DEFAULT_RECOMPUTE, Config
from mpjax.train.setup._experiment import Experiment, Place
from mpjax.train.setup._saved_run import facts_of


class Planner:
  """Plans one config. Reads facts about its data once, and puts none of it on a device.

  ```python
  config = mpjax.train.load_config("vit_digits")
  planner = mpjax.train.Planner(config, mpjax.planner.get_target("h200"))
  print(planner.plan("bf16", batch=256, compile=False))
  ```

  Args:
    config: the config.
    target: the device, as `mpjax.planner.get_target` returns it.
    info: facts about the data; read from it by default.

  Attributes:
    config: the config.
    target: the device.
    sizes: number of devices along each axis of the mesh.
    multiple: batch sizes must be multiples of this number.
  """

  def __init__(self, config: Config, target: Target, info: DataInfo | None = None):
    self.config = config
    self.target = target
    try:
      self.sizes = axis_sizes(config.mesh.sizes, target.devices)
    except ValueError as error:
      larger = "name another number of them, as in target=h200:8 or target=v5e:2x4"
      raise ConfigError(f"target={target.name}: mesh.{error}; {larger}") from error
    self.multiple = math.prod(self.sizes[axis] for axis in BATCH_AXES) * config.train.accumulate
    self._info = info or facts_of(config)
    mesh: Mesh | None = None  # for one device, unless it offloads
    if math.prod(self.sizes.values()) > 1 or config.mesh.offload is not None:
      types = (AxisType.Auto,) * len(AXES)
      mesh = AbstractMesh(tuple(self.sizes.values()), AXES, axis_types=types)
      if target.is_here:
        mesh = make_mesh(self.sizes, jax.devices())
    self._place = Place(mesh, target.kind, config.mesh.offload)

  def plan(
    self,
    policy: PolicyLike | None = None,
    *,
    batch: int | None = None,
    recompute: str | None = None,
    gather: str | None = None,
    compile: bool | str = "auto",
    label: str | None = None,
  ) -> Plan:
    """Plans a training step. Each argument that is `None` is taken from the config.

    Args:
      policy: a policy or its name.
      batch: rows of a batch; a multiple of `multiple`.
      recompute: as `train.recompute`.
      gather: as `mesh.gather`: one of `gathers`.
      compile: as for `mpjax.plan`.
      label: the name of the plan in tables.

    Raises:
      ConfigError: if the values do not fit together.
    """
    batch = self.config.data.batch_size if batch is None else batch
    spec = self.config.policy if policy is None else policy
    recompute = recompute or self.config.train.recompute
    gather = gather or self.config.mesh.gather
    try:
      asked = get_policy(spec, backend=self.target.kind)
      resolved, fp8 = policy_on_target(asked, self.target)
      experiment = self._experiment(resolved, batch, recompute, gather)
      made = plan(
        experiment.step,
        *experiment.shapes(),
        target=self.target,
        compile=compile,
        label=label or _label(asked, recompute, gather),
      )
    except ConfigError:
      raise
    except ValueError as error:
      raise ConfigError(str(error)) from error
    subject = f"{self.config.model.kind} of {made.parameters:,} parameters, batch of {batch}"
    item, per_row = experiment.task.units
    return dataclasses.replace(made, fp8=fp8, subject=subject, items=batch * per_row, item=item)

  @property
  def gathers(self) -> tuple[str, ...]:
    """Returns the values of `gather` that make sense on this mesh."""
    return GATHERS if self.sizes["fsdp"] > 1 else ("step",)

  @functools.cached_property
  def layout(self) -> Layout | None:
    """The layout of the config's state and batches on the target; `None` on one device.

    Raises:
      ConfigError: if the batch cannot be divided over the devices.
    """
    config = self.config
    batch, recompute, gather = config.data.batch_size, config.train.recompute, config.mesh.gather
    return self._experiment(get_policy("fp32"), batch, recompute, gather).step.layout

  def _experiment(self, policy: Policy, batch: int, recompute: str, gather: str) -> Experiment:
    """Returns the config with these values on the target."""
    if batch % self.multiple:
      raise ConfigError(
        f"data.batch_size={batch}: expected a multiple of {self.multiple}, which is train.accumulate="
        f"{self.config.train.accumulate} times {self.multiple // self.config.train.accumulate} devices"
      )
    changes = {"data": ("batch_size", batch), "train": ("recompute", recompute), "mesh": ("gather", gather)}
    sections = {
      name: getattr(self.config, name).model_copy(update={key: value})
      for name, (key, value) in changes.items()
    }
    return Experiment(self.config.model_copy(update=sections), self._info, policy, self._place)


def _label(policy: Policy, recompute: str, gather: str) -> str:
  chosen = {"recompute": (recompute, DEFAULT_RECOMPUTE), "gather": (gather, GATHERS[0])}
  return " ".join([policy.full_label, *(f"{k}={v}" for k, (v, default) in chosen.items() if v != default)])
