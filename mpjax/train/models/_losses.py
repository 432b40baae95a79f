"""What the built-in models are trained and judged by."""

from __future__ import annotations

import jax.numpy as jnp
import optax
from jaxtyping import Float, Float32, Int

from mpjax._types import Array


def cross_entropy(logits: Float[Array, "*rows classes"], labels: Int[Array, "*rows"]) -> Float32[Array, ""]:
  """Computes the mean cross entropy in nats."""
  # In float32 whatever the output dtype: log-sum-exp over many classes loses float16's last bits.
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)
  return losses.mean()


def accuracy(logits: Float[Array, "rows classes"], labels: Int[Array, " rows"]) -> Float32[Array, ""]:
  """Computes the share of rows whose largest logit is that of the label."""
  return (logits.argmax(-1) == labels).mean(dtype=jnp.float32)
