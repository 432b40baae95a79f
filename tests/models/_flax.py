"""Models of Flax's layers, in the shapes of the examples that come with Flax."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from tests.models._model import CLASSES, LENGTH, VOCAB, Model, cross_entropy, drawn, images, next_token, text


def linen(module: nn.Module, batch: Any, *inputs: str) -> Model:
  """Returns the model of a module that gives logits of the classes `y` for `inputs` of a batch."""
  read = lambda batch: [batch[name] for name in inputs]
  shapes = jax.eval_shape(module.init, jax.random.key(0), *read(batch))
  loss = lambda params, batch, key: cross_entropy(module.apply(params, *read(batch)), batch["y"])
  return Model(loss, drawn(shapes), batch)


class CNN(nn.Module):
  @nn.compact
  def __call__(self, x):  # [B, H, W, C]
    for features in (16, 32):
      x = nn.avg_pool(nn.relu(nn.Conv(features, (3, 3))(x)), (2, 2), (2, 2))
    return nn.Dense(CLASSES)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class Messages(nn.Module):
  """Messages along the edges of several graphs in one batch, and a sum over each graph."""

  @nn.compact
  def __call__(self, nodes, edges, senders, receivers, graph):  # [N, D], [E, D], int[E], int[E], int[N]
    nodes, edges = nn.Dense(64, name="nodes")(nodes), nn.Dense(64, name="edges")(edges)
    for i in range(2):
      messages = nn.Dense(64, name=f"message_{i}")(nn.relu(nodes[senders] + nodes[receivers] + edges))
      arrived = jax.ops.segment_sum(messages, receivers, len(nodes))
      update = nn.Dense(64, name=f"update_{i}")(nn.relu(jnp.concatenate([nodes, arrived], -1)))
      nodes = nn.LayerNorm(name=f"norm_{i}")(nodes + update)
    sizes = jax.ops.segment_sum(jnp.ones(len(nodes)), graph, 8)
    return nn.Dense(CLASSES)(jax.ops.segment_sum(nodes, graph, 8) / sizes[:, None])


GRAPH = ("nodes", "edges", "senders", "receivers", "graph")


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
  "Flax CNN": lambda: linen(CNN(), images(16, 28, 28, 1), "x"),
  "Flax GNN": lambda: linen(Messages(), several_graphs(), *GRAPH),
  "Flax nnx decoder": decoder,
}
