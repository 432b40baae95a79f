"""Losses and metrics of the built-in models."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Float32, Int

from mpjax._average import Average
from mpjax._types import Array


def cross_entropy(logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]) -> Float32[Array, ""]:
  """Returns the mean cross entropy in nats."""
  return _cross_entropies(logits, labels).mean()


def masked_cross_entropy(
  logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"], where: Bool[Array, "*rows"]
) -> Average:
  """Returns the mean cross entropy, in nats, of the rows where `where` is true."""
  losses = jnp.where(where, _cross_entropies(logits, labels), 0)
  return Average(losses.sum(), where.sum(dtype=jnp.int32))


def _cross_entropies(
  logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]
) -> Float32[Array, "*rows"]:
  # In float32 for every output dtype: log-sum-exp over many classes loses float16's last bits.
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def accuracy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float32[Array, ""]:
  """Returns the share of rows whose label has the largest logit."""
  return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
