"""A Haiku model: a recurrent network, whose memory stays float32 by itself. Needs dm-haiku.

Run it: python examples/haiku_model.py [POLICY] [STEPS]
"""

import sys

import haiku as hk
import jax
import jax.numpy as jnp
import optax

import mpjax


def forward(x):
  core = hk.GRU(32)
  x = hk.Linear(32)(x[..., None])
  x, _ = hk.dynamic_unroll(core, x, core.initial_state(len(x)), time_major=False)
  return hk.Linear(1)(x)[..., 0]


NETWORK = hk.without_apply_rng(hk.transform(forward))


def averages(key, rows=64, length=16):
  """Rows of noise, and the running averages of each."""
  x = jax.random.normal(key, (rows, length))
  return {"x": x, "y": jnp.cumsum(x, axis=1) / jnp.arange(1, length + 1)}


def loss_fn(params, batch):
  return jnp.mean((NETWORK.apply(params, batch["x"]) - batch["y"]) ** 2)


def main(policy="bf16", steps=100):
  batch = averages(jax.random.key(0))
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-2), policy)
  state = step.init(NETWORK.init(jax.random.key(0), batch["x"]))
  losses = []
  for i in range(steps):
    state, metrics = step(state, averages(jax.random.key(i)))
    losses.append(float(metrics["loss"]))
  print(f"{step.policy.label}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
  for carry in mpjax.explain(loss_fn, state.params, batch, policy=step.policy).carries:
    print(f"{carry.path} is held in {carry.dtype}: {carry.why}")
  return losses, state.params


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
