"""A batch in micro-batches: the division of rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree, Shaped

from mpjax._types import Array
from mpjax.patterns import named_leaves


def split_batch(n: int, batch: PyTree) -> PyTree:
  """Splits leaves [batch, ...] into [n, batch / n, ...]; strided, so that rows stay on their device.

  A scalar is the same in each of the `n`.

  Raises:
    ValueError: if `n` does not divide the rows, or leaves have different numbers of rows.
  """
  if n > 1:
    require_same_rows(batch, f"accumulate={n}")

  def split(x: Shaped[Array, " ..."]) -> Shaped[Array, "n ..."]:
    if not x.ndim:
      return jnp.broadcast_to(x, (n,))
    if x.shape[0] % n:
      raise ValueError(f"a batch of {x.shape[0]} rows cannot be split into accumulate={n} micro-batches")
    return x.reshape(x.shape[0] // n, n, *x.shape[1:]).swapaxes(0, 1)

  return jax.tree.map(lambda x: split(x if hasattr(x, "ndim") else jnp.asarray(x)), batch)


def require_same_rows(batch: PyTree, divided: str) -> None:
  """Raises `ValueError` for a batch whose leaves have different numbers of rows; scalars have none.

  After the division a device or micro-batch could have rows that broadcast, and the loss would be wrong
  without an error. It names what has `divided` the batch.
  """
  with_rows = [(name, leaf) for name, leaf in named_leaves(batch) if np.ndim(leaf)]
  for name, leaf in with_rows[1:]:
    first_name, first = with_rows[0]
    if leaf.shape[0] != first.shape[0]:
      raise ValueError(
        f"batch[{first_name!r}] has {first.shape[0]} rows and batch[{name!r}] {leaf.shape[0]}: {divided} "
        "divides a batch by its rows, so all its arrays need as many; close over arrays without rows"
      )


def first_of_batch(n: int, batch: PyTree) -> PyTree:
  """Returns the first of the `n` micro-batches of a batch."""
  return jax.tree.map(lambda x: x[0], split_batch(n, batch))
