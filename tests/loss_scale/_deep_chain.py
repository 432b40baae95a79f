"""A chain of tanh layers whose gradient falls by 2^-6 in each, plain and with layer-wise loss scales."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

import mpjax

DEPTH, WIDTH, ROWS = 8, 16, 32
RNG = np.random.default_rng(0)
LAYERS = {
  "w": np.float32(RNG.normal(size=(DEPTH, WIDTH, WIDTH)) * 1.4 / math.sqrt(WIDTH)),
  "b": np.zeros((DEPTH, WIDTH), np.float32),
}
FIRST = {name: leaf[0] for name, leaf in LAYERS.items()}
X, Y = (np.float32(RNG.normal(size=(ROWS, WIDTH))) for _ in range(2))
SCALING = mpjax.loss_scale.layerwise_loss_scale()
BY = np.float32(2.0**-6)
# As accelerators round: XLA for CPU would keep float32 between two half-precision operations.
jit = functools.partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})


def dense(p, x):
  return x @ p["w"] + p["b"]


def attenuate(h, by=BY):
  """The identity, whose gradient is `by` times what comes in."""
  by = jnp.asarray(by, h.dtype)
  return jax.lax.stop_gradient(h - h * by) + h * by


def plain_loss(layers, x, dtype, by=BY, target=Y):
  def body(h, p):
    return attenuate(jnp.tanh(dense(jax.tree.map(lambda a: a.astype(dtype), p), h)), by), None

  h, _ = jax.lax.scan(body, x.astype(dtype), layers)
  return jnp.mean((h.astype(jnp.float32) - target) ** 2)


def scaled_loss(layers, x, dtype, by=BY, target=Y, scaling=SCALING, remat=False):
  def body(h, p):
    return scaling.apply(lambda v: attenuate(jnp.tanh(v), by), scaling.layer(dense, p, h)), None

  h, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, scaling.start(x, dtype), layers)
  return jnp.mean((scaling.finish(h) - target) ** 2)


def exact_gradients(layers=LAYERS, x=X, by=float(BY)):
  """Gradients of the layers and of the input, in float64 by hand."""
  inputs = [np.float64(x)]
  for w in layers["w"]:
    inputs.append(np.tanh(inputs[-1] @ np.float64(w)))
  g, of_w, of_b = 2 * (inputs[-1] - Y[: len(x)]) / inputs[-1].size, [], []
  for w, before, after in zip(layers["w"][::-1], inputs[-2::-1], inputs[::-1], strict=False):
    g = g * by * (1 - after**2)
    of_w.insert(0, before.T @ g)
    of_b.insert(0, g.sum(0))
    g = g @ np.float64(w).T
  return {"w": np.stack(of_w), "b": np.stack(of_b)}, g


def norm(tree):
  return math.sqrt(sum(float((np.float64(leaf) ** 2).sum()) for leaf in jax.tree.leaves(tree)))


def error(grads, expected):
  """The norm of the difference from what is expected, as a part of the norm of that."""
  return norm(jax.tree.map(lambda a, b: np.float64(a) - b, grads, expected)) / norm(expected)


def worst(grads, expected):
  """The largest `error` of a layer."""
  layer = lambda tree, i: jax.tree.map(lambda leaf: leaf[i], tree)
  return max(error(layer(grads, i), layer(expected, i)) for i in range(len(expected["w"])))
