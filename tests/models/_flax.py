"""Models of Flax's layers, in the shapes of the examples that come with Flax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.models._model import CLASSES, LENGTH, VOCAB, Model, cross_entropy, drawn, images, next_token, text


def linen(module: nn.Module, loss: Callable[..., jax.Array], batch: Any, *inputs: str) -> Model:
  """Returns the model of a module that reads `inputs` of a batch; the loss takes (outputs, batch)."""
  rngs = {"params": jax.random.key(0), "sample": jax.random.key(0)}
  shapes = jax.eval_shape(module.init, rngs, *(batch[name] for name in inputs))

  def of_params(params, batch, key):
    return loss(module.apply(params, *(batch[name] for name in inputs), rngs={"sample": key}), batch)

  return Model(of_params, drawn(shapes), batch)


def of_labels(logits: jax.Array, batch: Any) -> jax.Array:
  return cross_entropy(logits, batch["y"])


class CNN(nn.Module):
  @nn.compact
  def __call__(self, x):  # [B, H, W, C]
    for features in (16, 32):
      x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class VAE(nn.Module):
  """Pixels as independent logits, from a sample of what the encoder gives."""

  latents: int = 8

  @nn.compact
  def __call__(self, x):  # [B, D]
    hidden = nn.relu(nn.Dense(64, name="encoder")(x))
    mean, log_variance = (nn.Dense(self.latents, name=name)(hidden) for name in ("mean", "log_variance"))
    noise = jax.random.normal(self.make_rng("sample"), mean.shape)
    hidden = nn.relu(nn.Dense(64, name="decoder")(mean + noise * jnp.exp(log_variance / 2)))
    return nn.Dense(x.shape[-1], name="pixels")(hidden), mean, log_variance


def elbo(out: tuple[jax.Array, ...], batch: Any) -> jax.Array:
  logits, mean, log_variance = out
  divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
  return jnp.mean(jnp.sum(optax.sigmoid_binary_cross_entropy(logits, batch["x"]), -1) + divergence)


class ActorCritic(nn.Module):
  """Frames of a game to log probabilities of actions, and a value."""

  @nn.compact
  def __call__(self, x):  # uint8[B, H, W, 4]
    x = x.astype(jnp.float32) / 255
    for features, side, stride in ((16, 8, 4), (32, 4, 2), (32, 3, 1)):
      x = nn.relu(nn.Conv(features, (side, side), stride)(x))
    x = nn.relu(nn.Dense(128)(x.reshape(len(x), -1)))
    return nn.log_softmax(nn.Dense(4, name="actions")(x)), nn.Dense(1, name="value")(x)[:, 0]


def clipped_objective(out: tuple[jax.Array, jax.Array], batch: Any) -> jax.Array:
  log_probabilities, values = out
  taken = jnp.take_along_axis(log_probabilities, batch["action"][:, None], 1)[:, 0]
  ratio, gain = jnp.exp(taken - batch["log_probability"]), batch["advantage"]
  policy = -jnp.minimum(ratio * gain, jnp.clip(ratio, 0.9, 1.1) * gain).mean()
  entropy = -jnp.sum(log_probabilities * jnp.exp(log_probabilities), 1).mean()
  return policy + 0.5 * jnp.mean((values - batch["return"]) ** 2) - 0.01 * entropy


def played() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  gain = rng.standard_normal(16).astype(np.float32)
  return {
    "x": rng.integers(0, 256, (16, 28, 28, 4)).astype(np.uint8),
    "action": rng.integers(0, 4, 16).astype(np.int32),
    "log_probability": np.full(16, np.log(0.25), np.float32),
    "advantage": gain,
    "return": gain + 2,
  }


class Seq2seq(nn.Module):
  """An LSTM whose last memory is the first of another, that is taught."""

  @nn.compact
  def __call__(self, x, y):  # int[B, T] each
    embed = nn.Embed(VOCAB, 32)
    carry, _ = nn.RNN(nn.LSTMCell(64), return_carry=True, name="encoder")(embed(x))
    return nn.Dense(VOCAB)(nn.RNN(nn.LSTMCell(64), name="decoder")(embed(y), initial_carry=carry))


class Messages(nn.Module):
  """Messages along the edges of several graphs in one batch, and a sum over each graph."""

  graphs: int = 8

  @nn.compact
  def __call__(self, nodes, edges, senders, receivers, graph):  # [N, D], [E, D], int[E], int[E], int[N]
    nodes, edges = nn.Dense(64, name="nodes")(nodes), nn.Dense(64, name="edges")(edges)
    for i in range(2):
      messages = nn.Dense(64, name=f"message_{i}")(nn.relu(nodes[senders] + nodes[receivers] + edges))
      arrived = jax.ops.segment_sum(messages, receivers, len(nodes))
      update = nn.Dense(64, name=f"update_{i}")(nn.relu(jnp.concatenate([nodes, arrived], -1)))
      nodes = nn.LayerNorm(name=f"norm_{i}")(nodes + update)
    sizes = jax.ops.segment_sum(jnp.ones(len(nodes)), graph, self.graphs)
    return nn.Dense(CLASSES)(jax.ops.segment_sum(nodes, graph, self.graphs) / sizes[:, None])


def several_graphs() -> dict[str, np.ndarray]:
  rng = np.random.default_rng(0)
  graph = np.repeat(np.arange(8), 8).astype(np.int32)
  senders = rng.integers(0, 64, 192)
  receivers = senders // 8 * 8 + rng.integers(0, 8, 192)
  return {
    "nodes": rng.standard_normal((64, 16)).astype(np.float32),
    "edges": rng.standard_normal((192, 8)).astype(np.float32),
    "senders": senders.astype(np.int32),
    "receivers": receivers.astype(np.int32),
    "graph": graph,
    "y": rng.integers(0, CLASSES, 8).astype(np.int32),
  }


class Decoder(nnx.Module):
  """A block of attention and a gated layer, each after a norm by root mean squares."""

  def __init__(self, rngs: nnx.Rngs, length: int, width: int, **attention: Any):
    self.embed = nnx.Embed(VOCAB, width, rngs=rngs)
    self.position = nnx.Param(0.02 * jax.random.normal(rngs.params(), (length, width)))
    self.block = DecoderBlock(width, rngs, **attention)
    self.norm = nnx.RMSNorm(width, rngs=rngs)

  def __call__(self, tokens):  # [B, T]
    x = self.embed(tokens) + self.position[...]
    return self.embed.attend(self.norm(self.block(x)))


class DecoderBlock(nnx.Module):
  def __init__(self, width: int, rngs: nnx.Rngs, **attention: Any):
    self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
    self.attention = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs, **attention)
    self.gate, self.up = (nnx.Linear(width, 2 * width, use_bias=False, rngs=rngs) for _ in range(2))
    self.down = nnx.Linear(2 * width, width, use_bias=False, rngs=rngs)

  def __call__(self, x):  # [B, T, D]
    x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
    y = self.norms[1](x)
    return x + self.down(nnx.silu(self.gate(y)) * self.up(y))


def decoder(length: int = LENGTH, width: int = 64, **attention: Any) -> Model:
  module = nnx.eval_shape(lambda: Decoder(nnx.Rngs(0), length, width, **attention))
  graph, shapes, rest = nnx.split(module, nnx.Param, ...)

  def loss(params, batch, key):
    return next_token(nnx.merge(graph, params, rest)(batch["x"]), batch["x"])

  return Model(loss, drawn(shapes), {"x": text(length=length)})


MODELS = {
  "Flax CNN": lambda: linen(CNN(), of_labels, images(16, 28, 28, 1), "x"),
  "Flax VAE": lambda: linen(VAE(), elbo, {"x": (images(64, 144)["x"] > 0).astype(np.float32)}, "x"),
  "Flax PPO": lambda: linen(ActorCritic(), clipped_objective, played(), "x"),
  "Flax seq2seq": lambda: linen(
    Seq2seq(),
    lambda logits, batch: next_token(logits, batch["y"]),
    {"x": text(), "y": text(seed=1)},
    "x",
    "y",
  ),
  "Flax GNN": lambda: linen(
    Messages(), of_labels, several_graphs(), "nodes", "edges", "senders", "receivers", "graph"
  ),
  "Flax nnx decoder": decoder,
}
