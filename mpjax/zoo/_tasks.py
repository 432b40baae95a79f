"""`model.kind: gpt` (nnx), `vit` and `resnet` (linen): the models with their losses.

To read a config takes no model: these functions import it.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import optax
import pydantic
from jaxtyping import Bool, Float, Float32, Int, Key, PRNGKeyArray

from mpjax._average import Average
from mpjax._types import Array, Metrics, PyTree
from mpjax.ops import linear_cross_entropy
from mpjax.registry import ModelInfo, Natural, Positive, Task, register_model
from mpjax.sharding import ShardingRule

Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
_Batch = dict[str, Array]


@register_model("gpt")
def gpt(
  info: ModelInfo,
  *,
  dim: Positive = 128,
  layers: Positive = 4,
  heads: Positive = 4,
  mlp_ratio: Positive = 4,
  norm: Literal["rms", "layer"] = "rms",
  positions: Literal["rope", "learned"] = "rope",
  dropout: Fraction = 0.0,
  tie_head: bool = True,
  attention: Literal["auto", "xla"] = "auto",
  loss_rows: Natural | None = None,
) -> Task:
  """Makes a decoder-only transformer for rows of `tokens` and, optionally, `mask`.

  `mask` is bool and has the shape of `tokens`. The loss is then the mean over the tokens of a batch whose
  mask is true, however the batch is divided. Attention is causal: padding at the end of a row does not change
  the tokens before it.

  `loss_rows` tokens at a time go through the output matrix and the loss; all of them for 0. The default is
  1024 if the vocabulary is above 16,384, else 0.
  """
  from flax import nnx

  from mpjax.zoo.models import GPT, chosen_attention, gpt_sharding

  vocab_size, seq_len = info.vocab_size, info.seq_len
  given = info.row.get("tokens", ("", ()))[1]
  shape = given if len(given) == 1 and 2 <= given[0] <= seq_len else (seq_len + 1,)
  _require(info, "tokens", "int", shape)
  if masked := "mask" in info.row:
    _require(info, "mask", "bool", shape)
  if loss_rows is None:
    loss_rows = 1024 if vocab_size > 1 << 14 else 0
  chosen = chosen_attention(attention, info, heads=heads, head_dim=dim // heads, length=seq_len)

  def init(key: PRNGKeyArray) -> GPT:
    return GPT(
      vocab_size=vocab_size,
      max_len=seq_len,
      dim=dim,
      layers=layers,
      heads=heads,
      mlp_ratio=mlp_ratio,
      norm=norm,
      positions=positions,
      dropout=dropout,
      tie_head=tie_head,
      attention=chosen,
      remat=info.recompute == "blocks",
      rngs=nnx.Rngs(params=key),
    )

  def loss_fn(
    model: GPT, batch: _Batch, row_rngs: Key[Array, " rows"] | None = None
  ) -> Float[Array, ""] | Average:
    """Returns the mean cross entropy in nats per token."""
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    where = batch["mask"][:, 1:] if masked else None
    if not loss_rows:
      return _cross_entropy(model(tokens, rng=row_rngs), labels, where)
    x = model.hidden(tokens, rng=row_rngs)
    with jax.named_scope("head"):  # the same name as in the model
      loss = functools.partial(linear_cross_entropy, x, model.head_kernel, labels, rows=loss_rows)
      return loss() if where is None else loss(where=where, as_average=True)

  def evaluate(model: GPT, batch: _Batch) -> dict[str, Array | Average]:
    loss = loss_fn(model, batch)
    if getattr(info, "bytes_per_token", None) != 1:
      return {"loss": loss}
    return {"loss": loss, "bits_per_byte": loss / jnp.log(2.0)}

  def logits(model: GPT, tokens: jax.Array) -> Float[Array, "batch length vocab"]:
    """[B, T] tokens -> [B, T, vocab]."""
    return model(tokens)

  sharding = functools.partial(gpt_sharding, heads=heads)
  return Task(init, loss_fn, evaluate, logits, sharding, ("tokens", seq_len))


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
  from mpjax.zoo.models import ViT, chosen_attention, vit_sharding

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
  return _classifier(module, info, functools.partial(vit_sharding, heads=heads), by_row=True)


@register_model("resnet")
def resnet(info: ModelInfo, *, stages: tuple[Positive, ...] = (2, 2, 2), width: Positive = 32) -> Task:
  """Makes a residual network with BatchNorm for rows of `images` and `labels`."""
  from mpjax.zoo.models import ResNet, resnet_sharding

  remat = info.recompute == "blocks"
  module = ResNet(num_classes=info.num_classes, stages=stages, width=width, remat=remat)
  return _classifier(module, info, resnet_sharding, by_row=False)


def _require(info: ModelInfo, name: str, kind: str, shape: tuple[int, ...]) -> None:
  """Raises `ValueError` unless rows hold an array of this name and shape, and of a dtype of this kind."""
  dtype, given = info.row.get(name, ("nothing", ()))
  if name not in info.row or kind not in dtype or given != shape:
    raise ValueError(f"rows hold {name} of {dtype}{list(given)}: expected {kind}{list(shape)}")


def _classifier(module: Any, info: ModelInfo, sharding: ShardingRule, *, by_row: bool) -> Task:
  """Makes the task of a linen module; `by_row`: it takes a key for each row."""
  image_shape = (*info.image_shape, 1)[:3]
  _require(info, "images", "", image_shape)
  _require(info, "labels", "int", ())

  def init(key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
    variables = dict(module.init(key, jnp.zeros((1, *image_shape)), train=False))
    return variables.pop("params"), variables

  def measured(out: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> dict[str, Any]:
    loss = _cross_entropy(out, labels)
    return {"loss": loss, "accuracy": (out.argmax(-1) == labels).mean(dtype=jnp.float32)}

  def loss_fn(
    params: PyTree, batch: _Batch, model_state: PyTree, row_rngs: Key[Array, " rows"] | None
  ) -> tuple[Any, Metrics, PyTree]:
    variables, keys = {"params": params, **model_state}, {"row_rngs": row_rngs} if by_row else {}
    out, new = module.apply(variables, batch["images"], train=True, mutable=list(model_state), **keys)
    metrics = measured(out, batch["labels"])
    return metrics.pop("loss"), metrics, new

  def logits(params: PyTree, images: Array, model_state: PyTree) -> Float[Array, "batch classes"]:
    """[B, H, W, C] images -> [B, classes]."""
    return module.apply({"params": params, **model_state}, images, train=False)

  def evaluate(params: PyTree, batch: _Batch, model_state: PyTree) -> dict[str, Any]:
    return measured(logits(params, batch["images"], model_state), batch["labels"])

  run = loss_fn if by_row else functools.partial(loss_fn, row_rngs=None)
  return Task(init, run, evaluate, logits, sharding, ("images", 1))


def _cross_entropy(
  logits: Float[Array, "*rows classes"],
  labels: Int[Array, "*rows"],
  where: Bool[Array, "*rows"] | None = None,
) -> Float32[Array, ""] | Average:
  """Returns the mean cross entropy in nats, of the rows where `where` is true if it is given."""
  # In float32 for every output dtype: log-sum-exp over many classes loses float16's last bits.
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
  if where is None:
    return losses.mean()
  return Average(jnp.where(where, losses, 0).sum(), where.sum(dtype=jnp.int32))
