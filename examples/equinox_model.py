"""An Equinox model: the optimiser and value_and_grad take its inexact arrays. Needs equinox.

Run it: python examples/equinox_model.py [POLICY] [STEPS]
"""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import mpjax


class Regressor(eqx.Module):
  layers: list
  norm: eqx.nn.LayerNorm

  def __init__(self, key, width=64):
    keys = jax.random.split(key, 3)
    sizes = (1, width, width, 1)
    self.layers = [eqx.nn.Linear(i, o, key=k) for i, o, k in zip(sizes, sizes[1:], keys, strict=False)]
    self.norm = eqx.nn.LayerNorm(width)

  def __call__(self, x):
    x = jnp.sin(3 * self.layers[0](x))
    x = self.norm(jax.nn.gelu(self.layers[1](x)))
    return self.layers[2](x)


def wave(key, rows=128):
  x = jax.random.uniform(key, (rows, 1), minval=-1, maxval=1)
  return {"x": x, "y": jnp.sin(5 * x) * jnp.exp(-(x**2))}


def main(policy="fp16", steps=150):
  policy = mpjax.get_policy(policy)
  arrays, static = eqx.partition(Regressor(jax.random.key(0)), eqx.is_inexact_array)

  @mpjax.autocast(policy=policy)
  def loss_fn(arrays, batch):
    model = eqx.combine(arrays, static)
    return jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)

  tx = mpjax.with_loss_scaling(optax.adamw(3e-3), policy)
  opt_state = tx.init(arrays)

  @jax.jit
  def step(arrays, opt_state, batch):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(arrays, batch)
    updates, opt_state = tx.update(grads, opt_state, arrays)
    return eqx.apply_updates(arrays, updates), opt_state, loss

  losses = []
  for i in range(steps):
    arrays, opt_state, loss = step(arrays, opt_state, wave(jax.random.key(i)))
    losses.append(float(loss))
  print(f"{policy.label}: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {steps} steps")
  return losses, eqx.combine(arrays, static)


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
