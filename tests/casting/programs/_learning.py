"""Learning about learning: inner loops, second derivatives, privacy, closed forms, norms of weights."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, program

MLP = {"in": (8, 32), "out": (32, 4)}


def mlp(half, params, x):
  return half.dot(jnp.tanh(half.dot(x, params["in"])), params["out"])


def tasks(rng, n=4):
  return {
    name: rng.standard_normal((n, 10, size)) for name, size in (("x", 8), ("y", 4), ("tx", 8), ("ty", 4))
  }


def squared(half, params, x, y):
  return jnp.mean((mlp(half, params, x) - y) ** 2)


@program("few shots: MAML, three steps of gradient descent inside", MLP, tasks)
def inner_loop(half, params, inputs):
  def adapted(x, y, tx, ty):
    def step(p, _):
      slopes = jax.grad(lambda p: squared(half, p, x, y))(p)
      return jax.tree.map(lambda w, g: w - 0.1 * g, p, slopes), None

    p, _ = jax.lax.scan(step, params, length=3)
    return squared(half, p, tx, ty), jax.tree.map(lambda w, new: new - w, params, p)

  losses, moves = jax.vmap(adapted)(inputs["x"], inputs["y"], inputs["tx"], inputs["ty"])
  return Out(losses.mean(), {"moves": moves})


@program("few shots: a ridge regression in closed form on learnt features", {"in": (8, 16)}, tasks)
def closed_form_head(half, params, inputs):
  def solved(x, y, tx, ty):
    z, tz = (jnp.tanh(half.dot(a, params["in"])) for a in (x, tx))
    head = jnp.linalg.solve(z.T @ z + 0.1 * jnp.eye(16), z.T @ y)
    return jnp.mean((tz @ head - ty) ** 2), head

  losses, heads = jax.vmap(solved)(inputs["x"], inputs["y"], inputs["tx"], inputs["ty"])
  return Out(losses.mean(), heads)


@program(
  "privacy: gradients of examples, clipped, summed, and noised",
  MLP,
  lambda rng: {
    "x": rng.standard_normal((32, 8)),
    "y": rng.standard_normal((32, 4)),
    "seed": rng.integers(0, 2**31),
  },
)
def private_gradients(half, params, inputs):
  slopes = jax.vmap(jax.grad(lambda p, x, y: squared(half, p, x, y)), (None, 0, 0))(
    params, inputs["x"], inputs["y"]
  )
  norms = jnp.sqrt(sum(jnp.sum(g.reshape(32, -1) ** 2, -1) for g in jax.tree.leaves(slopes)))
  scale = jnp.minimum(1.0, 0.5 / norms)
  clipped = jax.tree.map(lambda g: jnp.einsum("n...,n->...", g, scale) / 32, slopes)
  noise = 0.01 * jax.random.normal(jax.random.key(inputs["seed"]), clipped["in"].shape)
  step = jax.lax.stop_gradient(clipped["in"] + noise)
  return Out(squared(half, params, inputs["x"], inputs["y"]), {"norms": norms, "step": step})


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
  "stability: a weight divided by its spectral norm, by power iterations, a state of the step",
  {"w": (16, 16), "out": (16, 4)},
  lambda rng: {
    "x": rng.standard_normal((32, 16)),
    "y": rng.standard_normal((32, 4)),
    "u": rng.standard_normal(16),
  },
)
def spectral_norm(half, params, inputs):
  w = params["w"]

  def step(u, _):
    v = half.dot(w.T, u)
    u = half.dot(w, v / jnp.linalg.norm(v))
    return u / jnp.linalg.norm(u), None

  u, _ = jax.lax.scan(step, inputs["u"], length=5)
  u = jax.lax.stop_gradient(u)
  v = jax.lax.stop_gradient(half.dot(w.T, u))
  sigma = half.dot(u, w) @ (v / jnp.linalg.norm(v))
  out = half.dot(jax.nn.relu(half.dot(inputs["x"], w / sigma)), params["out"])
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"out": out, "u": u})


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


@program(
  "layers: weights that another network makes, mapped over conditions",
  {"hyper": (4, 8 * 16), "out": (16, 2)},
  lambda rng: {
    "condition": rng.standard_normal((6, 4)),
    "x": rng.standard_normal((6, 10, 8)),
    "y": rng.standard_normal((6, 10, 2)),
  },
)
def made_weights(half, params, inputs):
  def one(condition, x):
    w = half.dot(condition, params["hyper"]).reshape(8, 16) / 8**0.5
    return half.dot(jax.nn.silu(half.dot(x, w)), params["out"])

  out = jax.vmap(one)(inputs["condition"], inputs["x"])
  return Out(jnp.mean((out - inputs["y"]) ** 2), out)


@program(
  "optimisation: second moments of features and Newton-Schulz steps on a gradient, kept as a state",
  MLP,
  lambda rng: {
    "x": rng.standard_normal((64, 8)),
    "y": rng.standard_normal((64, 4)),
    "moments": 2.0 * jnp.eye(8),
  },
)
def preconditioned_gradient(half, params, inputs):
  loss = lambda p: squared(half, p, inputs["x"], inputs["y"])
  slope = jax.grad(loss)(params)["in"]
  moments = 0.95 * inputs["moments"] + 0.05 * slope @ slope.T
  values, vectors = jnp.linalg.eigh(moments)
  scaled = (vectors * values**-0.25) @ vectors.T @ slope
  x = slope / (jnp.linalg.norm(slope) + 1e-7)

  def step(x, _):
    a = x @ x.T
    return 1.5 * x - 0.5 * a @ x, None

  orthogonal, _ = jax.lax.scan(step, x, length=3)
  state = jax.lax.stop_gradient({"moments": moments, "scaled": scaled, "orthogonal": orthogonal})
  return Out(loss(params), state)
