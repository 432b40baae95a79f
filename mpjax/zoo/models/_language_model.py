"""`model.kind: gpt`: next-token prediction with a `GPT` (nnx)."""

from __future__ import annotations

import functools
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import pydantic
from jaxtyping import Float, Key, PRNGKeyArray

from mpjax._average import Average
from mpjax._types import Array
from mpjax.ops import linear_cross_entropy
from mpjax.registry._kinds import Natural, Positive, register_model
from mpjax.registry._task import ModelInfo, Task
from mpjax.zoo.models._fused_attention import chosen_attention
from mpjax.zoo.models._losses import cross_entropy
from mpjax.zoo.models._model_sharding import gpt_sharding

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

  from mpjax.zoo.models._gpt import GPT

  vocab_size, seq_len = info.vocab_size, info.seq_len
  masked = _is_masked(info)
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
      return cross_entropy(model(tokens, rng=row_rngs), labels, where)
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


def _is_masked(info: ModelInfo) -> bool:
  """Returns whether rows have a mask of the tokens that count."""
  row = getattr(info, "row", {})
  if "mask" not in row:
    return False
  (dtype, shape), (_, tokens) = row["mask"], row["tokens"]
  if dtype != "bool" or tuple(shape) != tuple(tokens):
    raise ValueError(
      f"rows hold a mask of {dtype}{list(shape)}: expected bool{list(tokens)}, which of the tokens count; "
      "give it another name if it says something else"
    )
  return True
