"""Tasks: a model with its loss and its evaluation, in one interface for nnx and linen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Float, Float32, Int, PRNGKeyArray

from mpjax._types import Array, LossFunction, Metrics, PyTree
from mpjax.casting import autocast
from mpjax.casting._fp8_state import fp8_weights
from mpjax.dtypes import platform
from mpjax.policy import Policy, matmul_precision
from mpjax.sharding import ShardingRule
from mpjax.train._config import Config, ConfigError, GPTConfig, ResNetConfig, ViTConfig
from mpjax.train.data import DataInfo
from mpjax.train.models import GPT, ResNet, ViT, _model_sharding

_Batch = dict[str, Array]
_Inputs = Array | jax.ShapeDtypeStruct


class Task(Protocol):
  """A model with its loss.

  Attributes:
    loss_fn: what `mpjax.make_train_step` takes.
    units: what a batch row counts: `"tokens"` or `"images"`, and how many a row holds.
    sharding: where parameters lie on a mesh, by path and shape.
  """

  units: tuple[str, int]
  sharding: ShardingRule

  @property
  def loss_fn(self) -> LossFunction:
    """The loss function."""

  def init(self, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Makes keyword arguments of `TrainStep.init`: `params`, and `model_state` if there is one."""

  def logits(
    self, params: PyTree, model_state: PyTree, inputs: Array, policy: Policy, fp8_state: PyTree = None
  ) -> Float[Array, "*rows classes"]:
    """Computes evaluation logits under the policy, in its `output_dtype`, from master weights.

    Delayed FP8 scaling takes its histories from `fp8_state`; without one, each tensor has its own scale.
    """

  def fp8_weights(self, params: PyTree, model_state: PyTree, inputs: _Inputs, policy: Policy) -> set[str]:
    """Returns tree paths of the parameters that FP8 products read under the policy; inputs may be shapes."""

  def evaluate(
    self, params: PyTree, model_state: PyTree, batch: _Batch, policy: Policy, fp8_state: PyTree = None
  ) -> Metrics:
    """Computes f32[] means over a batch: `eval_loss` and what a person asks for beside it."""


def make_task(config: Config, info: DataInfo, policy: Policy, *, backend: str | None = None) -> Task:
  """Makes the task of a config and a dataset, for this machine's backend or another.

  Raises:
    ConfigError: if the model does not take such data, or its sizes do not fit together.
  """
  if (info.kind == "tokens") != isinstance(config.model, GPTConfig):
    fits = "gpt" if info.kind == "tokens" else "vit or resnet"
    raise ConfigError(
      f"model.kind={config.model.kind!r} does not take the {info.kind} of data.kind={config.data.kind!r}: "
      f"use model.kind {fits}"
    )
  attention = getattr(config.model, "attention", "auto")
  if attention == "cudnn" and policy.autocast:
    raise ConfigError(
      "model.attention=cudnn under autocast, which takes a float32 program, and the fused kernel takes none: "
      "use auto, or autocast: false in the policy"
    )
  if attention == "cudnn" and (platform(backend) != "gpu" or policy.compute_dtype.itemsize != 2):
    raise ConfigError(
      f"model.attention=cudnn on {platform(backend)} in {policy.compute_dtype.name}: the fused kernel needs "
      "an NVIDIA GPU and a half-precision policy; use auto"
    )
  task: Task
  remat = config.train.recompute == "blocks"
  try:
    if isinstance(config.model, GPTConfig):
      task = LanguageModel(config.model, info, policy, remat)
    else:
      task = ImageClassifier(config.model, info, policy, remat)
    jax.eval_shape(lambda: task.init(jax.random.key(0)) and None)
  except ValueError as error:
    raise ConfigError(f"model: {error}") from error
  return task


