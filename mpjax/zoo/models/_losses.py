"""Losses and metrics of the built-in models."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Float32, Int

from mpjax._average import Average
from mpjax._types import Array


def cross_entropy(
  logits: Float[Array, "*rows classes"],
  labels: Int[Array, "*rows"],
  where: Bool[Array, "*rows"] | None = None,
) -> Float32[Array, ""] | Average:
  """Returns the mean cross entropy in nats, of the rows where `where` is true if it is given."""
  # In float32 for every output dtype: log-sum-exp over many classes loses float16's last bits.
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
  if where is None:
    return losses.mean()
  return Average(jnp.where(where, losses, 0).sum(), where.sum(dtype=jnp.int32))


def accuracy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float32[Array, ""]:
  """Returns the share of rows whose label has the largest logit."""
  return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
