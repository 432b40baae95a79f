"""Fine-tuning in few bytes: bfloat16 weights with 8 bits of correction, and moments in 8 bits.

Run it: python examples/few_bytes.py [STEPS]

Trains a model in float32, then goes on with other data under fp32 and under bf16_lean, and compares.
"""

import sys

import jax
import jax.numpy as jnp
import optax

import mpjax

DIM = 128


def init(key):
  keys = jax.random.split(key, 3)
  normal = lambda key, *shape: jax.random.normal(key, shape) / shape[0] ** 0.5
  return {"in": normal(keys[0], 32, DIM), "mid": normal(keys[1], DIM, DIM), "out": normal(keys[2], DIM, 8)}


def loss_fn(params, batch):
  x = jax.nn.gelu(batch["x"] @ params["in"])
  x = x + jax.nn.gelu(x @ params["mid"])
  return jnp.mean((x @ params["out"] - batch["y"]) ** 2)


def rows_of(key, teacher):
  x = jax.random.normal(key, (64, 32))
  return {"x": x, "y": jnp.tanh(x @ teacher)}


def train(step, state, teacher, steps):
  losses = []
  for i in range(steps):
    state, metrics = step(state, rows_of(jax.random.key(i), teacher))
    losses.append(float(metrics["loss"]))
  return state, losses


def bytes_a_parameter(state):
  held = jax.tree.leaves((state.params, state.opt_state))
  return sum(x.nbytes for x in held) / sum(x.size for x in jax.tree.leaves(state.params))


def main(steps=150):
  teachers = jax.random.normal(jax.random.key(1), (2, 32, 8)) / 32**0.5
  tx = optax.adamw(3e-3, b2=0.95)  # 8 bits follow a b2 of 0.95; 0.999 wants bfloat16 state
  first = mpjax.make_train_step(loss_fn, tx, "fp32", donate=False)
  trained, losses = train(first, first.init(init(jax.random.key(0))), teachers[0], steps)
  print(f"pre-training in float32: loss {losses[0]:.4f} -> {losses[-1]:.4f}")

  found = {}
  for policy in ("fp32", "bf16_lean"):
    step = first.with_policy(policy)
    state = step.adopt(trained, before=first)  # parameters and moments, in this policy's formats
    state, losses = train(step, state, teachers[1], steps)
    found[policy] = losses, bytes_a_parameter(state), state
    print(f"{policy:>9}: {found[policy][1]:5.2f} bytes a parameter, loss {losses[0]:.4f} -> {losses[-1]:.4f}")
  return found


if __name__ == "__main__":
  main(*map(int, sys.argv[1:2]))
