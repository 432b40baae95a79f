"""A Llama as a plug-in: RMSNorm, rotary embeddings, grouped-query attention, SwiGLU, layers in a scan.

    mpjax train examples/llama/stdlib.yaml --plugin examples/llama/llama.py policy=bf16
    mpjax plan examples/llama/llama3_8b.yaml --plugin examples/llama/llama.py target=h100:8 mesh.fsdp=8

It is written in float32: the policy says what runs in which dtype. Weights have the layout of flax, [in,
out]; `to_transformers.py` writes them as the `transformers` package names them.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


class RMSNorm(nn.Module):
  """Divides by the root of the mean square of the last dimension, and scales."""

  epsilon: float

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + self.epsilon) * scale


def linear(features: int, name: str) -> nn.Dense:
  return nn.Dense(features, use_bias=False, kernel_init=nn.initializers.normal(0.02), name=name)


def rotate(x: jax.Array, theta: float) -> jax.Array:
  """Turns pairs (i, i + H/2) of [B, T, ..., H] by angles that grow with the position (arXiv 2104.09864)."""
  half = x.shape[-1] // 2
  angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
  angles = angles.reshape(x.shape[1], *[1] * (x.ndim - 3), half)
  a, b = x[..., :half], x[..., half:]
  return jnp.concatenate(
    [a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], axis=-1
  )


def attend(q: jax.Array, start: jax.Array | int, k: jax.Array, v: jax.Array) -> jax.Array:
  """Returns the means of v [B, S, K, H] that queries [B, T, K, G, H] from position `start` on ask for."""
  scores = jnp.einsum("btkgh,bskh->bkgts", q, k) / q.shape[-1] ** 0.5
  seen = start + jnp.arange(q.shape[1])[:, None] >= jnp.arange(k.shape[1])
  return jnp.einsum("bkgts,bskh->btkgh", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v)


class Attention(nn.Module):
  """Causal attention in which groups of queries share keys and values (arXiv 2305.13245)."""

  heads: int
  kv_heads: int
  theta: float
  queries: int

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    batch, length, dim = x.shape
    size, groups = dim // self.heads, self.heads // self.kv_heads
    q = linear(dim, "q")(x).reshape(batch, length, self.kv_heads, groups, size)
    k = linear(self.kv_heads * size, "k")(x).reshape(batch, length, self.kv_heads, size)
    v = linear(self.kv_heads * size, "v")(x).reshape(batch, length, self.kv_heads, size)
    q, k = rotate(q, self.theta), rotate(k, self.theta)
    if length <= self.queries or length % self.queries:
      mixed = attend(q, 0, k, v)
    else:  # scores of [T, T] never exist whole
      starts = jnp.arange(0, length, self.queries)
      parts = jnp.moveaxis(q.reshape(batch, -1, self.queries, *q.shape[2:]), 1, 0)
      mixed = jax.lax.map(jax.checkpoint(lambda part: attend(*part, k, v)), (parts, starts))
      mixed = jnp.moveaxis(mixed, 0, 1)
    return linear(dim, "o")(mixed.reshape(batch, length, dim))


class Block(nn.Module):
  """Attention and a SwiGLU (arXiv 2002.05202), each behind a norm and next to a residual path."""

  heads: int
  kv_heads: int
  hidden: int
  theta: float
  epsilon: float
  queries: int

  @nn.compact
  def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
    h = RMSNorm(self.epsilon, name="attention_norm")(x)
    x = x + Attention(self.heads, self.kv_heads, self.theta, self.queries, name="attention")(h)
    h = RMSNorm(self.epsilon, name="mlp_norm")(x)
    h = nn.silu(linear(self.hidden, "gate")(h)) * linear(self.hidden, "up")(h)
    return x + linear(x.shape[-1], "down")(h), None


class Llama(nn.Module):
  """[B, T] tokens -> [B, T, vocab_size] logits, or [B, T, dim], what the head reads.

  The parameters of its blocks are stacked: [layers, ...].
  """

  vocab_size: int
  dim: int
  layers: int
  block: dict[str, float]
  remat: bool = False

  @nn.compact
  def __call__(self, tokens: jax.Array, head: bool = True) -> jax.Array:
    init = nn.initializers.normal(0.02)
    x = nn.Embed(self.vocab_size, self.dim, embedding_init=init, name="embed")(tokens)
    x = x.astype(jnp.float32)  # also of half-precision parameters: layers in a scan return what they take
    block = nn.remat(Block, prevent_cse=False) if self.remat else Block
    blocks = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=self.layers)
    x, _ = blocks(**self.block, name="blocks")(x, None)
    x = RMSNorm(self.block["epsilon"], name="norm")(x)
    return linear(self.vocab_size, "head")(x) if head else x


# Rows of a matrix lie over `fsdp`, heads and hidden units over `tensor`. A block has its layers in front.
SHARDING = {
  "embed/embedding": ("tensor", "fsdp"),
  "blocks/.*/(q|k|v)/kernel": (None, "fsdp", "tensor"),
  "blocks/(gate|up)/kernel": (None, "fsdp", "tensor"),
  "blocks/.*/o/kernel": (None, "tensor", "fsdp"),
  "blocks/down/kernel": (None, "tensor", "fsdp"),
  "head/kernel": ("fsdp", "tensor"),
}


@mpjax.train.register_model("llama")
def llama(
  info: mpjax.train.ModelInfo,
  *,
  dim: int = 128,
  layers: int = 4,
  heads: int = 4,
  kv_heads: int = 2,
  hidden: int = 384,
  theta: float = 10_000.0,
  epsilon: float = 1e-5,
  queries: int = 1024,
  loss_rows: int | None = None,
) -> mpjax.train.Task:
  """Makes a Llama (arXiv 2302.13971, 2407.21783) for rows of `tokens`, and of `mask` if some do not count.

  Args:
    dim, layers, heads, kv_heads, hidden: sizes; a head has dim / heads entries.
    theta: base of the rotary angles.
    epsilon: what the norms add to the mean square.
    queries: how many queries attention takes together; longer rows that are a multiple of it are divided.
    loss_rows: how many tokens go through the head and the loss together; 0 for all, the default for a small
      vocabulary.
  """
  if dim % heads or heads % kv_heads or (dim // heads) % 2:
    raise ValueError(
      f"model.dim={dim}, heads={heads}, kv_heads={kv_heads}: expected heads that divide dim into an even "
      "size, and kv_heads that divide heads"
    )
  if loss_rows is None:
    loss_rows = 1024 if info.vocab_size > 1 << 14 else 0
  sizes = {"heads": heads, "kv_heads": kv_heads, "hidden": hidden, "theta": theta, "epsilon": epsilon}
  net = Llama(info.vocab_size, dim, layers, {**sizes, "queries": queries}, remat=info.recompute == "blocks")

  def init(key):
    return net.init(key, jnp.zeros((1, 8), jnp.int32))["params"]

  def logits(params, tokens):
    return net.apply({"params": params}, tokens)

  def loss_fn(params, batch):
    tokens, labels = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    where = batch["mask"][:, 1:] if "mask" in batch else None  # of rows that are padded
    if loss_rows:  # logits never exist whole
      x = net.apply({"params": params}, tokens, head=False)
      head, options = params["head"]["kernel"], {"where": where, "as_average": where is not None}
      return mpjax.linear_cross_entropy(x, head, labels, rows=loss_rows, **options)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, tokens), labels)
    return losses.mean() if where is None else mpjax.Average((losses * where).sum(), where.sum())

  return mpjax.train.Task(init, loss_fn, logits=logits, sharding=SHARDING, units=("tokens", info.seq_len))


class RandomTokens:
  """Rows of tokens that mean nothing: to plan with, and to time."""

  def __init__(self, rows: int, vocab_size: int, seq_len: int):
    self.rows, self.vocab_size, self.seq_len = rows, vocab_size, seq_len

  def __len__(self) -> int:
    return self.rows

  def __getitem__(self, index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    return {"tokens": rng.integers(0, self.vocab_size, self.seq_len + 1, dtype=np.int32)}


@mpjax.train.register_data("random_tokens")
def random_tokens(*, vocab_size: int, seq_len: int):
  """Makes rows of `tokens` for a model of a vocabulary that no data here has."""
  make = lambda rows: RandomTokens(rows, vocab_size, seq_len)
  return make(1 << 16), make(1 << 10), {"vocab_size": vocab_size, "seq_len": seq_len}
