"""mamba-jax: a selective state space by associative_scan, in Equinox."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.code_bases._loops import Run, train


class _Mixer(eqx.Module):
  into: eqx.nn.Linear
  conv: eqx.nn.Conv1d
  project: eqx.nn.Linear
  step: eqx.nn.Linear
  log_a: jax.Array
  d: jax.Array
  out: eqx.nn.Linear
  states: int = eqx.field(static=True)

  def __init__(self, dim: int, states: int, key: jax.Array):
    keys, inner = jax.random.split(key, 5), 2 * dim
    self.into = eqx.nn.Linear(dim, 2 * inner, use_bias=False, key=keys[0])
    self.conv = eqx.nn.Conv1d(inner, inner, 4, padding=[(3, 0)], groups=inner, key=keys[1])
    self.project = eqx.nn.Linear(inner, 4 + 2 * states, use_bias=False, key=keys[2])
    self.step = eqx.nn.Linear(4, inner, key=keys[3])
    self.out = eqx.nn.Linear(inner, dim, use_bias=False, key=keys[4])
    self.log_a = jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1)))
    self.d, self.states = jnp.ones(inner), states

  def __call__(self, x: jax.Array) -> jax.Array:
    x, gate = jnp.split(jax.vmap(self.into)(x), 2, axis=-1)
    x = jax.nn.silu(self.conv(x.T).T)
    delta, b, c = jnp.split(jax.vmap(self.project)(x), [4, 4 + self.states], axis=-1)
    delta = jax.nn.softplus(jax.vmap(self.step)(delta))
    a = jnp.exp(jnp.einsum("ld,dn->ldn", delta, -jnp.exp(self.log_a)))
    bx = jnp.einsum("ld,ln,ld->ldn", delta, b, x)
    compose = lambda first, second: (second[0] * first[0], second[0] * first[1] + second[1])
    _, h = jax.lax.associative_scan(compose, (a, bx))
    y = jnp.einsum("ldn,ln->ld", h, c) + x * self.d
    return jax.vmap(self.out)(y * jax.nn.silu(gate))


class _Mamba(eqx.Module):
  embed: eqx.nn.Embedding
  norms: list[eqx.nn.RMSNorm]
  mixers: list[_Mixer]
  last: eqx.nn.RMSNorm

  def __init__(self, key: jax.Array, vocab: int = 64, dim: int = 32):
    keys = jax.random.split(key, 3)
    self.embed = eqx.nn.Embedding(weight=0.1 * jax.random.normal(keys[0], (vocab, dim)))
    self.norms = [eqx.nn.RMSNorm(dim) for _ in keys[1:]]
    self.mixers = [_Mixer(dim, 8, k) for k in keys[1:]]
    self.last = eqx.nn.RMSNorm(dim)

  def __call__(self, tokens: jax.Array) -> jax.Array:
    x = jax.vmap(self.embed)(tokens)
    for norm, mixer in zip(self.norms, self.mixers, strict=True):
      x = x + mixer(jax.vmap(norm)(x))
    return jax.vmap(self.last)(x) @ self.embed.weight.T


def mamba(policy: str | None) -> Run:
  """A small Mamba on tokens that count upwards; the module itself is what the step trains."""
  rng = np.random.default_rng(0)
  rows = lambda _: (rng.integers(0, 64, (8, 1)) + rng.integers(1, 4, (8, 1)) * np.arange(25)) % 64

  def loss_fn(model: _Mamba, tokens: jax.Array) -> jax.Array:
    logits = jax.vmap(model)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

  model = _Mamba(jax.random.key(0))
  _, losses, skipped = train(loss_fn, model, optax.adamw(3e-3), policy, map(rows, range(12)))
  return Run(losses, skipped, {})
