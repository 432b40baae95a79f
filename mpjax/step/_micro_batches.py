"""A batch in micro-batches: how rows are divided, and what becomes of metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import PyTree, Shaped

from mpjax._types import Array
from mpjax.dtypes import at_least_float32


def split_batch(n: int, batch: PyTree) -> PyTree:
  """Splits leaves [batch, ...] into [n, batch / n, ...]; strided, so that rows stay where they are on a mesh.

  A scalar is the same in each of the `n`.

  Raises:
    ValueError: for rows that cannot be divided by `n`.
  """

  def split(x: Shaped[Array, " ..."]) -> Shaped[Array, "n ..."]:
    if not x.ndim:
      return jnp.broadcast_to(x, (n,))
    if x.shape[0] % n:
      raise ValueError(f"a batch of {x.shape[0]} rows cannot be split into accumulate={n} micro-batches")
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(split, batch)


def first_of_batch(n: int, batch: PyTree) -> PyTree:
  """Returns the first of the `n` micro-batches of a batch."""
  return jax.tree.map(lambda x: x[0], split_batch(n, batch))


def over_micro_batches(x: Shaped[Array, "n ..."]) -> Shaped[Array, " ..."]:
  """Averages floating metrics over micro-batches in float32 or wider, and sums others."""
  if not jnp.issubdtype(x.dtype, jnp.floating):
    return x.sum(0)
  return x.mean(0, dtype=at_least_float32(x.dtype))
