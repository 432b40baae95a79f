"""Dropout with one key, or with a key for each row; then results do not depend on how rows are divided."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
  """Sets a share, the rate, of `x` [B, ...] to zero and scales up the rest; without a key returns `x`.

  There is one key, or one for each row: keys [B].
  """
  if key is None or rate == 0:
    return x
  if _by_row(key):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - rate, x.shape[1:]))(key)
  else:
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
  return jnp.where(kept, x / (1 - rate), 0)


def split(key: jax.Array, n: int) -> list[jax.Array]:
  """Splits a key into `n` keys, or an array of keys [B] into `n` such arrays."""
  if not _by_row(key):
    return list(jax.random.split(key, n))
  return list(jax.vmap(lambda key: jax.random.split(key, n), out_axes=1)(key))


def _by_row(key: jax.Array) -> bool:
  return jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.ndim == 1
