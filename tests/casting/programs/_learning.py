"""Learning about learning: second derivatives, closed forms, teachers."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, program
from tests.casting.programs._physics import mlp

MLP = {"in": (8, 32), "out": (32, 4)}


def tasks(rng, n=4):
  return {
    name: rng.standard_normal((n, 10, size)) for name, size in (("x", 8), ("y", 4), ("tx", 8), ("ty", 4))
  }


def squared(half, params, x, y):
  return jnp.mean((mlp(half, params, x) - y) ** 2)


@program("few shots: a ridge regression in closed form on learnt features", {"in": (8, 16)}, tasks)
def closed_form_head(half, params, inputs):
  def solved(x, y, tx, ty):
    z, tz = (jnp.tanh(half.dot(a, params["in"])) for a in (x, tx))
    head = jnp.linalg.solve(z.T @ z + 0.1 * jnp.eye(16), z.T @ y)
    return jnp.mean((tz @ head - ty) ** 2), head

  losses, heads = jax.vmap(solved)(inputs["x"], inputs["y"], inputs["tx"], inputs["ty"])
  return Out(losses.mean(), heads)


@program(
  "optimisation: a step by conjugate gradients on Hessian-vector products",
  MLP,
  lambda rng: {"x": rng.standard_normal((32, 8)), "y": rng.standard_normal((32, 4))},
)
def newton_step(half, params, inputs):
  loss = lambda p: squared(half, p, inputs["x"], inputs["y"])
  slopes = jax.grad(loss)(params)

  def product(v):
    curved = jax.jvp(jax.grad(loss), (params,), (v,))[1]
    return jax.tree.map(lambda h, v: h + 2.0 * v, curved, v)

  step, _ = jax.scipy.sparse.linalg.cg(product, slopes, maxiter=8)
  return Out(loss(params), {"step": jax.lax.stop_gradient(step)})


@program(
  "compression: a student beside a teacher, softened by a temperature, with dropout",
  {**MLP, "big_in": (8, 64), "big_out": (64, 4)},
  lambda rng: {
    "x": rng.standard_normal((64, 8)),
    "y": rng.integers(0, 4, 64),
    "seed": rng.integers(0, 2**31),
  },
)
def distillation(half, params, inputs):
  kept = jax.random.bernoulli(jax.random.key(inputs["seed"]), 0.8, (64, 32))
  hidden = jnp.where(kept, jnp.tanh(half.dot(inputs["x"], params["in"])) / 0.8, 0)
  student = half.dot(hidden, params["out"])
  teacher = mlp(half, {"in": params["big_in"], "out": params["big_out"]}, inputs["x"])
  soft = jax.lax.stop_gradient(jax.nn.log_softmax(teacher / 4))
  divergence = jnp.sum(jnp.exp(soft) * (soft - jax.nn.log_softmax(student / 4)), -1) * 16
  hard = optax.softmax_cross_entropy_with_integer_labels(student, inputs["y"])
  return Out(jnp.mean(divergence + 0.5 * hard), {"divergence": divergence, "hard": hard}, kept.astype(int))
