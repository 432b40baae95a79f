"""A small problem for training steps: plain parameters, linen with BatchNorm, an nnx module."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import nnx

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = (X @ np.arange(1, 5, dtype=np.float32) + 1)[:, None]
BATCH = {"x": X, "y": Y}
PARAMS = {"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)}
# At its usual 2**16 the first steps of these problems overflow, which is not what every test is about.
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 256.0}}


def loss_fn(params, batch):
  error = batch["x"] @ params["w"] + params["b"] - batch["y"]
  return (error.astype(jnp.float32) ** 2).mean()


def train(step, state, steps, batch=BATCH):
  for _ in range(steps):
    state, metrics = step(state, batch)
  return state, metrics


class Net(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(8)(x))
    return nn.Dense(1)(nn.relu(x))


def linen_loss(params, batch, model_state):
  out, model_state = Net().apply({"params": params, **model_state}, batch["x"], True, mutable=["batch_stats"])
  return ((out - batch["y"]).astype(jnp.float32) ** 2).mean(), {}, model_state


class Model(nnx.Module):
  def __init__(self, rngs):
    self.inner = nnx.Linear(4, 8, rngs=rngs)
    self.norm = nnx.BatchNorm(8, rngs=rngs)
    self.drop = nnx.Dropout(0.1, rngs=rngs)
    self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
    self.out = nnx.Linear(8, 1, rngs=rngs)

  def __call__(self, x):
    x = self.drop(nnx.relu(self.norm(self.inner(x))))
    for block in self.blocks:
      x = x + block(x)
    return self.out(x)


def nnx_loss(model, batch):
  return ((model(batch["x"]) - batch["y"]).astype(jnp.float32) ** 2).mean()
