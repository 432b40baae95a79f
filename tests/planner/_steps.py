"""Steps that plans are made of, and counts of their bytes by hand."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import mpjax
from mpjax.planner import get_target, missing

F32, BF16 = jnp.float32, jnp.bfloat16
S = jax.ShapeDtypeStruct

# B rows, D features in, H hidden, OUT out.
B, D, H, OUT = 16, 64, 256, 32
PARAMS = {"w1": S((D, H), F32), "w2": S((H, OUT), F32)}
BATCH = {"x": S((B, D), F32), "y": S((B, OUT), F32)}
SIZE = D * H + H * OUT


def mlp(params, batch):
  return jnp.sum(jnp.tanh(batch["x"] @ params["w1"]) @ params["w2"])


def mean_squares(predict):
  return lambda params, batch: jnp.mean((predict(params, batch["x"]) - batch["y"]) ** 2)


def training(loss, tx):
  def step(params, opt_state, batch):
    value, gradients = jax.value_and_grad(loss)(params, batch)
    updates, opt_state = tx.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, value

  return step


def nbytes(tree):
  """Bytes of a tree of shapes; a key of the default kind is two words."""
  size = lambda x: 8 if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x.dtype.itemsize
  return sum(math.prod(x.shape) * size(x) for x in jax.tree.leaves(tree))


def by_parts(plan, *names):
  return sum(plan.memory.parts.get(name, 0) for name in names)


def a_train_step(policy, *, loss=mlp, params=PARAMS, tx=None, **options):
  """A `TrainStep` and the shapes of its state."""
  step = mpjax.make_train_step(loss, tx or optax.adam(1e-3), policy, **options)
  zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params)
  return step, jax.eval_shape(lambda: step.init(zeros()))


def layers(params, batch):
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), batch["x"], params)[0].sum()


def mesh_of(kind=AxisType.Auto, **axes):
  return AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(kind,) * len(axes))


def on(mesh, tree, *spec):
  """The shapes of a tree that lies on a mesh."""
  sharding = NamedSharding(mesh, PartitionSpec(*spec))
  return jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=sharding), tree)


def described(target):
  """The name of a target, if this machine compiles for it."""
  if lacks := missing(get_target(target)):
    pytest.skip(lacks)
  return target
