"""Small problems for training steps: plain parameters, wide ones, linen with BatchNorm, an nnx module."""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AxisType

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 4)).astype(np.float32)
Y = (X @ np.arange(1, 5, dtype=np.float32) + 1)[:, None]
BATCH = {"x": X, "y": Y}
PARAMS = {"w": np.zeros((4, 1), np.float32), "b": np.zeros(1, np.float32)}
# At its usual 2**16 the first steps of these problems overflow, which is not what every test is about.
FP16 = {"base": "fp16", "loss_scaling": {"init_scale": 256.0}}


def loss_fn(params, batch):
  error = batch["x"] @ params["w"] + params["b"] - batch["y"]
  return (error.astype(np.float32) ** 2).mean()


# Of as many entries as few bytes are for.
normal = lambda *shape: RNG.normal(size=shape).astype(np.float32)
WIDE_PARAMS = {"w": normal(128, 256) / 8, "b": np.zeros(256, np.float32), "v": normal(256, 64) / 16}
WIDE_BATCH = {"x": normal(64, 128), "y": normal(64, 64)}


def wide_loss(params, batch):
  hidden = jnp.tanh(batch["x"] @ params["w"] + params["b"])
  return jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)


def mesh(**axes):
  devices = jax.devices()[: math.prod(axes.values())]
  types = (AxisType.Auto,) * len(axes)
  return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def loss_and_gradients(params):
  """Returns what `loss_fn` and its gradients are for `BATCH`."""
  error = X.astype(np.float64) @ params["w"] + params["b"] - Y
  return (error**2).mean(), {"w": X.T @ error / 8, "b": error.sum(0) / 8}


def train(step, state, steps, batch=BATCH):
  for _ in range(steps):
    state, metrics = step(state, batch)
  return state, metrics


def np_tree(tree):
  return jax.tree.map(np.asarray, tree)


def assert_same(got, want):
  jax.tree.map(np.testing.assert_array_equal, np_tree(got), np_tree(want))


def assert_near(got, want, **tolerance):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), np_tree(got), np_tree(want))


class Net(nn.Module):
  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(8, use_bias=False, name="first")(x)
    x = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(x)
    return nn.Dense(1, name="head")(nn.relu(x))


def linen_loss(params, batch, model_state):
  out, model_state = Net().apply({"params": params, **model_state}, batch["x"], True, mutable=["batch_stats"])
  metrics = {"largest": jnp.abs(out).max()}
  return ((out - batch["y"]).astype(jnp.float32) ** 2).mean(), metrics, model_state


@functools.cache
def linen_variables():
  """Returns parameters and state of the model."""
  variables = jax.jit(lambda: Net().init(jax.random.key(0), X, False))()
  return variables["params"], {"batch_stats": variables["batch_stats"]}


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
