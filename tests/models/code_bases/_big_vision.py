"""big_vision: a ViT in linen, its positions by einsum, dropout, a sigmoid loss, a schedule."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.code_bases._loops import Run, run


def _positions(height: int, width: int, dim: int) -> jax.Array:
  y, x = jnp.mgrid[:height, :width]
  frequencies = 1.0 / 10_000 ** (jnp.arange(dim // 4) / (dim // 4 - 1))
  y, x = (jnp.einsum("m,d->md", each.flatten(), frequencies) for each in (y, x))
  return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None]


class _Encoder(nn.Module):
  heads: int = 4

  @nn.compact
  def __call__(self, x: jax.Array, is_deterministic: bool) -> jax.Array:
    init = {"kernel_init": nn.initializers.xavier_uniform(), "deterministic": is_deterministic}
    y = nn.LayerNorm()(x)
    x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, **init)(y, y)
    y = nn.gelu(nn.Dense(4 * x.shape[-1])(nn.LayerNorm()(x)))
    return x + nn.Dense(x.shape[-1])(nn.Dropout(0.1, deterministic=is_deterministic)(y))


class _ViT(nn.Module):
  classes: int
  width: int = 32

  @nn.compact
  def __call__(self, image: jax.Array, train: bool = False) -> jax.Array:
    x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(image)
    rows, height, width, dim = x.shape
    x = x.reshape(rows, height * width, dim) + _positions(height, width, dim)
    for i in range(2):
      x = _Encoder(name=f"encoderblock_{i}")(x, not train)
    x = nn.LayerNorm(name="encoder_norm")(x)
    probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, dim))
    x = nn.MultiHeadDotProductAttention(num_heads=4)(jnp.tile(probe, (rows, 1, 1)), x)
    x = jnp.tanh(nn.Dense(dim, name="pre_logits")(x[:, 0]))
    return nn.Dense(self.classes, kernel_init=nn.initializers.zeros, name="head")(x)


def big_vision(policy: str | None) -> Run:
  """A ViT on images that are noise around the mean of their class."""
  rng, classes = np.random.default_rng(0), 10
  means = rng.standard_normal((classes, 16, 16, 3)).astype(np.float32)

  def batch(i: int) -> dict[str, Any]:
    labels = rng.integers(0, classes, 32)
    image = means[labels] + rng.standard_normal((32, 16, 16, 3)).astype(np.float32)
    return {"image": image, "labels": np.eye(classes, dtype=np.float32)[labels], "rng": jax.random.key(i)}

  model = _ViT(classes)
  params = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 16, 16, 3)))["params"]

  def loss_fn(params: Any, batch: dict[str, Any]) -> jax.Array:
    logits = model.apply({"params": params}, batch["image"], train=True, rngs={"dropout": batch["rng"]})
    log_p, log_not_p = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    labels = batch["labels"]
    return -jnp.mean(jnp.sum(labels * log_p + (1 - labels) * log_not_p, axis=-1))

  schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 3, 20)
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, weight_decay=1e-4))
  _, losses, skipped = run(loss_fn, params, tx, policy, map(batch, range(12)))
  return Run(losses, skipped, {})
