"""tunix: LoRA on a decoder in nnx."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax
from tests.models.code_bases._loops import Run, train


def _rotate(x: jax.Array) -> jax.Array:
  """Rotary embedding of [rows, time, heads, dim]."""
  dim = x.shape[-1]
  timescale = 10_000 ** (2 * jnp.arange(dim // 2) / dim)
  angle = jnp.arange(x.shape[1])[:, None] / timescale
  sin, cos = jnp.sin(angle)[:, None], jnp.cos(angle)[:, None]
  first, second = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class _DecoderLayer(nnx.Module):
  def __init__(self, dim: int, heads: int, rngs: nnx.Rngs):
    self.heads = heads
    lora = functools.partial(nnx.LoRALinear, lora_rank=4, use_bias=False, rngs=rngs)
    linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
    self.q, self.k, self.v = lora(dim, dim), linear(dim, dim // 2), lora(dim, dim // 2)
    self.out, self.gate, self.up, self.down = (
      linear(dim, dim), linear(dim, 2 * dim), linear(dim, 2 * dim), linear(2 * dim, dim)
    )  # fmt: skip
    self.before, self.after = nnx.RMSNorm(dim, rngs=rngs), nnx.RMSNorm(dim, rngs=rngs)

  def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
    rows, time, dim = x.shape
    y = self.before(x)
    split = lambda z: z.reshape(rows, time, -1, dim // self.heads)
    q, k, v = _rotate(split(self.q(y))), _rotate(split(self.k(y))), split(self.v(y))
    q = q.reshape(rows, time, k.shape[2], -1, q.shape[-1]) * q.shape[-1] ** -0.5
    logits = jnp.einsum("btkgd,bskd->bkgts", q, k)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], logits, -2.3819763e38), axis=-1)
    x = x + self.out(jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(rows, time, dim))
    y = self.after(x)
    return x + self.down(nnx.gelu(self.gate(y)) * self.up(y))


class _Decoder(nnx.Module):
  def __init__(self, rngs: nnx.Rngs, vocab: int = 64, dim: int = 32):
    self.embed = nnx.Embed(vocab, dim, rngs=rngs)
    self.layers = nnx.List([_DecoderLayer(dim, 4, rngs) for _ in range(2)])
    self.norm = nnx.RMSNorm(dim, rngs=rngs)

  def __call__(self, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    x = self.embed(tokens) * tokens.shape[-1] ** 0.5
    for layer in self.layers:
      x = layer(x, mask)
    return self.embed.attend(self.norm(x))


def tunix(policy: str | None) -> Run:
  """LoRA on the answers of prompts, whose lengths differ."""
  rng = np.random.default_rng(0)

  def batch(_: int) -> dict[str, np.ndarray]:
    lengths = rng.integers(8, 17, (8, 1))
    tokens = (rng.integers(0, 64, (8, 1)) + rng.integers(1, 4, (8, 1)) * np.arange(16)) % 64
    is_real = np.arange(16) < lengths
    attends = is_real[:, None] & np.tril(np.ones((16, 16), bool))
    return {"tokens": tokens, "mask": (is_real & (np.arange(16) >= 4)).astype(np.float32), "attends": attends}

  def loss_fn(model: _Decoder, batch: dict[str, jax.Array]) -> mpjax.Average:
    logits = model(batch["tokens"][:, :-1], batch["attends"][:, :-1, :-1])
    one_hot = jax.nn.one_hot(batch["tokens"][:, 1:], logits.shape[-1]) * batch["mask"][:, 1:, None]
    return mpjax.Average(-jnp.sum(jax.nn.log_softmax(logits) * one_hot), batch["mask"][:, 1:].sum())

  model, batches = _Decoder(nnx.Rngs(0)), list(map(batch, range(12)))
  base = np.asarray(model.layers[0].q.kernel[...])
  state, losses, skipped = train(loss_fn, model, optax.adamw(1e-2), policy, batches, wrt=nnx.LoRAParam)
  kept = np.array_equal(base, state.model.layers[0].q.kernel[...])
  return Run(losses, skipped, {"base is kept": kept})
