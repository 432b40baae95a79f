"""The config of a training run: keys, defaults and checks. Every mistake is one line that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml

from mpjax.dtypes import DTYPE_NAMES
from mpjax.policy import Policy, get_policy
from mpjax.registry import (
  DATASETS,
  MODELS,
  TARGETS,
  Float,
  Int,
  KindSection,
  Natural,
  Positive,
  Section,
  Seed,
)
from mpjax.sharding import AXES, ShardingRules
from mpjax.step import require_honoured
from mpjax.train._errors import ConfigError


class ModelConfig(KindSection):
  """The model: `kind`, and the keyword arguments of the kind's function."""

  kinds = MODELS


class DataConfig(KindSection):
  """The source of batches: keys of every kind, and the options of this kind's function.

  Attributes:
    kind: name of a registered kind.
    batch_size: rows of a batch, over all processes.
    eval_batches: largest number of batches in an evaluation; `None`: all.
    workers: threads that read ahead.
    options: the kind's own keys.
  """

  kinds = DATASETS
  batch_size: Positive = 16
  eval_batches: Positive | None = None
  workers: Natural = 0


class OptimizerConfig(Section):
  """An optax optimiser, its learning-rate schedule and gradient clipping.

  `name`: an optimiser of optax. `target`: a plug-in's optimiser, which replaces `name`.
  `schedule_steps`: the step at which the schedule ends; `null`: `train.steps`. `decay_fraction`: the share of
  these steps in which the schedule `wsd` (warm-up, stable, decay) falls.
  """

  name: str | None = "adamw"
  target: str | None = None
  learning_rate: Annotated[Float, pydantic.Field(gt=0)] = 1e-3
  schedule: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
  schedule_steps: Positive | None = None
  warmup_steps: Natural = 0
  decay_fraction: Annotated[Float, pydantic.Field(gt=0, le=1)] = 0.2
  final_fraction: Annotated[Float, pydantic.Field(ge=0, le=1)] = 0.1
  weight_decay: Annotated[Float, pydantic.Field(ge=0)] = 0.0
  clip_norm: Annotated[Float, pydantic.Field(gt=0)] | None = None
  options: dict[str, Any] = pydantic.Field(default_factory=dict)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _check_target(cls, value: object) -> object:
    if not isinstance(value, Mapping) or value.get("target") is None:
      return value
    if value.get("weight_decay"):
      raise ValueError(f"weight_decay={value['weight_decay']!r}: expected 0, a target has its own options")
    options = value.get("options") or {}
    if isinstance(options, Mapping):  # the annotation's check reports others
      options = TARGETS.check(value["target"], options)
    return {**value, "name": None, "options": options}


def _number_of_devices(size: int) -> int:
  if size != -1 and size < 1:
    raise ValueError("expected a number of devices, or -1 for all that are left")
  return size


_Devices = Annotated[Int, pydantic.AfterValidator(_number_of_devices)]


class MeshConfig(Section):
  """The number of devices along each axis, and how parameters are divided over them.

  -1 on one axis means all devices that are left. Rows of a batch are divided over `data` and `fsdp`;
  parameters and optimiser state over `fsdp`; the parts of one matrix product over `tensor`.
  `rules` map regular expressions on parameter paths to an axis or null for each dimension. They are tried
  before the model's own rules. `gather` says when parameters that are divided over `fsdp` are gathered: once
  per `step`, or by `block`, where they are read.
  `offload: optimizer` keeps the optimiser's state in the host's memory between steps, also on one device.
  """

  data: _Devices = -1
  fsdp: _Devices = 1
  tensor: _Devices = 1
  rules: dict[str, Any] = pydantic.Field(default_factory=dict)
  gather: Literal["step", "block"] = "step"
  offload: Literal["optimizer"] | None = None

  @pydantic.model_validator(mode="after")
  def _check(self) -> MeshConfig:
    rest = [axis for axis, size in self.sizes.items() if size == -1]
    if len(rest) > 1:
      raise ValueError(f"{rest[0]}=-1 and {rest[1]}=-1: expected -1, all that are left, on one axis at most")
    if self.gather == "block" and self.fsdp == 1:
      raise ValueError(
        "gather=block gathers parameters that are divided over fsdp: expected fsdp of 2 or more, or -1"
      )
    ShardingRules(self.rules)
    return self

  @property
  def sizes(self) -> dict[str, int]:
    """The number of devices along each axis, as given."""
    return {axis: getattr(self, axis) for axis in AXES}


Recompute = Literal["islands", "blocks", "nothing"]
DEFAULT_RECOMPUTE: Recompute = "islands"
TrackerName = Literal["tensorboard", "wandb"]
ExportDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]


def export_dtype(name: object) -> ExportDtype | None:
  """Returns the dtype of an export for a name such as `bf16`, `bfloat16` or `fp8`; `None` for `None`.

  Raises:
    ConfigError: for another name.
  """
  names = {**DTYPE_NAMES, "fp32": "float32", "fp16": "float16", "fp8": "float8_e4m3fn"}
  dtype: Any = names.get(name, name) if isinstance(name, str) else name
  if dtype not in (None, *get_args(ExportDtype)):
    raise ConfigError(
      f"export_dtype={name!r}: expected fp32, bf16, fp16, fp8, {', '.join(get_args(ExportDtype))}"
    )
  return dtype


