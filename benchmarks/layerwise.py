"""A deep float16 network that no single loss scale can train, and layer-wise scales can.

32 layers of 8 tanh units, each of which multiplies the gradient that passes by 3/8, as unrolled models do
(scale_gradient in MuZero). The gradient falls by 2^45 from the last layer to the first; float16 has 2^40 from
its largest number to its smallest. The first layer has to find one direction among 16 inputs, so a network
whose first layers stand still does not learn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax
from benchmarks._runner import Row, markdown

PACKAGES = ("optax",)
DEPTH, WIDTH, INPUTS, BATCH, STEPS = 32, 8, 16, 256, 1500
ATTENUATION = 0.375
NOISE = 0.3
SHOWN = (0, 8, 16, 24)  # layers in the table
DIRECTION = np.float32(np.random.default_rng(0).normal(size=INPUTS) / np.sqrt(INPUTS))


def rows() -> Iterator[Row]:
  """Float32, and float16 by scale."""
  for case, (loss, scale) in CASES.items():
    yield Row({"case": case}, functools.partial(train, loss, scale))


def initialise() -> list[dict[str, jax.Array]]:
  """Orthogonal weights, a little above 1 inside, and small biases."""
  rng = np.random.default_rng(1)
  sizes = [INPUTS, *[WIDTH] * (DEPTH - 1), 1]
  params = []
  for i, (n, m) in enumerate(itertools.pairwise(sizes)):
    orthogonal = np.linalg.qr(rng.normal(size=(max(n, m), min(n, m))))[0]
    gain = 1.2 if 0 < i < DEPTH - 1 else 1.0
    weights = orthogonal if n >= m else orthogonal.T
    params.append({"w": jnp.float32(gain * weights), "b": jnp.float32(0.1 * rng.normal(size=m))})
  return params


def draw(key: jax.Array, rows: int = BATCH) -> tuple[jax.Array, jax.Array]:
  """Inputs [rows, INPUTS] and noisy targets [rows, 1]."""
  key_x, key_noise = jax.random.split(key)
  x = jax.random.normal(key_x, (rows, INPUTS))
  return x, jnp.sin(2 * (x @ DIRECTION))[:, None] + NOISE * jax.random.normal(key_noise, (rows, 1))


def dense(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """An affine layer."""
  return x @ p["w"] + p["b"]


def activation(x: jax.Array) -> jax.Array:
  """Tanh, whose gradient is multiplied by ATTENUATION."""
  y, factor = jnp.tanh(x), jnp.asarray(ATTENUATION, x.dtype)
  return jax.lax.stop_gradient(y - y * factor) + y * factor


def plain_loss(params: Any, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
  """Mean squared error with parameters and activations in a dtype."""
  h = x.astype(dtype)
  low = mpjax.cast_floating(params, dtype)
  for p in low[:-1]:
    h = activation(dense(p, h))
  return jnp.mean((dense(low[-1], h).astype(jnp.float32) - y) ** 2)


def layerwise_loss(params: Any, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
  """The same with a scale for each layer."""
  scaling = mpjax.loss_scale.layerwise_loss_scale()
  h = scaling.start(x, dtype)
  for p in params[:-1]:
    h = scaling.apply(activation, scaling.layer(dense, p, h))
  return jnp.mean((scaling.finish(scaling.layer(dense, params[-1], h)) - y) ** 2)


_HALF = functools.partial(plain_loss, dtype=jnp.float16)
CASES: dict[str, tuple[Callable[..., jax.Array], float]] = {
  "float32": (functools.partial(plain_loss, dtype=jnp.float32), 1.0),
  "layer-wise": (functools.partial(layerwise_loss, dtype=jnp.float16), 1.0),
  **{f"2^{exponent}": (_HALF, 2.0**exponent) for exponent in range(0, 25, 8)},
}


def gradients(loss: Callable[..., jax.Array], scale: float) -> dict[str, Any]:
  """By layer, the share of zeros in the untrained network's weight gradients."""
  grads = jax.grad(lambda params: loss(params, *draw(jax.random.key(0))) * scale)(initialise())
  return {"zeros": [float((g["w"] == 0).mean()) for g in grads], "finite": bool(mpjax.all_finite(grads))}


def train(loss: Callable[..., jax.Array], scale: float, steps: int = STEPS) -> dict[str, Any]:
  """Adam on fresh batches: zeros before, and after it the loss of 8192 rows in float32."""
  adam = optax.adam(optax.cosine_decay_schedule(3e-3, steps), eps=1e-30)
  tx = mpjax.static_loss_scale(adam, scale)

  def step(carry: Any, i: jax.Array) -> tuple[Any, None]:
    params, state = carry
    x, y = draw(jax.random.fold_in(jax.random.key(1), i))
    grads = jax.grad(lambda p: mpjax.scale_loss(loss(p, x, y), state))(params)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  params = initialise()
  run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps))[0])
  params, state = run((params, tx.init(params)))
  loss_after = plain_loss(params, *draw(jax.random.key(2), rows=8192), jnp.float32)
  after = {"eval_loss": float(loss_after), "skipped": int(state.skipped_steps), "steps": steps}
  return gradients(loss, scale) | after


def table(report: dict[str, Any]) -> str:
  """Zeros in the gradients of some layers before training, and the loss after it."""
  lines = []
  for row in report["rows"]:
    zeros = [f"{row['zeros'][layer]:.0%}" for layer in SHOWN]
    finite, skipped = "yes" if row["finite"] else "no", f"{row['skipped']} of {row['steps']}"
    lines.append([row["case"], *zeros, finite, f"{row['eval_loss']:.4f}", skipped])
  return markdown(["scale", *(f"layer {layer}" for layer in SHOWN), "finite", "loss", "skipped"], lines)
