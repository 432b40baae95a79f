"""What the built-in models are trained and judged by."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Bool, Float, Float32, Int

from mpjax._average import Average
from mpjax._types import Array


def cross_entropy(logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]) -> Float32[Array, ""]:
  """Computes the mean cross entropy in nats."""
  return _cross_entropies(logits, labels).mean()


def masked_cross_entropy(
  logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"], where: Bool[Array, "*rows"]
) -> Average:
  """Computes the mean cross entropy in nats of the rows that count."""
  losses = jnp.where(where, _cross_entropies(logits, labels), 0)
  return Average(losses.sum(), where.sum(dtype=jnp.int32))


def _cross_entropies(
  logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]
) -> Float32[Array, "*rows"]:
  # In float32 whatever the output dtype: log-sum-exp over many classes loses float16's last bits.
  return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def accuracy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float32[Array, ""]:
  """Computes the share of rows whose largest logit is that of the label."""
  return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
