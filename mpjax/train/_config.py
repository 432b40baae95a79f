"""The config of a training run: its keys, defaults and checks; a mistake is one line that names the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import pydantic
import yaml

from mpjax.dtypes import did_you_mean
from mpjax.policy import Policy, get_policy
from mpjax.sharding import ShardingRules
from mpjax.step._checks import require_honoured
from mpjax.train._errors import ConfigError


def _no_bool(value: object) -> object:
  if isinstance(value, bool):
    raise ValueError(f"expected a number, not {value} (YAML reads on, off, yes and no as booleans)")
  return value


Int = Annotated[int, pydantic.BeforeValidator(_no_bool)]
Float = Annotated[float, pydantic.BeforeValidator(_no_bool), pydantic.Field(allow_inf_nan=False)]
Positive = Annotated[Int, pydantic.Field(gt=0)]
Natural = Annotated[Int, pydantic.Field(ge=0)]
Fraction = Annotated[Float, pydantic.Field(ge=0, lt=1)]


class _Section(pydantic.BaseModel):
  model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

  @pydantic.model_validator(mode="before")
  @classmethod
  def _require_mapping(cls, value: object) -> object:
    if not isinstance(value, (Mapping, cls)):
      keys = ", ".join(list(cls.model_fields)[:3])
      raise ValueError(f"expected a mapping of keys, such as {keys}")
    return value


class GPTConfig(_Section):
  """A decoder-only transformer on bytes (`mpjax.train.models.GPT`)."""

  kind: Literal["gpt"]
  dim: Positive = 128
  layers: Positive = 4
  heads: Positive = 4
  mlp_ratio: Positive = 4
  norm: Literal["rms", "layer"] = "rms"
  positions: Literal["rope", "learned"] = "rope"
  dropout: Fraction = 0.0
  tie_head: bool = True
  attention: Literal["auto", "xla", "cudnn"] = "auto"


class ViTConfig(_Section):
  """A vision transformer (`mpjax.train.models.ViT`)."""

  kind: Literal["vit"]
  patch: Positive = 2
  dim: Positive = 64
  layers: Positive = 4
  heads: Positive = 4
  mlp_ratio: Positive = 4
  dropout: Fraction = 0.0
  attention: Literal["auto", "xla", "cudnn"] = "auto"


class ResNetConfig(_Section):
  """A residual network with BatchNorm (`mpjax.train.models.ResNet`)."""

  kind: Literal["resnet"]
  stages: tuple[Positive, ...] = (2, 2, 2)
  width: Positive = 32


_TEXT_KEYS = {"seq_len", "valid_fraction"}
_DATA_KEYS = {
  "stdlib": _TEXT_KEYS,
  "text": _TEXT_KEYS | {"path"},
  "digits": set[str](),
  "npz": {"path", "valid_fraction"},
  "huggingface": _TEXT_KEYS
  | {"path", "name", "text_column", "image_column", "label_column", "train_split", "eval_split"},
}


class DataConfig(_Section):
  """The source of batches; `mpjax.train.data` says what each kind reads."""

  kind: Literal["stdlib", "text", "digits", "npz", "huggingface"]
  batch_size: Positive = 16
  path: str | list[str] | None = None
  seq_len: Positive = 128
  valid_fraction: Annotated[Float, pydantic.Field(gt=0, lt=1)] = 0.05
  eval_batches: Positive | None = None
  workers: Natural = 0
  name: str | None = None
  text_column: str | None = None
  image_column: str | None = None
  label_column: str | None = None
  train_split: str = "train"
  eval_split: str | None = None

  @pydantic.model_validator(mode="after")
  def _check_kind(self) -> DataConfig:
    allowed = _DATA_KEYS[self.kind] | {"kind", "batch_size", "eval_batches", "workers"}
    for key in sorted(self.model_fields_set - allowed):
      if getattr(self, key) != type(self).model_fields[key].default:
        raise ValueError(f"key {key!r} does not apply to data kind {self.kind!r}")
    return self


class OptimizerConfig(_Section):
  """An optax optimiser, its learning-rate schedule and gradient clipping."""

  name: str = "adamw"
  learning_rate: Annotated[Float, pydantic.Field(gt=0)] = 1e-3
  schedule: Literal["constant", "cosine", "linear"] = "cosine"
  warmup_steps: Natural = 0
  final_fraction: Annotated[Float, pydantic.Field(ge=0, le=1)] = 0.1
  weight_decay: Annotated[Float, pydantic.Field(ge=0)] = 0.0
  clip_norm: Annotated[Float, pydantic.Field(gt=0)] | None = None
  options: dict[str, Any] = {}


class MeshConfig(_Section):
  """Devices along each axis, -1 on one of them for all that are left, and where parameters lie on them.

  Rows of a batch are divided over `data` and `fsdp`; parameters and optimiser state over `fsdp`; the parts of
  one matrix product over `tensor`. `rules` are tried before the model's own: for regular expressions on
  parameter paths, an axis or null for each dimension.
  """

  data: Int = -1
  fsdp: Int = 1
  tensor: Int = 1
  rules: dict[str, Any] = {}

  @pydantic.model_validator(mode="after")
  def _check(self) -> MeshConfig:
    sizes = {axis: getattr(self, axis) for axis in ("data", "fsdp", "tensor")}
    for axis, size in sizes.items():
      if size != -1 and size < 1:
        raise ValueError(f"{axis}={size}: expected a number of devices, or -1 for all that are left")
    rest = [axis for axis, size in sizes.items() if size == -1]
    if len(rest) > 1:
      raise ValueError(f"{rest[0]}=-1 and {rest[1]}=-1: expected -1, all that are left, on one axis at most")
    ShardingRules(self.rules)
    return self


def step_recompute(recompute: str) -> str:
  """Returns `make_train_step`'s `recompute` for `train.recompute`; the model recomputes blocks itself."""
  return DEFAULT_RECOMPUTE if recompute == "blocks" else recompute


