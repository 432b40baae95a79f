"""A GPT and a ViT in plain linen, which the autocast suite casts by itself and beside casts by hand.

Every model takes linen's own `dtype`. None is the plain float32 model: what follows the argument below
(`astype` to what a value has already) then puts nothing into the program. With a half-precision dtype it is
the same model with careful casts by hand: softmax, normalising statistics and loss in float32, their results
back in half precision. The parameters are the same, and float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax


class Attention(nn.Module):
  heads: int
  causal: bool
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    b, t, d = x.shape
    qkv = nn.Dense(3 * d, dtype=self.dtype, name="qkv")(x)
    q, k, v = jnp.moveaxis(qkv.reshape(b, t, 3, self.heads, d // self.heads), 2, 0)  # each [B, T, H, D]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q * (d // self.heads) ** -0.5, k).astype(jnp.float32)
    if self.causal:
      scores = jnp.where(jnp.tri(t, dtype=bool), scores, -jnp.inf)
    weights = nn.softmax(scores).astype(v.dtype)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v)
    return nn.Dense(d, dtype=self.dtype, name="out")(mixed.reshape(b, t, d))


class Block(nn.Module):
  heads: int
  causal: bool
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    d = x.shape[-1]
    y = nn.LayerNorm(dtype=self.dtype, name="ln1")(x)
    x = x + Attention(self.heads, self.causal, self.dtype, name="attn")(y)
    y = nn.LayerNorm(dtype=self.dtype, name="ln2")(x)
    y = nn.gelu(nn.Dense(4 * d, dtype=self.dtype, name="up")(y))
    return x + nn.Dense(d, dtype=self.dtype, name="down")(y)


class GPT(nn.Module):
  width: int
  heads: int
  layers: int
  vocab: int
  dtype: Any = None

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = nn.Embed(self.vocab, self.width, dtype=self.dtype, name="embed")(tokens)  # [B, T, width]
    position = self.param("position", nn.initializers.normal(0.02), x.shape[1:])
    x = x + position.astype(x.dtype)
    for i in range(self.layers):
      x = Block(self.heads, True, self.dtype, name=f"h{i}")(x)
    x = nn.LayerNorm(dtype=self.dtype, name="ln")(x)
    return nn.Dense(self.vocab, dtype=self.dtype, name="head")(x)  # [B, T, vocab]


class ViT(nn.Module):
  width: int
  heads: int
  layers: int
  patch: int
  classes: int
  dtype: Any = None

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    window = (self.patch, self.patch)
    x = nn.Conv(self.width, window, window, dtype=self.dtype, name="patches")(images)
    x = x.reshape(x.shape[0], -1, self.width)  # [B, T, width]
    position = self.param("position", nn.initializers.normal(0.02), x.shape[1:])
    x = x + position.astype(x.dtype)
    for i in range(self.layers):
      x = Block(self.heads, False, self.dtype, name=f"h{i}")(x)
    x = nn.LayerNorm(dtype=self.dtype, name="ln")(x).mean(1)
    return nn.Dense(self.classes, dtype=self.dtype, name="head")(x)  # [B, classes]


@dataclasses.dataclass(frozen=True)
class Task:
  """A float32 model, and the shapes of its batch."""

  model: Any
  x: jax.ShapeDtypeStruct
  y: jax.ShapeDtypeStruct
  labels: int

  def loss(self, dtype: Any = None) -> Callable[[Any, Any], jax.Array]:
    """The mean cross entropy, `(params, batch) -> float32[]`; cast by hand where given a dtype."""
    model = self.model.clone(dtype=dtype)

    def loss(params: Any, batch: Any) -> jax.Array:
      logits = model.apply(params, batch["x"]).astype(jnp.float32)
      return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return loss

  def init(self) -> Any:
    """The float32 parameters."""
    return jax.jit(self.model.init)(jax.random.key(0), jnp.zeros((1, *self.x.shape[1:]), self.x.dtype))

  def batch(self) -> Any:
    """Random inputs and labels."""
    rng = np.random.default_rng(0)
    if jnp.issubdtype(self.x.dtype, jnp.integer):
      x = rng.integers(0, self.labels, self.x.shape)
    else:
      x = rng.normal(size=self.x.shape)
    y = rng.integers(0, self.labels, self.y.shape)
    return {"x": jnp.asarray(x, self.x.dtype), "y": jnp.asarray(y, self.y.dtype)}


def gpt(width: int, heads: int, layers: int, seq: int, batch: int, vocab: int = 256) -> Task:
  tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
  return Task(GPT(width, heads, layers, vocab), tokens, tokens, vocab)


def vit(
  width: int, heads: int, layers: int, side: int, batch: int, patch: int = 16, classes: int = 1000
) -> Task:
  images = jax.ShapeDtypeStruct((batch, side, side, 3), jnp.float32)
  labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
  return Task(ViT(width, heads, layers, patch, classes), images, labels, classes)
