"""A batch in micro-batches: how rows are divided, and what becomes of metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def split_batch(n: int, x: jax.Array) -> jax.Array:
  """[batch, ...] -> [n, batch / n, ...]; strided, so that rows stay on the devices that hold them.

  A scalar is the same in each.
  """
  if not x.ndim:
    return jnp.broadcast_to(x, (n,))
  if x.shape[0] % n:
    raise ValueError(f"a batch of {x.shape[0]} rows cannot be split into accumulate={n} micro-batches")
  return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)


def over_micro_batches(x: jax.Array) -> jax.Array:
  """[n, ...] -> [...]: floating metrics averaged in float32 or wider, others summed."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x.sum(0)
  return x.mean(0, dtype=jnp.promote_types(x.dtype, jnp.float32))
