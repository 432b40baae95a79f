"""Representations: contrastive losses, whitening, codebooks, teachers, embeddings."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jax.nn.gelu(half.dot(x, params["in"])), params["out"])


def unit(x):
  return x * jax.lax.rsqrt(jnp.sum(x**2, -1, keepdims=True) + 1e-12)


def views(rng, n=48):
  x = rng.standard_normal((n, 16))
  return {"a": x + 0.3 * rng.standard_normal((n, 16)), "b": x + 0.3 * rng.standard_normal((n, 16))}


MLP = {"in": (16, 32), "out": (32, 16)}


@program(
  "vision and language: CLIP, a learnt temperature",
  {**MLP, "text": (16, 16), "scale": lambda rng: 3.0},
  views,
)
def clip(half, params, inputs):
  image, text = unit(mlp(half, params, inputs["a"])), unit(half.dot(inputs["b"], params["text"]))
  logits = jnp.exp(jnp.minimum(params["scale"], 4.6)) * half.dot(image, text.T)
  labels = jnp.arange(len(logits))
  cross = optax.softmax_cross_entropy_with_integer_labels
  losses = (cross(logits, labels) + cross(logits.T, labels)) / 2
  return Out(losses.mean(), {"losses": losses, "image": image})


@program(
  "vision: pairwise sigmoid losses (SigLIP), signs by an identity",
  {**MLP, "scale": lambda rng: 2.3, "bias": lambda rng: -10.0},
  views,
)
def siglip(half, params, inputs):
  a, b = unit(mlp(half, params, inputs["a"])), unit(mlp(half, params, inputs["b"]))
  logits = half.dot(a, b.T) * jnp.exp(params["scale"]) + params["bias"]
  losses = -jax.nn.log_sigmoid((2 * jnp.eye(len(a)) - 1) * logits).sum(-1)
  return Out(losses.mean(), losses)


@program("vision: Barlow twins, a cross-correlation of normalised features", MLP, views)
def barlow_twins(half, params, inputs):
  def normalised(x):
    z = mlp(half, params, x)
    return (z - z.mean(0)) / (z.std(0) + 1e-5)

  a, b = normalised(inputs["a"]), normalised(inputs["b"])
  correlation = a.T @ b / len(a)
  off = correlation - jnp.eye(16)
  loss = jnp.sum(jnp.where(jnp.eye(16, dtype=bool), off**2, 5e-3 * off**2))
  return Out(loss, correlation)


@program("vision: whitening by the Cholesky factor of a covariance (W-MSE)", MLP, views)
def whitening(half, params, inputs):
  def whitened(x):
    z = mlp(half, params, x)
    z = z - z.mean(0)
    factor = jnp.linalg.cholesky(z.T @ z / len(z) + 1e-4 * jnp.eye(16))
    return jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T

  a, b = whitened(inputs["a"]), whitened(inputs["b"])
  return Out(jnp.mean((a - b) ** 2), a)


@program(
  "vision: variance, invariance and covariance (VICReg), with eigenvalues of the covariance", MLP, views
)
def vicreg(half, params, inputs):
  a, b = mlp(half, params, inputs["a"]), mlp(half, params, inputs["b"])

  def terms(z):
    z = z - z.mean(0)
    covariance = jnp.einsum("ni,nj->ij", z, z) / (len(z) - 1)
    variance = jax.nn.relu(1 - jnp.sqrt(jnp.diag(covariance) + 1e-4))
    return variance.mean() + (jnp.sum(covariance**2) - jnp.sum(jnp.diag(covariance) ** 2)) / 16, covariance

  (loss_a, covariance), (loss_b, _) = terms(a), terms(b)
  rank = jnp.linalg.eigvalsh(jax.lax.stop_gradient(covariance))
  return Out(loss_a + loss_b + jnp.mean((a - b) ** 2), {"covariance": covariance, "eigenvalues": rank})


@program(
  "vision: a student and a teacher that is its moving average (DINO), a centre of its logits",
  {**MLP, "head": (16, 24)},
  lambda rng: {
    **views(rng),
    "centre": 0.1 * rng.standard_normal(24),
    "teacher": {
      "in": rng.standard_normal((16, 32)) / 4,
      "out": rng.standard_normal((32, 16)) / 32**0.5,
      "head": rng.standard_normal((16, 24)) / 4,
    },
  },
)
def moving_teacher(half, params, inputs):
  teacher = optax.incremental_update(jax.lax.stop_gradient(params), inputs["teacher"], 0.004)
  logits = lambda p, x: half.dot(unit(mlp(half, p, x)), p["head"])
  target = logits(teacher, inputs["a"])
  soft = jax.lax.stop_gradient(jax.nn.softmax((target - inputs["centre"]) / 0.04))
  losses = -jnp.sum(soft * jax.nn.log_softmax(logits(params, inputs["b"]) / 0.1), -1)
  centre = 0.9 * inputs["centre"] + 0.1 * target.mean(0)
  return Out(losses.mean(), {"losses": losses, "teacher": teacher, "centre": jax.lax.stop_gradient(centre)})


@program(
  "images: VQ-VAE, its codebook's sums and counts by products of one-hots",
  {"in": (16, 32), "out": (32, 8), "back": (8, 16)},
  lambda rng: {
    "x": rng.standard_normal((12000, 16)),
    "codes": 10 + rng.standard_normal((2, 8)),
    "count": 6000.0 + rng.random(2),
    "at": rng.integers(0, 2, 12000),
  },
)
def codebook(half, params, inputs):
  hidden = jax.nn.gelu(half.dot(inputs["x"], params["in"]))
  z = 64 * jax.nn.relu(half.dot(hidden, params["out"]))
  assigned = jax.nn.one_hot(inputs["at"], 2)  # of the nearest code a step before
  usage = jnp.ones(12000) @ assigned
  count = 0.99 * inputs["count"] + 0.01 * usage
  sums = 0.99 * inputs["codes"] * inputs["count"][:, None] + 0.01 * jax.lax.stop_gradient(assigned.T @ z)
  codes = sums / count[:, None]
  chosen = inputs["codes"][inputs["at"]]
  through = z + jax.lax.stop_gradient(chosen - z)
  loss = jnp.mean((half.dot(through, params["back"]) - inputs["x"]) ** 2) + 0.25 * jnp.mean((z - chosen) ** 2)
  return Out(loss, {"moved": codes - inputs["codes"]}, usage.astype(int))


@program(
  "words: skip-gram with negatives drawn from counts",
  {"in": lambda rng: rng.standard_normal((300, 16)), "out": lambda rng: rng.standard_normal((300, 16)) / 4},
  lambda rng: {
    "centre": rng.integers(0, 300, 64),
    "context": rng.integers(0, 300, 64),
    "counts": rng.integers(1, 1000, 300),
    "seed": rng.integers(0, 2**31),
  },
)
def skip_gram(half, params, inputs):
  sums = jnp.cumsum(inputs["counts"].astype(jnp.float32) ** 0.75)
  drawn = jnp.searchsorted(sums, jax.random.uniform(jax.random.key(inputs["seed"]), (64, 5)) * sums[-1])
  centre = params["in"][inputs["centre"]]
  near = half.einsum("nd,nd->n", centre, params["out"][inputs["context"]])
  far = half.einsum("nd,nkd->nk", centre, params["out"][drawn])
  losses = jax.nn.softplus(-near) + jax.nn.softplus(far).sum(-1)
  return Out(losses.mean(), losses, drawn)


@program(
  "recommending: a factorisation machine, by the difference of two squares, and ranked pairs",
  {"factors": (200, 8), "linear": (200, 1), "tower": (8, 8)},
  lambda rng: {"liked": rng.integers(0, 200, (64, 6)), "other": rng.integers(0, 200, (64, 6))},
)
def factorisation_machine(half, params, inputs):
  def score(features):
    v = half.dot(params["factors"][features] * 10, params["tower"])  # [B, F, D]
    pairs = 0.5 * jnp.sum(jnp.sum(v, 1) ** 2 - jnp.sum(v**2, 1), -1)
    return pairs + params["linear"][features, 0].sum(-1)

  margin = score(inputs["liked"]) - score(inputs["other"])
  return Out(-jax.nn.log_sigmoid(margin).mean(), margin)


@program(
  "hierarchies: distances in a Poincare ball",
  {"points": lambda rng: 0.15 * rng.standard_normal((40, 8)), "turn": (8, 8)},
  lambda rng: {"a": rng.integers(0, 40, 64), "b": rng.integers(0, 40, 64), "y": rng.uniform(0.5, 3, 64)},
)
def poincare(half, params, inputs):
  points = half.dot(params["points"], params["turn"])
  points = points / jnp.maximum(1.0, jnp.linalg.norm(points, axis=-1, keepdims=True) / (1 - 1e-3))
  a, b = points[inputs["a"]], points[inputs["b"] + (inputs["a"] == inputs["b"])]
  square = lambda x: jnp.sum(x**2, -1)
  distance = jnp.arccosh(1 + 2 * square(a - b) / ((1 - square(a)) * (1 - square(b))) + 1e-7)
  return Out(jnp.mean((distance - inputs["y"]) ** 2), distance)
