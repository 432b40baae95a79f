"""A plug-in, as a user would write it: a dataset, and a model of it in each of three ways."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import mpjax


class Blobs:
  """Points around the corners of a cube, and which corner it is."""

  def __init__(self, count, classes, seed):
    rng = np.random.default_rng(seed)
    self.labels = rng.integers(0, classes, count)
    corners = np.stack([self.labels >> bit & 1 for bit in range(8)], 1)
    self.points = corners + 0.3 * rng.standard_normal((count, 8))

  def __len__(self):
    return len(self.labels)

  def __getitem__(self, index):
    return {"x": self.points[index], "y": self.labels[index]}


@mpjax.train.register_data("blobs")
def blobs(*, count: int = 256, classes: int = 4):
  return Blobs(count, classes, 0), Blobs(64, classes, 1), {"features": 8, "classes": classes}


def cross_entropy(logits, labels):
  return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class Net(nn.Module):
  width: int
  classes: int
  dropout: float

  @nn.compact
  def __call__(self, x, train):
    x = nn.Dense(self.width, name="up")(x)
    x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(x))
    x = nn.Dropout(self.dropout, deterministic=not train)(x)
    return nn.Dense(self.classes, name="head")(x)


@mpjax.train.register_model("own_linen")
def own_linen(info, *, width: int = 32, dropout: float = 0.1):
  net = Net(width, info.classes, dropout)

  def init(key):
    variables = net.init(key, jnp.zeros((1, info.features)), train=False)
    return variables["params"], {"batch_stats": variables["batch_stats"]}

  def loss_fn(params, batch, model_state, rng):
    variables = {"params": params, **model_state}
    logits, state = net.apply(
      variables, batch["x"], train=True, mutable=["batch_stats"], rngs={"dropout": rng}
    )
    accuracy = (logits.argmax(-1) == batch["y"]).mean()
    return cross_entropy(logits, batch["y"]), {"accuracy": accuracy}, state

  def logits(params, x, model_state):
    return net.apply({"params": params, **model_state}, x, train=False)

  def evaluate(params, batch, model_state):
    out = logits(params, batch["x"], model_state)
    return cross_entropy(out, batch["y"]), {"accuracy": (out.argmax(-1) == batch["y"]).mean()}

  sharding = {"up/kernel": (None, "fsdp"), "head/kernel": ("fsdp", None)}
  return mpjax.train.Task(init, loss_fn, evaluate, logits, sharding, units=("points", 1))


class Perceptron(nnx.Module):
  def __init__(self, features, width, classes, dropout, *, rngs):
    self.up = nnx.Linear(features, width, rngs=rngs)
    self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
    self.dropout = nnx.Dropout(dropout)
    self.head = nnx.Linear(width, classes, rngs=rngs)

  def __call__(self, x, rng=None):
    x = nnx.relu(self.norm(self.up(x), use_running_average=rng is None))
    return self.head(self.dropout(x, deterministic=rng is None, rngs=rng))


@mpjax.train.register_model("own_nnx")
def own_nnx(info, *, width: int = 32, dropout: float = 0.1):
  def init(key):
    return Perceptron(info.features, width, info.classes, dropout, rngs=nnx.Rngs(key))

  def loss_fn(model, batch, rng):
    return cross_entropy(model(batch["x"], rng), batch["y"])

  def evaluate(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])

  return mpjax.train.Task(init, loss_fn, evaluate, logits=lambda model, x: model(x))


@mpjax.train.register_model("own_plain")
def own_plain(info, *, width: int = 32, gain: float = 1.0):
  def init(key):
    up, head = jax.random.split(key)
    return {
      "up": gain * jax.random.normal(up, (info.features, width)) / info.features**0.5,
      "head": jax.random.normal(head, (width, info.classes)) / width**0.5,
    }

  def logits(params, x):
    return jax.nn.relu(x @ params["up"]) @ params["head"]

  def loss_fn(params, batch):
    return cross_entropy(logits(params, batch["x"]), batch["y"])

  return mpjax.train.Task(init=init, loss_fn=loss_fn, logits=logits)
