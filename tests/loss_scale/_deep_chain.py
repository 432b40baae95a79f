"""A chain of tanh layers whose gradient falls by 2^-6 in each, plain and with layer-wise loss scales."""

import math

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._jaxprs import jit

DEPTH, WIDTH = 8, 16
RNG = np.random.default_rng(0)
PARAMS = [
  {
    "w": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) * 1.4 / math.sqrt(WIDTH), jnp.float32),
    "b": jnp.zeros(WIDTH),
  }
  for _ in range(DEPTH)
]
X = jnp.asarray(RNG.normal(size=(32, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(32, WIDTH)), jnp.float32)
SCALING = mpjax.layerwise_loss_scale()


def dense(p, x):
  return x @ p["w"] + p["b"]


def attenuate(h, by=2.0**-6):
  """The identity, whose gradient is `by` times what comes in."""
  by = jnp.asarray(by, h.dtype)
  return jax.lax.stop_gradient(h - h * by) + h * by


def plain_loss(params, x, dtype, by=2.0**-6):
  h = x.astype(dtype)
  for p in params:
    h = attenuate(jnp.tanh(dense(jax.tree.map(lambda a: a.astype(dtype), p), h)), by)
  return jnp.mean((h.astype(jnp.float32) - Y[: len(x)]) ** 2)


def scaled_loss(params, x, dtype, by=2.0**-6, scaling=SCALING):
  h = scaling.start(x, dtype)
  for p in params:
    h = scaling.apply(lambda v: attenuate(jnp.tanh(v), by), scaling.layer(dense, p, h))
  return jnp.mean((scaling.finish(h) - Y[: len(x)]) ** 2)


def error(grads, expected):
  norm = lambda tree: math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in jax.tree.leaves(tree)))
  return [
    norm(jax.tree.map(lambda a, b: a - b, g, e)) / norm(e) for g, e in zip(grads, expected, strict=True)
  ]


TRUTH = jit(jax.grad(lambda params: plain_loss(params, X, jnp.float32)))(PARAMS)
