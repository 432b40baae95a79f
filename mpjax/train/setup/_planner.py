"""Plans a config's training step for any policy, batch size and device."""

from __future__ import annotations

import dataclasses
import functools
import math

from mpjax._mistakes import config_errors
from mpjax._types import PolicyLike
from mpjax.planner import Plan, Target, plan, policy_on_target
from mpjax.policy import get_policy
from mpjax.registry import DataInfo
from mpjax.sharding import BATCH_AXES
from mpjax.step import GATHERS, Layout
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
    self.config, self.target = config, target
    self._place, self.sizes = Place.of_target(config, target)
    self.multiple = math.prod(self.sizes[axis] for axis in BATCH_AXES) * config.train.accumulate
    self._info = info or facts_of(config)

  def plan(
    self,
    policy: PolicyLike | None = None,
    *,
    batch: int | None = None,
    recompute: str | None = None,
    gather: str | None = None,
    compile: bool | str = "auto",
  ) -> Plan:
    """Plans a training step. Each argument that is `None` is taken from the config.

    Args:
      policy: a policy or its name.
      batch: rows of a batch; a multiple of `multiple`.
      recompute: as `train.recompute`.
      gather: as `mesh.gather`: one of `gathers`.
      compile: as for `mpjax.plan`.

    Raises:
      ConfigError: if the values do not fit together.
    """
    given = {"data.batch_size": batch, "train.recompute": recompute, "mesh.gather": gather}
    config = self.config.changed({key: value for key, value in given.items() if value is not None})
    with config_errors():
      asked = get_policy(config.policy if policy is None else policy, backend=self.target.kind)
      resolved, fp8 = policy_on_target(asked, self.target)
      experiment = Experiment(config, self._info, resolved, self._place)
      chosen = {"recompute": config.train.recompute, "gather": config.mesh.gather}
      usual = (DEFAULT_RECOMPUTE, GATHERS[0])
      unusual = [f"{key}={value}" for key, value in chosen.items() if value not in usual]
      label = " ".join([asked.full_label, *unusual])
      made = plan(experiment.step, *experiment.shapes(), target=self.target, compile=compile, label=label)
    rows, (item, per_row) = config.data.batch_size, experiment.task.units
    subject = f"{config.model.kind} of {made.parameters:,} parameters, batch of {rows}"
    return dataclasses.replace(made, fp8=fp8, subject=subject, items=rows * per_row, item=item)

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
    return Experiment(self.config, self._info, get_policy("fp32"), self._place).step.layout
