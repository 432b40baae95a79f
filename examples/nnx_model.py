"""An nnx model, trained in place: make_train_step for an nnx.Optimizer.

Run it: python examples/nnx_model.py [POLICY] [STEPS]
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax


class Block(nnx.Module):
  def __init__(self, dim, rngs):
    self.norm = nnx.LayerNorm(dim, rngs=rngs)
    self.attention = nnx.MultiHeadAttention(2, dim, decode=False, rngs=rngs)
    self.up, self.down = nnx.Linear(dim, 2 * dim, rngs=rngs), nnx.Linear(2 * dim, dim, rngs=rngs)

  def __call__(self, x):
    x = x + self.attention(self.norm(x))
    return x + self.down(jax.nn.gelu(self.up(x)))


class Sorter(nnx.Module):
  """Says which rank each of eight numbers has."""

  def __init__(self, dim, rngs):
    self.embed = nnx.Linear(1, dim, rngs=rngs)
    self.block1, self.block2 = Block(dim, rngs), Block(dim, rngs)
    self.head = nnx.Linear(dim, 8, rngs=rngs)

  def __call__(self, x):
    return self.head(self.block2(self.block1(self.embed(x[..., None]))))


def loss_fn(model, batch):
  return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def numbers(key, rows=64):
  x = jax.random.uniform(key, (rows, 8), minval=-1, maxval=1)
  return {"x": x, "y": jnp.argsort(jnp.argsort(x, axis=1), axis=1)}


def main(policy="bf16", steps=100):
  model = Sorter(32, nnx.Rngs(0))
  step = mpjax.make_train_step(loss_fn, optax.adamw(3e-3), policy)
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)  # step.tx: with the policy's loss scale
  losses = []
  for i in range(steps):
    metrics = step(model, optimizer, numbers(jax.random.key(i)))
    losses.append(float(metrics["loss"]))
  print(f"{step.policy.label}: loss {losses[0]:.3f} -> {losses[-1]:.3f} in {steps} steps")
  print(f"the model's weights stay {model.head.kernel[...].dtype}")

  predict = nnx.jit(mpjax.autocast(lambda model, x: model(x).argmax(-1), step.policy))
  batch = numbers(jax.random.key(10**6))
  right = float(jnp.mean(predict(model, batch["x"]) == batch["y"]))
  print(f"{right:.0%} of the ranks are right")
  return losses, nnx.state(model, nnx.Param)


if __name__ == "__main__":
  main(*sys.argv[1:2], *map(int, sys.argv[2:3]))
