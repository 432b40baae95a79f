"""Exports parameters in one dtype as safetensors, and loads the model from such a file.

An FP8 export stores only the weights of FP8 products in FP8: `name` in E4M3, and its scale, float32[], as
`name_scale`. The weight is the product of the two. Other parameters are in the policy's compute dtype.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import stat
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import safetensors
import safetensors.flax
from jaxtyping import Float

from mpjax._render.plain_text import bytes_text
from mpjax._types import Array, ArrayLike, PyTree
from mpjax.casting import fp8_weights
from mpjax.dtypes import cast_floating
from mpjax.fp8 import BLOCKS, Recipe, amax_of, quantise, scale_of
from mpjax.patterns import named_leaves
from mpjax.policy import Policy, get_policy
from mpjax.registry import DataInfo, Task, checked
from mpjax.step import TrainState
from mpjax.train._errors import ConfigError, described
from mpjax.train._files import write_atomically
from mpjax.train.config._config import Config, export_dtype
from mpjax.train.setup._experiment import Experiment, Place, apply

_FP8 = "float8_e4m3fn"
WIDE = ("float32", "float16", _FP8)  # dtypes of an export of master weights
_SCALE = "_scale"
_STORED_FP8 = "F8_E4M3"


@dataclasses.dataclass(frozen=True, repr=False)
class ExportedModel:
  """A model read from a safetensors file; `load_safetensors` returns it.

  ```python
  model = mpjax.train.load_safetensors("runs/x/model.safetensors")
  logits = model.logits(tokens)  # int32[batch, length] -> [batch, length, vocabulary]
  ```

  `params` and `model_state` are trees of arrays for your own code.

  Attributes:
    config: the config of the run that was exported.
    policy: the policy of that run. `logits` uses its compute and output dtypes.
    params: parameters in the dtype of the file (FP8 weights times their scales, in float32).
    model_state: float32 state such as BatchNorm statistics.
    task: the model's functions, as the config's `model.kind` makes them.
  """

  config: Config
  policy: Policy
  params: PyTree
  model_state: PyTree
  task: Task
  _state: TrainState

  def __repr__(self) -> str:
    leaves = jax.tree.leaves(self.params)
    dtypes = ", ".join(sorted({leaf.dtype.name for leaf in leaves}))
    parameters = f"{sum(leaf.size for leaf in leaves):,} parameters in {dtypes}"
    return f"ExportedModel({self.config.model.kind}, {parameters}, policy {self.policy.label})"

  def logits(self, inputs: ArrayLike) -> Float[Array, "*rows classes"]:
    """Returns logits in the policy's `output_dtype`: [B, T, vocab] for tokens, [B, classes] for images.

    Tokens are integers [B, T], images floating [B, H, W, C].
    """
    # Autocast takes parameters in their own dtype, and rounds each where it is used.
    params = self.policy.cast_to_param(self.params) if self.policy.autocast else self.params
    if self.task.logits is None:
      raise ConfigError(
        f"model.kind={self.config.model.kind} does not say how to compute logits: give its Task logits=, a "
        "function of parameters and inputs"
      )
    state = self._state.replace(arrays=params, model_state=self.model_state)
    return jax.jit(apply, static_argnums=(0, 1))(self.task.logits, self.policy, state, inputs)


def save_safetensors(
  path: str | pathlib.Path,
  config: Config,
  info: DataInfo,
  params: PyTree,
  model_state: PyTree,
  dtype: str | None = None,
) -> None:
  """Writes the parameters in `dtype`, the model state, and metadata for `load_safetensors`.

  The file contains no absolute path of this machine. Its mode follows the umask, like that of any new file.

  ```python
  config = mpjax.train.load_config("vit_digits")
  setup = mpjax.train.make_setup(config)
  state = setup.first_state()
  trees = state.params, state.model_state
  mpjax.train.save_safetensors("model.safetensors", config, setup.info, *trees, "bf16")
  ```

  Args:
    path: the file; written under a temporary name in the same folder, then renamed.
    config: the config of the run.
    info: facts about the data, such as the vocabulary's size, that the model's sizes follow.
    params: the master weights.
    model_state: statistics; kept in their own dtype.
    dtype: `float32`, `bfloat16`, `float16` or `float8_e4m3fn`, or `fp32`, `bf16`, `fp16` or `fp8`. FP8 is
      for the weights of FP8 products only: those under the config's policy, or under the preset `fp8` if
      that policy has no FP8. `None`: the policy's compute dtype; the logits are then bitwise equal to those
      of the policy's evaluation.

  Raises:
    ConfigError: for another dtype, for FP8 with a model without FP8 products, or if the path cannot be
      written.
  """
  path = pathlib.Path(path)
  dtype = export_dtype(dtype)
  if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
    raise ConfigError(f"cannot write {path}: expected a new file, or one to replace")
  policy = config.resolve_policy()
  half = policy.compute_dtype if policy.compute_dtype.itemsize == 2 else jnp.bfloat16
  kept = cast_floating(params, half if dtype == _FP8 else dtype or policy.compute_dtype)
  tree = {"params": kept, "model_state": model_state}
  tensors = {name: jnp.asarray(leaf) for name, leaf in named_leaves(tree)}
  if dtype == _FP8:
    master = dict(named_leaves({"params": params}))
    for name in _fp8_names(config, info, policy):
      scale = scale_of(amax_of(master[name]), jnp.float8_e4m3fn)
      tensors |= {name: quantise(master[name], scale, jnp.float8_e4m3fn), name + _SCALE: 1 / scale}
  sections = _without_folders(config.model_dump(mode="json", exclude={"out"}))
  if config.optimizer.target is not None:  # a plug-in's, which a reader of the file may not have
    del sections["optimizer"]
  facts = dataclasses.replace(info, description=config.data.kind)  # a description may name folders
  metadata = {
    "format": "mpjax-1",
    "config": json.dumps(sections),
    "data": json.dumps(_without_folders(dataclasses.asdict(facts))),
  }
  try:
    write_atomically(path, safetensors.flax.save(tensors, metadata))
  except OSError as error:
    raise ConfigError(f"cannot write {path}: {error}") from error


def export_text(path: pathlib.Path) -> str:
  """Describes a file that `save_safetensors` wrote, and says how to read it: two lines."""
  return (
    f"exported {path}: {bytes_text(path.stat().st_size)}\n"
    f'read it by mpjax.train.load_safetensors("{path}"), whose .logits(...) runs the model'
  )


def _without_folders(tree: Any) -> Any:
  """Returns plain data with only the last part of each absolute path."""
  if isinstance(tree, dict):
    return {key: _without_folders(value) for key, value in tree.items()}
  if isinstance(tree, (list, tuple)):
    return [_without_folders(value) for value in tree]
  is_path = isinstance(tree, str) and pathlib.PurePath(tree).is_absolute()
  return pathlib.PurePath(tree).name if is_path else tree


def load_safetensors(path: str | pathlib.Path) -> ExportedModel:
  """Reads a model from a file that `save_safetensors`, `mpjax export` or `train.export` wrote.

  ```python
  model = mpjax.train.load_safetensors("runs/x/model.safetensors")
  logits = model.logits(tokens)  # int32[batch, length] -> [batch, length, vocabulary]
  ```

  Returns:
    The model. `.logits(inputs)` runs it under its policy; `.params` and `.model_state` are its arrays.

  Raises:
    ConfigError: if the file is missing, is not such an export, or lacks a tensor of the model.
  """
  path = pathlib.Path(path)
  metadata, tensors = read_export(path)
  try:
    config = checked(Config, json.loads(metadata["config"]))
    info = pydantic.TypeAdapter(DataInfo).validate_json(metadata["data"])
    policy = config.resolve_policy()
    experiment = Experiment(config, info, policy.without_histories(), Place(None))
    task, like = experiment.task, experiment.state_shapes
  except (KeyError, ValueError, TypeError, RecursionError) as error:  # of metadata that somebody changed
    raise ConfigError(f"{path}: its metadata are of no model: {described(error)}") from error
  params, model_state = fitted(path, tensors, like)
  like = like.replace(opt_state={}, fp8_state={}, rng=None, step=0)
  return ExportedModel(config, policy, params, model_state, task, like)


def read_export(path: pathlib.Path) -> tuple[dict[str, str], dict[str, Array]]:
  """Returns the metadata of an export, and its tensors by name; FP8 ones times their scales, in float32.

  Raises:
    ConfigError: if the file cannot be read, or is not such an export.
  """
  try:
    with safetensors.safe_open(path, framework="flax") as file:
      metadata = file.metadata() or {}
      dtypes = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
      tensors = {name: file.get_tensor(name) for name, dtype in dtypes.items() if dtype != _STORED_FP8}
    # Arrays are read through NumPy, which has no FP8.
    stored = safetensors.deserialize(path.read_bytes()) if len(tensors) < len(dtypes) else []
  except (OSError, safetensors.SafetensorError) as error:
    raise ConfigError(f"cannot read {path}: {error}") from error
  if metadata.get("format") != "mpjax-1":
    raise ConfigError(
      f"{path}: not an export of mpjax (format={metadata.get('format')!r}, expected 'mpjax-1')"
    )
  for name, tensor in stored:
    if tensor["dtype"] == _STORED_FP8:
      scale = tensors.pop(name + _SCALE, None)
      if scale is None or scale.shape:
        raise ConfigError(f"{path}: tensor {name!r} is FP8: expected one number as {name + _SCALE!r}")
      codes = np.frombuffer(tensor["data"], jnp.float8_e4m3fn).reshape(tensor["shape"])
      tensors[name] = jnp.asarray(codes.astype(np.float32)) * scale
  return metadata, tensors


def fitted(path: pathlib.Path, tensors: dict[str, Array], like: TrainState) -> tuple[PyTree, PyTree]:
  """Returns the tensors of a file as the parameters and the model state of a model of `like`'s shapes.

  Raises:
    ConfigError: if they are of another model.
  """
  trees = {"params": like.arrays, "model_state": like.model_state}
  expected = dict(named_leaves(trees))
  for name in sorted(tensors.keys() | expected.keys()):
    found, here = (list(tree[name].shape) if name in tree else "nothing" for tree in (tensors, expected))
    if found != here:
      raise ConfigError(
        f"{path}: tensor {name!r}: expected {here}, found {found}: an export fits the same model section and "
        "data"
      )
  made = jax.tree.unflatten(jax.tree.structure(trees), [tensors[name] for name in expected])
  return made["params"], made["model_state"]


def _fp8_names(config: Config, info: DataInfo, policy: Policy) -> Iterable[str]:
  """Returns the names of the weights of FP8 products."""
  recipe = policy.without_histories().fp8 or Recipe()
  half = policy if policy.compute_dtype.itemsize == 2 else get_policy("bf16")
  fp8 = dataclasses.replace(half, fp8=dataclasses.replace(recipe, emulate=True), autocast=True)
  block = max(BLOCKS.values())
  rows = -(-recipe.min_dim // block) * block  # large enough, and divisible, for every FP8 product
  config = config.changed({"data.batch_size": rows, "train.accumulate": 1})
  experiment = Experiment(config, info, fp8, Place(None))
  arguments, keywords = experiment.step.loss.arguments(*experiment.shapes())
  found = fp8_weights(experiment.task.loss_fn, fp8)(*arguments, **keywords)
  names = {name.removeprefix("0/") for name in found if name.startswith("0/")}
  if not names:
    raise ConfigError(
      f"export dtype {_FP8}: no matrix product of this model is FP8 under its policy (mpjax explain "
      "with policy=fp8 policy.fp8.emulate=true says why); use bfloat16"
    )
  return [f"params/{name}" for name in names]
