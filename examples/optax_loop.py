"""Two lines in an optax loop: float16 with loss scaling, and no change to the model.

Run it: python examples/optax_loop.py [POLICY] [STEPS]; fp16 and 300 by default
"""

import sys

import jax
import jax.numpy as jnp
import optax

import mpjax


def spirals(key, rows=256):
  """Points of two spirals, and which of them each is on."""
  angle = jax.random.uniform(key, (rows,), minval=0.5, maxval=9.0)
  label = jnp.arange(rows) % 2
  x = jnp.stack([jnp.cos(angle), jnp.sin(angle)], axis=1) * (angle * (1 - 2 * label) / 9)[:, None]
  return {"x": x, "y": label}


def init(key, width=64):
  sizes = (2, width, width, 2)
  keys = jax.random.split(key, len(sizes) - 1)
  return [
    {"w": jax.random.normal(k, (i, o)) * (2 / i) ** 0.5, "b": jnp.zeros(o)}
    for k, i, o in zip(keys, sizes, sizes[1:], strict=False)
  ]


def loss_fn(params, batch):  # written for float32
  x = batch["x"]
  for i, layer in enumerate(params):
    x = x @ layer["w"] + layer["b"]
    x = jax.nn.gelu(x) if i < len(params) - 1 else x
  return optax.softmax_cross_entropy_with_integer_labels(x, batch["y"]).mean()


def main(policy="fp16", steps=300):
  policy = mpjax.get_policy(policy)
  params = init(jax.random.key(0))
  tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3))
  tx = mpjax.with_loss_scaling(tx, policy)  # 1: the loss scale lives in the optimiser's state
  opt_state = tx.init(params)

  @jax.jit
  def step(params, opt_state, batch):
    # 2: products in half precision, and gradients of the scaled loss; it was jax.value_and_grad(loss_fn)
    loss, grads = mpjax.value_and_grad(mpjax.autocast(loss_fn, policy), opt_state)(params, batch)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  losses = []
  for i in range(steps):
    params, opt_state, loss = step(params, opt_state, spirals(jax.random.key(i)))
    losses.append(float(loss))
  print(f"{policy.label}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
  if policy.loss_scaling:
    scale = mpjax.get_loss_scale(opt_state)
    print(f"loss scale {float(scale.scale):g}, {int(scale.skipped_steps)} steps skipped")
  return losses, params


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
