"""Data parallelism in a loop of your own: shard_map, with gradients that cross devices in bfloat16.

Run it: python examples/shard_map_loop.py [POLICY] [STEPS]

On a machine with one device, XLA_FLAGS=--xla_force_host_platform_device_count=8 makes eight of its CPU.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import optax

import mpjax

P = jax.sharding.PartitionSpec


def loss_fn(params, batch):  # the mean over the rows of one device
  hidden = jnp.tanh(batch["x"] @ params["in"])
  return jnp.mean((hidden @ params["out"] - batch["y"]) ** 2)


def rows_of(key, teacher, rows):
  x = jax.random.normal(key, (rows, 16))
  return {"x": x, "y": jnp.tanh(x @ teacher)}


def main(policy="fp16", steps=100):
  policy = mpjax.get_policy(policy)
  mesh = jax.make_mesh((jax.device_count(),), ("data",))
  keys = jax.random.split(jax.random.key(0), 3)
  params = {
    "in": jax.random.normal(keys[0], (16, 64)) / 4,
    "out": jax.random.normal(keys[1], (64, 4)) / 8,
  }
  teacher = jax.random.normal(keys[2], (16, 4)) / 4
  tx = mpjax.with_loss_scaling(optax.adamw(1e-2), policy)
  opt_state = tx.init(params)

  @jax.jit
  @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())
  def step(params, opt_state, batch):
    # Each device has gradients of its own, which cross once, in the dtype that is asked for.
    local = jax.tree.map(lambda p: jax.lax.pcast(p, "data", to="varying"), params)
    loss, grads = mpjax.value_and_grad(mpjax.autocast(loss_fn, policy), opt_state)(local, batch)
    grads = jax.lax.pmean(mpjax.cast_floating(grads, jnp.bfloat16), "data")
    updates, opt_state = tx.update(mpjax.cast_floating(grads, jnp.float32), opt_state, params)
    return optax.apply_updates(params, updates), opt_state, jax.lax.pmean(loss, "data")

  losses = []
  for i in range(steps):
    batch = rows_of(jax.random.key(i + 1), teacher, 16 * jax.device_count())
    batch = jax.device_put(batch, jax.NamedSharding(mesh, P("data")))
    params, opt_state, loss = step(params, opt_state, batch)
    losses.append(float(loss))
  devices = f"{jax.device_count()} devices" if jax.device_count() > 1 else "1 device"
  print(f"{policy.label} on {devices}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
  return losses, params


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
