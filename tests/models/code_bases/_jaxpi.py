"""jaxpi: a network for Burgers' equation, whose residual has second derivatives."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.models.code_bases._loops import Run, run


class _Net(nn.Module):
  @nn.compact
  def __call__(self, t: jax.Array, x: jax.Array) -> jax.Array:
    y = jnp.stack([t, jnp.cos(jnp.pi * x), jnp.sin(jnp.pi * x)])
    for _ in range(3):
      y = jnp.tanh(nn.Dense(32, kernel_init=nn.initializers.glorot_normal())(y))
    return nn.Dense(1)(y)[0]


def jaxpi(policy: str | None) -> Run:
  """A PINN of Burgers' equation."""
  net = _Net()
  params = net.init(jax.random.key(0), jnp.zeros(()), jnp.zeros(()))
  x0 = np.linspace(-1, 1, 33, dtype=np.float32)

  def loss_fn(params: Any, points: jax.Array) -> jax.Array:
    u = lambda t, x: net.apply(params, t, x)

    def residual(t: jax.Array, x: jax.Array) -> jax.Array:
      u_t, u_x = jax.grad(u, (0, 1))(t, x)
      u_xx = jax.grad(jax.grad(u, 1), 1)(t, x)
      return u_t + u(t, x) * u_x - 0.01 / jnp.pi * u_xx

    of_start = jax.vmap(u, (None, 0))(0.0, x0) + jnp.sin(jnp.pi * x0)
    return jnp.mean(of_start**2) + jnp.mean(jax.vmap(residual)(*points) ** 2)

  rng = np.random.default_rng(0)
  points = [np.float32([rng.uniform(0, 1, 128), rng.uniform(-1, 1, 128)]) for _ in range(15)]
  tx = optax.adam(optax.exponential_decay(3e-3, 100, 0.9))
  _, losses, skipped = run(loss_fn, params, tx, policy, points)
  return Run(losses, skipped, {})
