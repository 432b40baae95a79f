"""Small whole models in plain float32 code, each also with careful casts by hand.

Given `dtype=None` the code below is the float32 model: what follows `dtype` then (`astype` to what a value has
already) puts nothing into the program. Given a half-precision dtype it is what a careful author writes: products
in `dtype`; softmax, statistics of norms, recurrent memory, sums over experts and the loss in float32.
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

VOCAB, EXPERTS = 32, 4
Loss = Callable[[Any, Any], jax.Array]


@dataclasses.dataclass(frozen=True)
class Model:
  """A model with a task that it learns in a few steps.

  Attributes:
    init: () -> float32 parameters.
    loss: dtype or None -> (params, batch) -> float32[].
  """

  init: Callable[[], Any]
  loss: Callable[[Any], Loss]


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def text_batch(seed: int, batch: int = 8, length: int = 16) -> dict[str, np.ndarray]:
  """Tokens of which the next follows from the last two, with some noise."""
  rng = np.random.default_rng(seed)
  tokens = rng.integers(0, VOCAB, (batch, length + 1))
  for i in range(2, length + 1):
    follows = (tokens[:, i - 1] + 3 * (tokens[:, i - 2] % 4) + 1) % VOCAB
    tokens[:, i] = np.where(rng.random(batch) < 0.9, follows, tokens[:, i])
  return {"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32)}


# GPT, linen: a causal mask of finfo.min, embeddings shared with the head.
class GPTBlock(nn.Module):
  dtype: Any

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:  # [B, T, D]
    d = x.shape[-1]
    mask = nn.make_causal_mask(x[..., 0])
    attention = nn.MultiHeadDotProductAttention(
      2, dtype=self.dtype, force_fp32_for_softmax=self.dtype is not None, name="attention"
    )
    x = x + attention(nn.LayerNorm(dtype=self.dtype)(x), mask=mask)
    y = nn.Dense(4 * d, dtype=self.dtype, name="up")(nn.LayerNorm(dtype=self.dtype)(x))
    return x + nn.Dense(d, dtype=self.dtype, name="down")(nn.gelu(y))


class GPT(nn.Module):
  dtype: Any
  width: int = 32

  @nn.compact
  def __call__(self, tokens: jax.Array) -> jax.Array:  # [B, T]
    embed = nn.Embed(VOCAB, self.width, dtype=self.dtype, name="embed")
    position = self.param("position", nn.initializers.normal(0.02), (tokens.shape[1], self.width))
    x = embed(tokens)
    x = x + position.astype(x.dtype)
    x = GPTBlock(self.dtype, name="block")(x)
    return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))  # [B, T, VOCAB]


# An LSTM by scan, plain JAX.
def lstm_init() -> Any:
  draw = drawer()
  embed, bias = draw(VOCAB, 32, scale=1.0), np.zeros(128, np.float32)
  products = {"in": draw(32, 128), "hidden": draw(32, 128), "out": draw(32, VOCAB)}
  return {"embed": embed, "bias": bias, **products}


def lstm_loss(dtype: Any) -> Loss:
  def loss(params: Any, batch: Any) -> jax.Array:
    half = lambda x: x.astype(dtype or x.dtype)

    def cell(carry: Any, x: jax.Array) -> tuple[Any, jax.Array]:  # x: [B, D]
      hidden, memory = carry
      gates = half(x) @ half(params["in"]) + half(hidden) @ half(params["hidden"])
      i, f, g, o = jnp.split(gates.astype(jnp.float32) + params["bias"], 4, -1)
      memory = jax.nn.sigmoid(f + 1) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
      hidden = half(jax.nn.sigmoid(o) * jnp.tanh(memory))
      return (hidden, memory), hidden

    x = half(jnp.swapaxes(params["embed"][batch["x"]], 0, 1))  # [T, B, D]
    _, hidden = jax.lax.scan(cell, (jnp.zeros_like(x[0]), jnp.zeros(x[0].shape)), x)
    return cross_entropy(jnp.swapaxes(hidden @ half(params["out"]), 0, 1), batch["y"])

  return loss


# A mixture of experts by ragged products, plain JAX: two experts for each token, a balancing loss.
def experts_init() -> Any:
  draw = drawer()
  layer = {"router": draw(32, EXPERTS), "up": draw(EXPERTS, 32, 64), "down": draw(EXPERTS, 64, 32)}
  embed, scale = draw(VOCAB, 32, scale=1.0), np.ones(32, np.float32)
  return {"embed": embed, "scale": scale, **layer, "out": draw(64, VOCAB)}


def experts_loss(dtype: Any) -> Loss:
  def loss(params: Any, batch: Any) -> jax.Array:
    half = lambda x: x.astype(dtype or x.dtype)
    x = half(params["embed"][batch["x"].reshape(-1)])  # [N, D]
    wide = x.astype(jnp.float32)
    root = jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)
    y = half(wide * root * params["scale"])
    probabilities = jax.nn.softmax((y @ half(params["router"])).astype(jnp.float32))  # [N, EXPERTS]
    gates, chosen = jax.lax.top_k(probabilities, 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    up = jax.nn.silu(jax.lax.ragged_dot(y[order // 2], half(params["up"]), sizes))
    down = jax.lax.ragged_dot(up, half(params["down"]), sizes)
    weighted = down.astype(jnp.float32) * gates.reshape(-1)[order][:, None]
    x = x + half(jnp.zeros(x.shape).at[order // 2].add(weighted))
    x = x.reshape(*batch["x"].shape, -1)
    before = jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))  # the token before, too
    logits = jnp.concatenate([x, before], -1) @ half(params["out"])
    balance = EXPERTS * jnp.sum(probabilities.mean(0) * jax.lax.stop_gradient(sizes / order.size))
    return cross_entropy(logits, batch["y"]) + 0.01 * balance

  return loss


def drawer() -> Callable[..., np.ndarray]:
  rng = np.random.default_rng(0)

  def draw(*shape: int, scale: float | None = None) -> np.ndarray:
    scale = shape[-2] ** -0.5 if scale is None else scale
    return np.asarray(scale * rng.standard_normal(shape), np.float32)

  return draw


def drawn(shapes: Any) -> Any:
  """Initial values for a tree of shapes, by the name of the leaf; to compile an initialiser takes seconds."""
  draw = drawer()

  def fill(path: Any, leaf: Any) -> np.ndarray:
    name = jax.tree_util.keystr(path)
    if leaf.ndim == 1:
      return np.full(leaf.shape, "scale" in name, np.float32)
    if "kernel" not in name:
      return draw(*leaf.shape, scale=0.02 if leaf.shape[0] != VOCAB else leaf.shape[1] ** -0.5)
    return draw(*leaf.shape, scale=(leaf.size / leaf.shape[-1]) ** -0.5)

  return jax.tree_util.tree_map_with_path(fill, shapes)


def gpt_init() -> Any:
  return drawn(jax.eval_shape(GPT(None).init, jax.random.key(0), text_batch(0)["x"]))


def gpt_loss(dtype: Any) -> Loss:
  return lambda params, batch: cross_entropy(GPT(dtype).apply(params, batch["x"]), batch["y"])


MODELS = {
  "gpt": Model(gpt_init, gpt_loss),
  "lstm": Model(lstm_init, lstm_loss),
  "experts": Model(experts_init, experts_loss),
}
