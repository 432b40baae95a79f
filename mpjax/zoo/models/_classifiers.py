"""`model.kind: vit` and `resnet`: image classifiers (linen)."""

from __future__ import annotations

import functools
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Float, Key, PRNGKeyArray

from mpjax._types import Array, Metrics, PyTree
from mpjax.registry._kinds import Positive, register_model
from mpjax.registry._task import ModelInfo, Task
from mpjax.sharding import ShardingRule
from mpjax.zoo.models._fused_attention import chosen_attention
from mpjax.zoo.models._language_model import Fraction
from mpjax.zoo.models._losses import accuracy, cross_entropy
from mpjax.zoo.models._model_sharding import resnet_sharding, vit_sharding

_Batch = dict[str, Array]
_Outputs = tuple[Any, Metrics, PyTree]


@register_model("vit")
def vit(
  info: ModelInfo,
  *,
  patch: Positive = 2,
  dim: Positive = 64,
  layers: Positive = 4,
  heads: Positive = 4,
  mlp_ratio: Positive = 4,
  dropout: Fraction = 0.0,
  attention: Literal["auto", "xla"] = "auto",
) -> Task:
  """Makes a vision transformer for rows of `images` and `labels`."""
  from mpjax.zoo.models._vit import ViT

  classes, (height, width) = info.num_classes, info.image_shape[:2]
  length = height // patch * (width // patch)
  chosen = chosen_attention(attention, info, heads=heads, head_dim=dim // heads, length=length)
  module = ViT(
    num_classes=classes,
    patch=patch,
    dim=dim,
    layers=layers,
    heads=heads,
    mlp_ratio=mlp_ratio,
    dropout=dropout,
    attention=chosen,
    remat=info.recompute == "blocks",
  )

  def loss_fn(params: PyTree, batch: _Batch, model_state: PyTree, row_rngs: Key[Array, " rows"]) -> _Outputs:
    return _training_loss(module, params, batch, model_state, row_rngs=row_rngs)

  sharding = functools.partial(vit_sharding, heads=heads)
  return _classifier(module, info, loss_fn, sharding)


@register_model("resnet")
def resnet(info: ModelInfo, *, stages: tuple[Positive, ...] = (2, 2, 2), width: Positive = 32) -> Task:
  """Makes a residual network with BatchNorm for rows of `images` and `labels`."""
  from mpjax.zoo.models._resnet import ResNet

  remat = info.recompute == "blocks"
  module = ResNet(num_classes=info.num_classes, stages=stages, width=width, remat=remat)

  def loss_fn(params: PyTree, batch: _Batch, model_state: PyTree) -> _Outputs:
    return _training_loss(module, params, batch, model_state)

  return _classifier(module, info, loss_fn, resnet_sharding)


def _training_loss(
  module: Any, params: PyTree, batch: _Batch, model_state: PyTree, **keywords: Any
) -> _Outputs:
  """Computes the mean cross entropy, with the accuracy of the batch."""
  variables = {"params": params, **model_state}
  images = batch["images"]
  logits, model_state = module.apply(variables, images, train=True, mutable=list(model_state), **keywords)
  labels = batch["labels"]
  return cross_entropy(logits, labels), {"accuracy": accuracy(logits, labels)}, model_state


def _classifier(module: Any, info: ModelInfo, loss_fn: Any, sharding: ShardingRule) -> Task:
  image_shape = tuple(info.image_shape)

  def init(key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    variables = dict(module.init(key, jnp.zeros((1, *image_shape)), train=False))
    return variables.pop("params"), variables

  def logits(params: PyTree, images: Array, model_state: PyTree) -> Float[Array, "batch classes"]:
    """[B, H, W, C] images -> [B, classes]."""
    return module.apply({"params": params, **model_state}, images, train=False)

  def evaluate(params: PyTree, batch: _Batch, model_state: PyTree) -> dict[str, Any]:
    out, labels = logits(params, batch["images"], model_state), batch["labels"]
    return {"loss": cross_entropy(out, labels), "accuracy": accuracy(out, labels)}

  return Task(init, loss_fn, evaluate, logits, sharding, ("images", 1))
