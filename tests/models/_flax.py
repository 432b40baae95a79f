"""Models of Flax's layers, in the shapes of the examples that come with Flax."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx

from tests.models._model import CLASSES, LENGTH, VOCAB, Model, cross_entropy, drawn, images, next_token, text


def linen(module: nn.Module, loss: Callable[..., jax.Array], batch: Any, *inputs: str) -> Model:
  """Returns the model of a module that reads `inputs` of a batch; the loss takes (outputs, batch)."""
  rngs = {"params": jax.random.key(0), "sample": jax.random.key(0)}
  shapes = jax.eval_shape(module.init, rngs, *(batch[name] for name in inputs))

  def of_params(params, batch, key):
    return loss(module.apply(params, *(batch[name] for name in inputs), rngs={"sample": key}), batch)

  return Model(of_params, drawn(shapes), batch)


class CNN(nn.Module):
  @nn.compact
  def __call__(self, x):  # [B, H, W, C]
    for features in (16, 32):
      x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


def cnn() -> Model:
  of_labels = lambda logits, batch: cross_entropy(logits, batch["y"])
  return linen(CNN(), of_labels, images(16, 28, 28, 1), "x")


class GPT(nn.Module):
  """A causal block, its embedding its head; where it has a dtype, with the casts of a careful author."""

  dtype: Any = None

  @nn.compact
  def __call__(self, tokens):  # [B, T]
    dense, norm = (functools.partial(layer, dtype=self.dtype) for layer in (nn.Dense, nn.LayerNorm))
    embed = nn.Embed(VOCAB, 64, dtype=self.dtype)
    x = embed(tokens)
    x = x + self.param("position", nn.initializers.normal(), x.shape[1:]).astype(x.dtype)
    softmax = {"force_fp32_for_softmax": self.dtype is not None}
    attention = nn.MultiHeadDotProductAttention(4, dtype=self.dtype, **softmax)
    x = x + attention(norm()(x), mask=nn.make_causal_mask(tokens))
    x = x + dense(64)(nn.gelu(dense(256)(norm()(x))))
    return embed.attend(norm()(x)).astype(jnp.float32)


def gpt(dtype: Any = None) -> Model:
  return linen(GPT(dtype), lambda logits, batch: next_token(logits, batch["x"]), {"x": text()}, "x")


class Decoder(nnx.Module):
  """A block of attention and a gated layer, each after a norm by root mean squares."""

  def __init__(self, rngs: nnx.Rngs, width: int = 64):
    self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
    self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (LENGTH, width)))
    self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(3)])
    self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
    self.gate, self.up = (nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs) for _ in range(2))
    self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

  def __call__(self, tokens):  # [B, T]
    x = self.embed(tokens) + self.position[...]
    x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(tokens))
    y = self.norms[1](x)
    x = x + self.down(nnx.silu(self.gate(y)) * self.up(y))
    return self.embed.attend(self.norms[2](x))


def decoder() -> Model:
  graph, shapes, rest = nnx.split(nnx.eval_shape(lambda: Decoder(nnx.Rngs(0))), nnx.Param, ...)

  def loss(params, batch, key):
    return next_token(nnx.merge(graph, params, rest)(batch["x"]), batch["x"])

  return Model(loss, drawn(shapes), {"x": text()})


MODELS = {"Flax CNN": cnn, "Flax GPT": gpt, "Flax nnx decoder": decoder}
