"""Textbook numerics that people write as products and convolutions: none of these is a layer."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.casting.programs._ideal import Out, mlp, program


@program(
  "series: a moving average and its variance by convolutions, and a trend by a Vandermonde matrix",
  {"in": (8, 16), "out": (16, 3)},
  lambda rng: {
    "x": rng.standard_normal((16, 8)),
    "series": 100 + rng.standard_normal((16, 60)).cumsum(1) / 8,
  },
)
def moving_statistics(half, params, inputs):
  window = jnp.ones(10) / 10
  mean = jax.vmap(lambda x: jnp.convolve(x, window, mode="valid"))(inputs["series"])
  square = jax.vmap(lambda x: jnp.convolve(x * x, window, mode="valid"))(inputs["series"])
  trend = mlp(half, params, inputs["x"]) @ jnp.vander(jnp.linspace(-1, 1, 51), 3).T
  deviation = jnp.sqrt(jnp.maximum(square - mean**2, 0) + 1e-4)
  score = (mean - 100 - trend) / deviation
  return Out(jnp.mean(jnp.tanh(score / 10) ** 2), {"mean": mean, "score": score})


@program(
  "sound: a spectrogram by products with cosines and sines, its logarithm",
  {"in": (17, 16), "out": (16, 4)},
  lambda rng: {
    "wave": np.sin(np.arange(512) * 0.7)[None] + 1e-4 * rng.standard_normal((4, 512)),
    "y": rng.standard_normal((4, 4)),
  },
)
def spectrum_by_products(half, params, inputs):
  angles = 2 * jnp.pi * jnp.outer(jnp.arange(32.0), jnp.arange(17.0)) / 32
  frames = inputs["wave"].reshape(4, 16, 32) * jnp.hanning(32)
  power = (frames @ jnp.cos(angles)) ** 2 + (frames @ jnp.sin(angles)) ** 2
  features = jnp.log(power + 1e-9)
  out = mlp(half, params, features / 10).mean(1)
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"features": features, "out": out})


@program(
  "transport: Sinkhorn's iterations as products with a kernel matrix",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {"a": rng.standard_normal((24, 8)), "b": rng.standard_normal((30, 8))},
)
def sinkhorn_by_products(half, params, inputs):
  a, b = mlp(half, params, inputs["a"]), mlp(half, params, inputs["b"])
  cost = jnp.sum((a[:, None] - b[None]) ** 2, -1)
  kernel = jnp.exp(-cost / 0.5)

  def step(_, carry):
    u, v = carry
    u = 1 / 24 / (kernel @ v)
    return u, 1 / 30 / (kernel.T @ u)

  u, v = jax.lax.fori_loop(0, 30, step, (jnp.ones(24), jnp.ones(30)))
  plan = u[:, None] * kernel * v[None]
  return Out(jnp.sum(plan * cost), plan)


@program(
  "sequences: a hidden Markov model by scaled products of probabilities",
  {"in": (8, 32), "out": (32, 5), "moves": (5, 5)},
  lambda rng: {"x": rng.standard_normal((80, 8))},
)
def scaled_forward(half, params, inputs):
  emission = jax.nn.softmax(mlp(half, params, inputs["x"]))
  moves = jax.nn.softmax(3 * params["moves"])

  def step(alpha, e):
    alpha = (alpha @ moves) * e
    total = alpha.sum()
    return alpha / total, (alpha / total, jnp.log(total))

  _, (alpha, logs) = jax.lax.scan(step, jnp.full(5, 0.2), emission)
  return Out(-logs.mean(), {"alpha": alpha, "logs": logs})


@program(
  "tagging: a CRF whose sums are products of exponentials, shifted by their maximum",
  {"in": (16, 32), "out": (32, 6), "pair": (6, 6)},
  lambda rng: {"x": rng.standard_normal((4, 40, 16)), "tags": rng.integers(0, 6, (4, 40))},
)
def crf_by_products(half, params, inputs):
  scores = mlp(half, params, inputs["x"])
  weights = jnp.exp(params["pair"])

  def step(alpha, score):
    top = alpha.max(-1, keepdims=True)
    return top + jnp.log(jnp.exp(alpha - top) @ weights) + score, None

  alpha, _ = jax.lax.scan(step, scores[:, 0], jnp.swapaxes(scores[:, 1:], 0, 1))
  gold = jnp.take_along_axis(scores, inputs["tags"][..., None], -1).sum((1, 2))
  gold = gold + params["pair"][inputs["tags"][:, :-1], inputs["tags"][:, 1:]].sum(-1)
  losses = jax.nn.logsumexp(alpha, -1) - gold
  return Out(losses.mean(), {"alpha": alpha, "losses": losses})


@program(
  "clusters: a step of expectation and maximisation of full Gaussians on features",
  {"in": (8, 32), "out": (32, 3)},
  lambda rng: {"x": rng.standard_normal((200, 8)), "means": rng.standard_normal((3, 3))},
)
def gaussian_mixture(half, params, inputs):
  z = 2 + mlp(half, params, inputs["x"])
  share = jax.nn.softmax(-jnp.sum((z[:, None] - 2 - inputs["means"]) ** 2, -1))  # [N, K]
  count = share.sum(0)
  means = share.T @ z / count[:, None]
  second = jnp.einsum("nk,ni,nj->kij", share, z, z) / count[:, None, None]
  covariance = second - means[:, :, None] * means[:, None] + 1e-2 * jnp.eye(3)
  log_p = jax.vmap(jax.scipy.stats.multivariate_normal.logpdf, (None, 0, 0))(z, means, covariance)
  evidence = jax.nn.logsumexp(log_p + jnp.log(count / 200)[:, None], 0)
  return Out(-evidence.mean(), {"means": means, "covariance": covariance, "evidence": evidence})


@program(
  "views: correlation analysis, a cross-covariance between inverse roots (deep CCA)",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {"a": rng.standard_normal((80, 8)), "noise": 0.5 * rng.standard_normal((80, 8))},
)
def correlation_analysis(half, params, inputs):
  def centred(x):
    z = mlp(half, params, x)
    return z - z.mean(0)

  def root(x):
    values, vectors = jnp.linalg.eigh(jnp.cov(x.T) + 1e-3 * jnp.eye(4))
    return (vectors * jax.lax.rsqrt(values)) @ vectors.T

  a, b = centred(inputs["a"]), centred(inputs["a"] + inputs["noise"])
  t = root(a) @ (a.T @ b / 79) @ root(b)
  return Out(-jnp.sum(t**2) / 100, t)


@program(
  "rotations: weights kept orthogonal by an exponential of a skew matrix",
  {"skew": (16, 16), "out": (16, 4)},
  lambda rng: {"x": rng.standard_normal((32, 16)), "y": rng.standard_normal((32, 4))},
)
def orthogonal_weights(half, params, inputs):
  turn = jax.scipy.linalg.expm(params["skew"] - params["skew"].T)
  away = turn.T @ turn - jnp.eye(16)
  out = half.dot(jnp.tanh(half.dot(inputs["x"], turn)), params["out"])
  return Out(jnp.mean((out - inputs["y"]) ** 2) + jnp.sum(away**2), {"out": out, "turn": turn})


@program(
  "molecules: a periodic cell, shifts of neighbours times its vectors, a steep repulsion",
  {"in": (12, 32), "out": (32, 1)},
  lambda rng: {
    "x": 3.5 * np.stack(np.meshgrid(*[np.arange(3)] * 3), -1).reshape(-1, 3)
    + 0.1 * rng.standard_normal((27, 3)),
    "cell": np.diag([10.5, 10.6, 10.4]) + 0.3 * rng.standard_normal((3, 3)),
    "pairs": rng.permutation([(i, j) for i in range(27) for j in range(27) if i != j])[:150].T,
  },
)
def periodic_cell(half, params, inputs):
  i, j = inputs["pairs"]

  def energy(x):
    apart = x[j] - x[i]
    shifts = -jnp.round(jax.lax.stop_gradient(apart @ jnp.linalg.inv(inputs["cell"])))
    apart = apart + shifts @ inputs["cell"]
    distance = jnp.sqrt(jnp.sum(apart**2, -1))
    features = jnp.exp(-4 * (distance[:, None] - jnp.linspace(2, 8, 12)) ** 2)
    return jnp.sum(mlp(half, params, features)) + jnp.sum((3.0 / distance) ** 12), (distance, shifts)

  forces, (distance, shifts) = jax.grad(energy, has_aux=True)(inputs["x"])
  return Out(jnp.mean(forces**2), {"forces": forces, "distance": distance}, shifts.astype(int))


@program(
  "scenes: rays of cameras by products with their poses, frequencies of points along them",
  {"in": (30, 32), "out": (32, 3)},
  lambda rng: {
    "pose": np.linalg.qr(rng.standard_normal((4, 3, 3)))[0],
    "centre": rng.uniform(-1, 1, (4, 3)),
    "pixels": rng.uniform(-1, 1, (16, 2)),
    "y": rng.random((4, 16, 3)),
  },
)
def camera_rays(half, params, inputs):
  directions = jnp.concatenate([inputs["pixels"], -jnp.ones((16, 1))], -1)
  rays = jnp.einsum("cij,nj->cni", inputs["pose"], directions)
  points = inputs["centre"][:, None, None] + jnp.linspace(1, 3, 6)[:, None] * rays[:, :, None]
  angles = (points[..., None, :] * 2.0 ** jnp.arange(5)[:, None]).reshape(4, 16, 6, 15)
  features = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
  colours = jax.nn.sigmoid(mlp(half, params, features)).mean(2)
  return Out(jnp.mean((colours - inputs["y"]) ** 2), {"colours": colours, "rays": rays})


@program(
  "images: an affine warp, a grid of pixels times matrices that are an input",
  {"in": (3, 3, 1, 4), "out": (4, 3)},
  lambda rng: {
    "x": rng.standard_normal((4, 12, 12)),
    "theta": np.eye(2) + 0.05 * rng.standard_normal((4, 2, 2)),
    "y": rng.integers(0, 3, 4),
  },
)
def affine_warp(half, params, inputs):
  grid = 200.0 + jnp.stack(jnp.meshgrid(jnp.arange(12.0), jnp.arange(12.0), indexing="ij"), -1)
  at = jnp.einsum("bij,hwj->bhwi", inputs["theta"], grid) - 200
  warp = lambda x, at: jax.scipy.ndimage.map_coordinates(
    x, list(jnp.moveaxis(at, -1, 0)), order=1, mode="wrap"
  )
  warped = jax.vmap(warp)(inputs["x"], at)
  logits = half.dot(jax.nn.relu(half.conv(warped[..., None], params["in"])).mean((1, 2)), params["out"])
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["y"][:, None], -1)
  return Out(losses.mean(), {"at": at, "warped": warped})


@program(
  "factors: non-negative factors by multiplicative updates, seeded by a network",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {"x": rng.standard_normal((20, 8)), "v": rng.random((20, 15)), "h": rng.random((4, 15))},
)
def nonnegative_factors(half, params, inputs):
  w = jax.nn.softplus(mlp(half, params, inputs["x"]))
  v = inputs["v"]

  def step(carry, _):
    w, h = carry
    h = h * (w.T @ v) / (w.T @ w @ h + 1e-9)
    w = w * (v @ h.T) / (w @ h @ h.T + 1e-9)
    return (w, h), None

  (w, h), _ = jax.lax.scan(step, (w, inputs["h"]), length=10)
  return Out(jnp.mean((w @ h - v) ** 2), {"w": w, "h": h})


@program(
  "planning: soft values of a table by iterations of a product with its moves",
  {"in": (4, 32), "out": (32, 1)},
  lambda rng: {"x": rng.standard_normal((30, 4)), "moves": rng.dirichlet(np.ones(30) / 5, (3, 30))},
)
def value_iteration(half, params, inputs):
  rewards = mlp(half, params, inputs["x"])[:, 0]

  def step(values, _):
    values = rewards + 0.98 * jnp.einsum("asn,n->as", inputs["moves"], values)
    return 0.1 * jax.nn.logsumexp(values / 0.1, axis=0), None

  values, _ = jax.lax.scan(step, jnp.zeros(30), length=200)
  return Out(jnp.mean(values) / 10, values)