DEFAULT_RECOMPUTE: Literal["islands"] = "islands"


class TrainConfig(_Section):
  """The loop: how long, how often, and when to give up.

  `checkpoint_wait`: train on only when a checkpoint is on the disk, so that a crash never costs more than
  `checkpoint_every` steps; without it, checkpoints are written while the training goes on.
  """

  steps: Positive = 1000
  accumulate: Positive = 1
  log_every: Positive = 10
  eval_every: Positive = 200
  checkpoint_every: Positive = 200
  checkpoint_wait: bool = False
  keep_checkpoints: Positive = 2
  skip_nonfinite: bool = True
  max_skips: Positive = 50
  recompute: Literal["islands", "dots", "blocks", "nothing"] = DEFAULT_RECOMPUTE
  export: Literal["safetensors"] | None = None
  export_dtype: Literal["float32", "bfloat16", "float16", "float8_e4m3fn"] | None = None


class NumericsConfig(_Section):
  """Steps between two summaries of a run's numbers in TensorBoard; 0 for none."""

  every: Natural = 0


Seconds = Annotated[Float, pydantic.Field(gt=0, le=1e6)]


class DistributedConfig(_Section):
  """Seconds to wait before a run is ended; they do not change what it computes.

  `start_timeout_s`: for all processes to come. `heartbeat_timeout_s`: for a sign of life of each.
  `hang_timeout_s`: for the end of a step (compiling is part of the first), an evaluation or a checkpoint.
  """

  start_timeout_s: Seconds = 300
  heartbeat_timeout_s: Seconds = 60
  hang_timeout_s: Seconds = 1800


class Config(_Section):
  """A whole training run."""

  policy: Any = "auto"
  seed: Natural = 0
  out: str | None = None
  model: Annotated[GPTConfig | ViTConfig | ResNetConfig, pydantic.Field(discriminator="kind")]
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
    return self

  def resolve_policy(self) -> Policy:
    """Returns the policy on this backend; its `reason` says why `auto` chose it."""
    return get_policy(self.policy)

  def to_yaml(self) -> str:
    """Returns the config as YAML, with every default and the whole policy written out."""
    data = self.model_dump(mode="json") | {"policy": self.resolve_policy().to_dict()}
    return yaml.safe_dump(data, sort_keys=False)


def parse_config(data: object) -> Config:
  """Returns a `Config` from plain data, checked but for what needs the devices or the data.

  Raises:
    ConfigError: as `load_config`.
  """
  try:
    config = Config.model_validate(data)
  except pydantic.ValidationError as error:
    raise ConfigError(_describe(error.errors()[0], data)) from error
  try:
    require_honoured(config.resolve_policy())
  except ValueError as error:
    raise ConfigError(f"policy: {error}") from error
  return config


def _describe(error: Mapping[str, Any], data: object) -> str:
  """Returns one line for a pydantic error, without the union tags that it puts into the location."""
  tags = ("gpt", "vit", "resnet")
  loc = [str(part) for i, part in enumerate(error["loc"]) if not (i == 1 and part in tags)]
  key = ".".join(loc)
  if error["type"] == "extra_forbidden":
    return f"unknown key {key!r}" + _nearest(loc, data)
  if error["type"] == "missing":
    return f"missing key {key!r}"
  if error["type"] in ("union_tag_invalid", "literal_error"):
    name = f"{key}.kind" if error["type"] == "union_tag_invalid" else key
    value = error["ctx"].get("tag", error["input"])
    expected = str(error["ctx"].get("expected_tags", error["ctx"].get("expected")))
    words = [word.strip(" '") for word in expected.replace(" or ", ",").split(",")]
    return f"unknown {name} {value!r}: expected one of {', '.join(words)}" + did_you_mean(str(value), words)
  if error["type"] == "union_tag_not_found":
    return f"missing key '{key}.kind': expected one of {', '.join(tags)}"
  message = error["msg"].removeprefix("Value error, ")
  if error["type"] == "value_error" and error["loc"] and error["loc"][-1] in ("data", "mesh"):
    return f"{key}: {message}"
  return f"{key}={error['input']!r}: {message}" if loc else message


def _nearest(loc: list[str], data: Any) -> str:
  """Returns the keys of the section that `loc` is in, and the nearest of them."""
  sections: dict[str, type[pydantic.BaseModel]] = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "mesh": MeshConfig,
    "train": TrainConfig,
    "numerics": NumericsConfig,
    "distributed": DistributedConfig,
  }
  models: dict[str, type[pydantic.BaseModel]] = {"gpt": GPTConfig, "vit": ViTConfig, "resnet": ResNetConfig}
  section: type[pydantic.BaseModel] = Config
  if len(loc) > 1:
    section = models[data["model"]["kind"]] if loc[0] == "model" else sections[loc[0]]
  known = list(section.model_fields)
  return f": expected one of {', '.join(known)}" + did_you_mean(loc[-1], known)