_AnyExportDtype = Annotated[ExportDtype | None, pydantic.BeforeValidator(export_dtype)]


class TrainConfig(Section):
  """The training loop.

  `steps`: the number of steps; may grow when a run is resumed.
  `init_from`: start with the parameters and model state of a run directory's newest checkpoint, or of a file
  that `mpjax export` wrote. `init_optimizer`: also take that run's optimiser state.
  `checkpoint_wait`: wait until a checkpoint is on the disk, so that a crash never costs more than
  `checkpoint_every` steps; by default, training goes on while checkpoints are written.
  `max_skips`: stop after this many skipped steps in a row at the lowest loss scale.
  `average`: also keep the exponential moving average of the weights with this decay, for evaluation and
  export. `profile_steps`: the first and the last step of a profile. `trackers`: where metrics also go.
  """

  steps: Positive = 1000
  init_from: str | None = None
  init_optimizer: bool = False
  accumulate: Positive = 1
  log_every: Positive = 10
  eval_every: Positive = 200
  checkpoint_every: Positive = 200
  checkpoint_wait: bool = False
  keep_checkpoints: Positive = 2
  skip_nonfinite: bool = True
  max_skips: Positive = 50
  recompute: Recompute = DEFAULT_RECOMPUTE
  export: Literal["safetensors"] | None = None
  export_dtype: _AnyExportDtype = None
  average: Annotated[Float, pydantic.Field(gt=0, lt=1)] | None = None
  profile_steps: tuple[Positive, ...] | None = None
  trackers: tuple[TrackerName, ...] = ("tensorboard",)

  @pydantic.model_validator(mode="after")
  def _check(self) -> TrainConfig:
    steps = self.profile_steps
    if steps is not None and (len(steps) != 2 or not steps[0] <= min(steps[1], self.steps)):
      expected = f"expected the first and the last step, as in [10, 12], in a run of {self.steps}"
      raise ValueError(f"profile_steps={list(steps)}: {expected}")
    if len(set(self.trackers)) < len(self.trackers):
      raise ValueError(f"trackers={list(self.trackers)}: expected each only once")
    if self.init_optimizer and self.init_from is None:
      raise ValueError("init_optimizer=true: expected a run directory in train.init_from")
    return self


class NumericsConfig(Section):
  """`every`: steps between two summaries of a run's numbers in its trackers; 0: no summaries."""

  every: Natural = 0


Seconds = Annotated[Float, pydantic.Field(gt=0, le=1e6)]


class DistributedConfig(Section):
  """Time limits of a run, in seconds. They do not change what it computes.

  `start_timeout_s`: until all processes are connected. `heartbeat_timeout_s`: between signs of life of a
  process. `hang_timeout_s`: for a step (the first one includes compilation), an evaluation or a checkpoint.
  """

  start_timeout_s: Seconds = 300
  heartbeat_timeout_s: Seconds = 60
  hang_timeout_s: Seconds = 1800


class Config(Section):
  """The config of a training run, with a section for each part; `load_config` makes one.

  ```python
  config = mpjax.train.load_config("gpt_stdlib", ["policy=fp16"])
  print(config.train.steps, config.resolve_policy(), config.to_yaml())
  ```

  `policy`: anything that `mpjax.get_policy` takes. `out`: the run directory.
  """

  policy: Any = "auto"
  seed: Seed = 0
  out: str | None = None
  model: ModelConfig
  data: DataConfig
  optimizer: OptimizerConfig = OptimizerConfig()
  mesh: MeshConfig = MeshConfig()
  train: TrainConfig = TrainConfig()
  numerics: NumericsConfig = NumericsConfig()
  distributed: DistributedConfig = DistributedConfig()

  @pydantic.model_validator(mode="after")
  def _check(self) -> Config:
    if self.data.batch_size % self.train.accumulate:
      raise ValueError(
        f"data.batch_size={self.data.batch_size} is not divisible by train.accumulate={self.train.accumulate}"
      )
    try:
      require_honoured(self.resolve_policy())
    except ValueError as error:
      raise ValueError(f"policy: {error}") from error
    return self

  def changed(self, values: Mapping[str, Any]) -> Config:
    """Returns the config with other values by dotted key, which are not checked."""
    update: dict[str, Any] = {}
    for key, value in values.items():
      section, _, name = key.partition(".")
      before = update.get(section, getattr(self, section))
      update[section] = before.model_copy(update={name: value}) if name else value
    return self.model_copy(update=update)

  @property
  def tree(self) -> dict[str, Any]:
    """Returns the config as plain data, with all defaults and the whole policy."""
    return self.model_dump(mode="json")

  def resolve_policy(self) -> Policy:
    """Returns the policy for this backend. Its `reason` says why `auto` chose it."""
    return get_policy(self.policy)

  @pydantic.field_serializer("policy")
  def _whole_policy(self, _: object) -> dict[str, Any]:
    return self.resolve_policy().to_dict()

  def to_yaml(self) -> str:
    """Returns the config as YAML, with all defaults and the whole policy."""
    return yaml.safe_dump(self.tree, sort_keys=False)
