"""Optimisers by how their state and the weights are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import optax

import mpjax

ADAMW = optax.adamw(1e-3)
# Name to (transform, dtype of the parameters).
VARIANTS = {
  "optax.adamw": (ADAMW, jnp.float32),
  "state int8": (mpjax.quantized_state(ADAMW), jnp.float32),
  "state float8_e4m3fn": (mpjax.quantized_state(ADAMW, "float8_e4m3fn"), jnp.float32),
  "state bfloat16": (mpjax.quantized_state(ADAMW, "bfloat16"), jnp.float32),
  "weights int16": (mpjax.master_weights(ADAMW, "int16"), jnp.bfloat16),
  "weights int8": (mpjax.master_weights(ADAMW, "int8"), jnp.bfloat16),
  "weights stochastic": (mpjax.master_weights(ADAMW, "stochastic"), jnp.bfloat16),
  "state int8, weights int8": (mpjax.master_weights(mpjax.quantized_state(ADAMW), "int8"), jnp.bfloat16),
  "state int8, weights stochastic": (
    mpjax.master_weights(mpjax.quantized_state(ADAMW), "stochastic"),
    jnp.bfloat16,
  ),
}


def update_of(tx: optax.GradientTransformation) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
  """Returns `(params, state, grads) -> (params, state)`."""

  def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  return update
