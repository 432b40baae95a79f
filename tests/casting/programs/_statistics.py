"""Statistics: kernels, filters, matching."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, mlp, program

MLP = {"in": (8, 32), "out": (32, 4)}


@program(
  "regression: a Gaussian process on learnt features, its evidence by Cholesky",
  {**MLP, "noise": lambda rng: -1.0},
  lambda rng: {"x": rng.standard_normal((40, 8)), "y": rng.standard_normal(40)},
)
def deep_kernel(half, params, inputs):
  z = mlp(half, params, inputs["x"])
  square = jnp.sum(z**2, -1)
  distance = jnp.maximum(square[:, None] + square[None] - 2 * z @ z.T, 0)
  kernel = jnp.exp(-0.5 * distance) + jnp.exp(params["noise"]) * jnp.eye(40)
  factor = jax.scipy.linalg.cho_factor(kernel, lower=True)
  weights = jax.scipy.linalg.cho_solve(factor, inputs["y"])
  evidence = -0.5 * inputs["y"] @ weights - jnp.sum(jnp.log(jnp.diag(factor[0])))
  return Out(-evidence / 40, {"kernel": kernel, "weights": weights})


@program(
  "tracking: a Kalman filter over encoded observations",
  {"in": (8, 32), "out": (32, 2), "noise": lambda rng: -1.0},
  lambda rng: {"x": rng.standard_normal((60, 8))},
)
def kalman_filter(half, params, inputs):
  move = jnp.array([[1.0, 0, 0.1, 0], [0, 1, 0, 0.1], [0, 0, 1, 0], [0, 0, 0, 1]])
  see = jnp.eye(2, 4)
  noise = jnp.exp(params["noise"]) * jnp.eye(2)

  def step(carry, y):
    mean, covariance = carry
    mean, covariance = move @ mean, move @ covariance @ move.T + 0.01 * jnp.eye(4)
    innovation = y - see @ mean
    s = see @ covariance @ see.T + noise
    gain = jnp.linalg.solve(s, see @ covariance).T
    mean = mean + gain @ innovation
    covariance = (jnp.eye(4) - gain @ see) @ covariance
    log_p = -0.5 * innovation @ jnp.linalg.solve(s, innovation) - 0.5 * jnp.linalg.slogdet(s)[1]
    return (mean, covariance), (mean, log_p)

  y = mlp(half, params, inputs["x"])
  (_, covariance), (means, log_p) = jax.lax.scan(step, (jnp.zeros(4), jnp.eye(4)), y)
  return Out(-log_p.mean(), {"means": means, "covariance": covariance, "log_p": log_p})


@program(
  "detection: boxes matched by the Hungarian algorithm, a set loss",
  {"in": (8, 32), "boxes": (32, 4), "classes": (32, 6)},
  lambda rng: {
    "x": rng.standard_normal((10, 8)),
    "anchors": rng.random((10, 4)),
    "boxes": rng.random((6, 4)),
    "labels": rng.integers(0, 6, 6),
  },
)
def set_matching(half, params, inputs):
  hidden = jax.nn.gelu(half.dot(inputs["x"], params["in"]))
  boxes = inputs["anchors"] + 0.1 * jnp.tanh(half.dot(hidden, params["boxes"]))
  logits = half.dot(hidden, params["classes"])
  costs = jnp.abs(inputs["anchors"][:, None] - inputs["boxes"][None]).sum(-1)
  rows, columns = optax.assignment.hungarian_algorithm(costs)
  distance = jnp.abs(boxes[rows] - inputs["boxes"][columns]).sum(-1)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits[rows], inputs["labels"][columns])
  return Out(
    (distance + losses).mean(), {"distance": distance, "losses": losses}, {"rows": rows, "columns": columns}
  )
