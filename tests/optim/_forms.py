"""The forms of state and weights in few bytes that the tests go through."""

import jax
import jax.numpy as jnp
import numpy as np

import mpjax

# Name to (wrapper, dtype of the parameters).
FORMS = {
  "int8": (mpjax.quantized_state, jnp.float32),
  "float8_e4m3fn": (lambda tx: mpjax.quantized_state(tx, "float8_e4m3fn"), jnp.float32),
  "bfloat16": (lambda tx: mpjax.quantized_state(tx, "bfloat16"), jnp.float32),
  "weights int16": (mpjax.master_weights, jnp.bfloat16),
  "weights int8": (lambda tx: mpjax.master_weights(tx, "int8"), jnp.bfloat16),
  "weights stochastic": (lambda tx: mpjax.master_weights(tx, "stochastic"), jnp.bfloat16),
  "lean": (lambda tx: mpjax.master_weights(mpjax.quantized_state(tx), "int8"), jnp.bfloat16),
}


def normal(*shape, seed=0):
  """Normal draws in float32."""
  return np.float32(np.random.default_rng(seed).normal(size=shape))


def described(tree):
  """Returns the structure of a tree, and shapes and dtypes of its arrays."""
  return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


def same_bits(tree, expected):
  """Asserts that two trees hold the same bits."""
  assert described(tree) == described(expected)
  for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
