"""Export for inference: parameters in one dtype as safetensors, and a loader that gives the model back."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
import safetensors
import safetensors.flax

from mpjax.policy import Policy, cast_floating, get_policy
from mpjax.step import make_train_step
from mpjax.train.checkpoints import Checkpoints
from mpjax.train.config import Config, ConfigError, load_config, parse_config
from mpjax.train.data import DataInfo
from mpjax.train.setup import make_setup
from mpjax.train.tasks import Task, make_task

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class ExportedModel:
  """A model read back from a safetensors file.

  Attributes:
    config: the config of the run that it came from.
    policy: the policy of that run: its compute and output dtypes are used.
    params: parameters in the dtype of the file.
    model_state: BatchNorm statistics and the like, float32.
  """

  config: Config
  policy: Policy
  params: Any
  model_state: Any
  task: Task

  def logits(self, inputs: Any) -> jax.Array:
    """Logits in `output_dtype`: [B, T] tokens -> [B, T, vocab], [B, H, W, C] images -> [B, classes]."""
    # Autocast takes a program in the parameters' own dtype, and rounds each where it is used.
    params = self.policy.cast_to_param(self.params) if self.policy.autocast else self.params
    return jax.jit(self.task.logits, static_argnums=3)(params, self.model_state, inputs, self.policy)


def save_safetensors(
  path: str | pathlib.Path,
  config: Config,
  info: DataInfo,
  params: Any,
  model_state: Any,
  dtype: str | None = None,
) -> None:
  """Writes parameters in `dtype` and model state as it is, with what the loader needs as metadata.

  Args:
    path: the file; written beside its place and renamed.
    config: config of the run.
    info: what the data looked like, which sizes the model.
    params: master weights.
    model_state: statistics; kept in their own dtype.
    dtype: `float32`, `bfloat16` or `float16`; `None`: the policy's compute dtype, with which the logits are
      bitwise those of the policy's evaluation.

  Raises:
    ConfigError: for another dtype.
  """
  if dtype is not None and dtype not in _DTYPES:
    raise ConfigError(f"export dtype {dtype!r}: expected one of {', '.join(_DTYPES)}")
  path = pathlib.Path(path)
  policy = config.resolve_policy()
  params = cast_floating(params, dtype or policy.compute_dtype)
  tree = {"params": params, "model_state": model_state}
  tensors = {_name(key): jnp.asarray(leaf) for key, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
  metadata = {
    "format": "mpjax-1",
    "config": json.dumps(config.model_dump(mode="json") | {"policy": policy.to_dict()}),
    "data": json.dumps(dataclasses.asdict(info)),
  }
  temporary = path.with_name(path.name + ".tmp")
  safetensors.flax.save_file(tensors, temporary, metadata)
  temporary.replace(path)


def load_safetensors(path: str | pathlib.Path) -> ExportedModel:
  """The model in a file that `save_safetensors` wrote.

  Raises:
    ConfigError: if the file is missing, was written by something else, or lacks a tensor of the model.
  """
  path = pathlib.Path(path)
  try:
    with safetensors.safe_open(path, framework="flax") as file:
      metadata = file.metadata() or {}
      tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
  except (OSError, safetensors.SafetensorError) as error:
    raise ConfigError(f"cannot read {path}: {error}") from error
  if metadata.get("format") != "mpjax-1":
    raise ConfigError(
      f"{path}: not an export of mpjax (format={metadata.get('format')!r}, expected 'mpjax-1')"
    )
  config = parse_config(json.loads(metadata["config"]))
  data = json.loads(metadata["data"])
  shape = data["image_shape"]
  info = DataInfo(**data | {"image_shape": None if shape is None else tuple(shape)})
  policy = get_policy(config.policy)
  task = make_task(config, info, policy)
  init = make_train_step(task.loss_fn, optax.identity(), policy.without_histories()).init
  like = jax.eval_shape(lambda key: init(**task.init(key), rng=key), jax.random.key(0))

  def read(key: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    name = _name(key)
    if name not in tensors or tensors[name].shape != leaf.shape:
      found = f"shape {tensors[name].shape}" if name in tensors else "nothing"
      raise ConfigError(f"{path}: tensor {name!r}: expected shape {leaf.shape}, found {found}")
    return tensors[name]

  trees = jax.tree_util.tree_map_with_path(read, {"params": like.params, "model_state": like.model_state})
  return ExportedModel(config, policy, trees["params"], trees["model_state"], task)


def export_run(
  directory: str | pathlib.Path, dtype: str | None = None, step: str = "best", out: str | None = None
) -> pathlib.Path:
  """Exports a checkpoint of a run directory.

  Args:
    directory: the run directory.
    dtype: as for `save_safetensors`.
    step: `"best"` (lowest eval loss), `"latest"`, or a step number.
    out: the file; `None`: `model.safetensors` in the run directory.

  Raises:
    ConfigError: if the directory holds no such checkpoint.
  """
  directory = pathlib.Path(directory)
  if not (directory / "config.yaml").exists():
    raise ConfigError(f"{directory}: not a run directory (no config.yaml)")
  config = load_config(directory / "config.yaml")
  checkpoints = Checkpoints(directory / "checkpoints", keep=config.train.keep_checkpoints)
  try:
    steps = checkpoints.steps()
    found = {"best": checkpoints.best(), "latest": checkpoints.latest()}.get(step)
    if found is None and step.isdecimal() and int(step) in steps:
      found = int(step)
    if found is None:
      raise ConfigError(
        f"{directory}: no checkpoint {step!r}; there are best, latest, {', '.join(map(str, steps))}"
      )
    setup = make_setup(config)
    state = checkpoints.restore(found, setup.abstract_state()).state
  finally:
    checkpoints.close()
  path = pathlib.Path(out) if out else directory / "model.safetensors"
  save_safetensors(path, config, setup.info, state.params, state.model_state, dtype)
  return path


def _name(key: Any) -> str:
  """A tensor's name: its path, as in `params/blocks/0/attention/kernel`."""
  return jax.tree_util.keystr(key, simple=True, separator="/")
