"""Small networks, and training runs of them with and without a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import mpjax

X = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 8, 32)
BATCH = {"x": X, "y": Y}


def mesh(data=1, fsdp=1, tensor=1):
  count = data * fsdp * tensor
  return jax.make_mesh((data, fsdp, tensor), ("data", "fsdp", "tensor"), devices=jax.devices()[:count])


def weights(seed=0):
  keys = jax.random.split(jax.random.key(seed), 3)
  shape = lambda key, *shape: jax.random.normal(key, shape) * shape[0] ** -0.5
  return {
    "in": shape(keys[0], 64, 64),
    "scale": jnp.ones(64),
    "hidden": shape(keys[1], 64, 128),
    "out": shape(keys[2], 128, 8),
  }


def network(p, x):
  x = jax.nn.gelu(x @ p["in"])
  x *= p["scale"] * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6)
  return jax.nn.gelu(x @ p["hidden"]) @ p["out"]


def cross_entropy(logits, y):
  losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), y)
  return losses.mean(), {"right": (logits.argmax(-1) == y).sum(), "mean_logit": logits.mean()}


def plain(p, batch):
  return cross_entropy(network(p, batch["x"]), batch["y"])


def with_dropout(p, batch, row_rngs):
  keep = lambda key, x: jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0)
  return cross_entropy(network(p, jax.vmap(keep)(row_rngs, batch["x"])), batch["y"])


class Normed(nn.Module):
  @nn.compact
  def __call__(self, x):
    x = nn.Dense(64, use_bias=False)(x)
    x = nn.BatchNorm(use_running_average=False, axis_name=mpjax.batch_axes() or None)(x)
    return nn.Dense(8)(nn.relu(x))


def with_statistics(p, batch, model_state):
  logits, model_state = Normed().apply({"params": p, **model_state}, batch["x"], mutable=["batch_stats"])
  return *cross_entropy(logits, batch["y"]), model_state


def layers():
  """Parameters of four equal layers, stacked, between two others."""
  keys = jax.random.split(jax.random.key(0), 3)
  normal = lambda key, *shape: jax.random.normal(key, shape) / 8
  return {"in": normal(keys[0], 64, 64), "layers": normal(keys[1], 4, 64, 64), "out": normal(keys[2], 64, 8)}


def scanned(p, batch):
  layer = lambda x, w: (x + jax.nn.gelu(x @ w), None)
  return cross_entropy(jax.lax.scan(layer, batch["x"] @ p["in"], p["layers"])[0] @ p["out"], batch["y"])


def unrolled(p, batch):
  x = batch["x"] @ p["in"]
  for i in range(4):
    x = x + jax.nn.gelu(x @ p["layers"][i])
  return cross_entropy(x @ p["out"], batch["y"])


def train(loss, policy, init, steps=4, batch=BATCH, tx=None, batches=None, **options):
  step = mpjax.make_train_step(loss, tx or optax.adam(1e-2), policy, **options)
  batches = [batch] * steps if batches is None else batches
  state = step.init(**init(), **({"batch": batches[0]} if step.needs_batch else {}))
  curve = []
  for batch in batches:
    state, metrics = step(state, batch)
    curve.append({name: np.asarray(value) for name, value in metrics.items()})
  return step, state, curve


of_weights = lambda: {"params": weights()}
of_layers = lambda: {"params": layers()}
of_dropout = lambda: {"params": weights(), "rng": jax.random.key(1)}


def of_statistics():
  variables = Normed().init(jax.random.key(0), X)
  return {"params": variables["params"], "model_state": {"batch_stats": variables["batch_stats"]}}


def np_tree(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32), tree)


def assert_close(a, b, atol):
  jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=atol), a, b)