class LanguageModel:
  """Next-byte prediction with a `GPT` (nnx)."""

  def __init__(self, config: GPTConfig, info: DataInfo, policy: Policy, remat: bool):
    self._arguments = config.model_dump(exclude={"kind"}) | {
      "remat": remat,
      "vocab_size": info.vocab_size,
      "max_len": info.seq_len,
    }
    self._policy = policy
    self._graphdef = nnx.graphdef(nnx.eval_shape(lambda: self._make(jax.random.key(0))))
    self.units = ("tokens", info.seq_len or 0)
    self.sharding: ShardingRule = _model_sharding.gpt_sharding

  def _make(self, key: jax.Array) -> GPT:
    return GPT(**self._arguments, rngs=nnx.Rngs(params=key))

  def init(self, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Makes a new model."""
    return {"params": self._make(key)}

  def loss_fn(self, model: GPT, batch: _Batch, row_rngs: PRNGKeyArray) -> Float[Array, ""]:
    """Computes the mean cross entropy in nats a token."""
    logits = self._policy.cast_to_output(model(batch["tokens"][:, :-1], rng=row_rngs))
    return _cross_entropy(logits, batch["tokens"][:, 1:])

  def logits(
    self, params: PyTree, model_state: PyTree, inputs: Array, policy: Policy, fp8_state: PyTree = None
  ) -> Float[Array, "*rows classes"]:
    """[B, T] tokens -> [B, T, vocab]."""
    run = lambda params, inputs: nnx.merge(self._graphdef, params, model_state)(inputs)
    if policy.autocast:  # the module as an argument, which gives its parts their paths
      model = nnx.merge(self._graphdef, params, model_state)
      return _autocast(lambda model, inputs: model(inputs), policy, fp8_state)(model, inputs)
    return _cast_call(run, policy)(params, inputs)

  def fp8_weights(self, params: PyTree, model_state: PyTree, inputs: _Inputs, policy: Policy) -> set[str]:
    """Paths such as `blocks/0/qkv/kernel`."""
    model = nnx.merge(self._graphdef, params, model_state)
    return _without_number(fp8_weights(lambda model, inputs: model(inputs), policy)(model, inputs))

  def evaluate(
    self, params: PyTree, model_state: PyTree, batch: _Batch, policy: Policy, fp8_state: PyTree = None
  ) -> Metrics:
    """`eval_loss` (nats a token), `eval_bits_per_byte`."""
    logits = self.logits(params, model_state, batch["tokens"][:, :-1], policy, fp8_state)
    loss = _cross_entropy(logits, batch["tokens"][:, 1:])
    return {"eval_loss": loss, "eval_bits_per_byte": loss / jnp.log(2.0)}


class ImageClassifier:
  """Classification with a `ViT` or a `ResNet` (linen)."""

  def __init__(self, config: ViTConfig | ResNetConfig, info: DataInfo, policy: Policy, remat: bool):
    kinds: dict[str, type[ViT] | type[ResNet]] = {"vit": ViT, "resnet": ResNet}
    self._module = kinds[config.kind](
      num_classes=info.num_classes, remat=remat, **config.model_dump(exclude={"kind"})
    )
    self._image_shape = info.image_shape
    self._policy = policy
    self.units = ("images", 1)
    self.sharding: ShardingRule = {
      "vit": _model_sharding.vit_sharding,
      "resnet": _model_sharding.resnet_sharding,
    }[config.kind]
    self._by_row = isinstance(config, ViTConfig)

  def init(self, key: PRNGKeyArray) -> dict[str, PyTree]:
    """Makes new parameters and statistics."""
    variables = self._module.init(key, jnp.zeros((1, *(self._image_shape or ()))), train=False)
    model_state = {name: tree for name, tree in variables.items() if name != "params"}
    return {"params": variables["params"], "model_state": model_state}

  def loss_fn(
    self, params: PyTree, batch: _Batch, model_state: PyTree, row_rngs: PRNGKeyArray
  ) -> tuple[Float[Array, ""], Metrics, PyTree]:
    """Computes the mean cross entropy, with the accuracy of the batch."""
    logits, model_state = self._module.apply(
      {"params": params, **model_state},
      batch["images"],
      train=True,
      mutable=list(model_state),
      **({"row_rngs": row_rngs} if self._by_row else {}),
    )
    logits = self._policy.cast_to_output(logits)
    return (
      _cross_entropy(logits, batch["labels"]),
      {"accuracy": _accuracy(logits, batch["labels"])},
      model_state,
    )

  def logits(
    self, params: PyTree, model_state: PyTree, inputs: Array, policy: Policy, fp8_state: PyTree = None
  ) -> Float[Array, "*rows classes"]:
    """[B, H, W, C] images -> [B, classes]."""
    run = self._forward(model_state)
    cast = _autocast(run, policy, fp8_state) if policy.autocast else _cast_call(run, policy)
    return cast(params, inputs)

  def fp8_weights(self, params: PyTree, model_state: PyTree, inputs: _Inputs, policy: Policy) -> set[str]:
    """Paths such as `block0/up/kernel`."""
    return _without_number(fp8_weights(self._forward(model_state), policy)(params, inputs))

  def _forward(self, model_state: PyTree) -> Callable[[PyTree, Array], Array]:
    return lambda params, inputs: self._module.apply({"params": params, **model_state}, inputs, train=False)

  def evaluate(
    self, params: PyTree, model_state: PyTree, batch: _Batch, policy: Policy, fp8_state: PyTree = None
  ) -> Metrics:
    """`eval_loss` (nats an image), `eval_accuracy`."""
    logits = self.logits(params, model_state, batch["images"], policy, fp8_state)
    return {
      "eval_loss": _cross_entropy(logits, batch["labels"]),
      "eval_accuracy": _accuracy(logits, batch["labels"]),
    }


def _without_number(names: set[str]) -> set[str]:
  """Paths in the first argument, without its number."""
  return {name.partition("/")[2] for name in names}


def _autocast(run: Callable[..., Array], policy: Policy, fp8_state: PyTree) -> Callable[..., Array]:
  return autocast(run, policy if fp8_state else policy.without_histories(), fp8_state=fp8_state or None)


def _cast_call(run: Callable[..., Array], policy: Policy) -> Callable[..., Array]:
  """Runs a function on arguments in the compute dtype, and casts its result to the output dtype."""

  def cast(*args: PyTree) -> Array:
    with matmul_precision(policy):
      return policy.cast_to_output(run(*policy.cast_to_compute(args)))

  return cast


def _cross_entropy(logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]) -> Float32[Array, ""]:
  # In float32 whatever the output dtype: log-sum-exp over many classes loses float16's last bits.
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
  return losses.mean()


def _accuracy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float32[Array, ""]:
  return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
