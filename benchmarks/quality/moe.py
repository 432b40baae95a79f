"""A small mixture of experts as a plug-in: attention, and two of several MLPs a token, by `ragged_dot`.

mpjax train configs/gpt_stdlib.yaml --plugin benchmarks/quality/moe.py model.kind=moe policy=bf16
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import mpjax

_CHOSEN = 2  # experts of a token
_BALANCE = 0.01  # weight of the loss that divides tokens evenly (arXiv 2101.03961)


class Experts(nn.Module):
  """[B, T, D] -> [B, T, D], and a loss that is 1 if all experts have the same number of tokens."""

  experts: int
  hidden: int

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    tokens, dim = x.reshape(-1, x.shape[-1]), x.shape[-1]
    chances = jax.nn.softmax(nn.Dense(self.experts, use_bias=False, name="router")(tokens))
    weights, chosen = jax.lax.top_k(chances, _CHOSEN)
    order = jnp.argsort(chosen.ravel())  # rows of an expert lie together
    sizes = jnp.bincount(chosen.ravel(), length=self.experts)
    make = lambda name, *shape: self.param(name, nn.initializers.normal(0.02), (self.experts, *shape))
    with jax.named_scope("up"):
      hidden = jax.lax.ragged_dot(tokens[order // _CHOSEN], make("up", dim, self.hidden), sizes)
    with jax.named_scope("down"):
      out = jax.lax.ragged_dot(nn.gelu(hidden), make("down", self.hidden, dim), sizes)
    own = weights.ravel()[order] / weights.sum(-1)[order // _CHOSEN]
    summed = jnp.zeros(tokens.shape).at[order // _CHOSEN].add(out * own[:, None])
    balance = self.experts * jnp.vdot(sizes / order.size, chances.mean(0))
    return summed.reshape(x.shape), balance


class Block(nn.Module):
  """Attention and experts, each behind a norm and next to a residual path."""

  heads: int
  experts: int
  hidden: int

  @nn.compact
  def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    batch, length, dim = x.shape
    qkv = nn.Dense(3 * dim, use_bias=False, name="qkv")(nn.RMSNorm(name="attention_norm")(x))
    q, k, v = jnp.split(qkv.reshape(batch, length, self.heads, -1), 3, axis=-1)
    mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + nn.Dense(dim, use_bias=False, name="out")(mixed.reshape(x.shape))
    out, balance = Experts(self.experts, self.hidden, name="experts")(nn.RMSNorm(name="experts_norm")(x))
    return x + out, balance


class Mixture(nn.Module):
  """[B, T] tokens -> [B, T, vocab_size] logits, and the mean of its blocks' losses of balance."""

  vocab_size: int
  length: int
  dim: int
  layers: int
  block: dict[str, int]

  @nn.compact
  def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    init = nn.initializers.normal(0.02)
    x = nn.Embed(self.vocab_size, self.dim, embedding_init=init, name="embed")(tokens)
    x = x + self.param("positions", init, (self.length, self.dim))[: tokens.shape[1]]
    balances = []
    for i in range(self.layers):
      x, balance = Block(**self.block, name=f"block_{i}")(x)
      balances.append(balance)
    logits = nn.Dense(self.vocab_size, use_bias=False, name="head")(nn.RMSNorm(name="norm")(x))
    return logits, sum(balances) / self.layers


@mpjax.train.register_model("moe")
def moe(
  info: mpjax.train.ModelInfo,
  *,
  dim: int = 128,
  layers: int = 4,
  heads: int = 4,
  experts: int = 4,
  hidden: int = 256,
) -> mpjax.train.Task:
  """Makes a mixture of experts for rows of `tokens`; an expert has `hidden` units."""
  block = {"heads": heads, "experts": experts, "hidden": hidden}
  net = Mixture(info.vocab_size, info.seq_len, dim, layers, block)

  def init(key: jax.Array) -> Any:
    return net.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

  def losses(params: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    logits, balance = net.apply({"params": params}, batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), balance

  def loss_fn(params: Any, batch: Any) -> jax.Array:
    loss, balance = losses(params, batch)
    return loss + _BALANCE * balance

  def evaluate(params: Any, batch: Any) -> jax.Array:
    return losses(params, batch)[0]

  return mpjax.train.Task(init, loss_fn, evaluate, units=("tokens", info.seq_len))
