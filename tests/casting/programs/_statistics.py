"""Statistics: kernels and their factors, filters, transport, survival, mixtures."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, program


def mlp(half, params, x):
  return half.dot(jax.nn.gelu(half.dot(x, params["in"])), params["out"])


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
  "regression: a Gaussian process of inputs as they are, a linear and a squared kernel",
  {"scale": lambda rng: rng.standard_normal(8) / 4, "mean": (8, 1)},
  lambda rng: {"x": 3 + rng.standard_normal((40, 8)), "y": rng.standard_normal(40)},
)
def kernel_of_inputs(half, params, inputs):
  x = inputs["x"] * jnp.exp(params["scale"])
  square = jnp.sum(x**2, -1)
  distance = square[:, None] + square[None] - 2 * jnp.einsum("id,jd->ij", x, x)
  kernel = jnp.exp(-0.1 * distance) + 0.1 * jnp.eye(40)
  rest = inputs["y"] - half.dot(inputs["x"], params["mean"])[:, 0]
  weights = jnp.linalg.solve(kernel, rest)
  _, logdet = jnp.linalg.slogdet(kernel)
  return Out((rest @ weights + logdet) / 80, {"kernel": kernel, "weights": weights})


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
  "transport: Sinkhorn's iterations of log-sums over learnt costs",
  MLP,
  lambda rng: {"a": rng.standard_normal((24, 8)), "b": rng.standard_normal((30, 8))},
)
def sinkhorn(half, params, inputs):
  a, b = mlp(half, params, inputs["a"]), mlp(half, params, inputs["b"])
  cost = jnp.sum((a[:, None] - b[None]) ** 2, -1)

  def step(carry, _):
    f, g = carry
    f = -0.5 * jax.nn.logsumexp((g[None] - cost) / 0.5 - jnp.log(30.0), axis=1)
    g = -0.5 * jax.nn.logsumexp((f[:, None] - cost) / 0.5 - jnp.log(24.0), axis=0)
    return (f, g), None

  (f, g), _ = jax.lax.scan(step, (jnp.zeros(24), jnp.zeros(30)), length=40)
  plan = jnp.exp((f[:, None] + g[None] - cost) / 0.5) / (24 * 30)
  return Out(jnp.sum(plan * cost), {"f": f, "plan": plan})


@program(
  "survival: Cox's partial likelihood, sorted by time, risk sets by a cumulative log-sum",
  {"in": (8, 32), "out": (32, 1)},
  lambda rng: {
    "x": rng.standard_normal((80, 8)),
    "time": rng.exponential(size=80),
    "event": rng.random(80) < 0.7,
  },
)
def cox(half, params, inputs):
  order = jnp.argsort(-inputs["time"])
  risk = mlp(half, params, inputs["x"])[order, 0]
  below = jax.lax.cumlogsumexp(risk)
  event = inputs["event"][order]
  at_risk = jnp.cumsum(jnp.ones(80)) @ jnp.eye(80)
  return Out(
    -jnp.sum((risk - below) * event) / event.sum(),
    {"risk": risk, "below": below},
    {"order": order, "at_risk": at_risk.astype(int)},
  )


@program(
  "densities: a mixture whose weights, means and scales a network gives",
  {"in": (8, 32), "out": (32, 15)},
  lambda rng: {"x": rng.standard_normal((64, 8)), "y": 2 * rng.standard_normal((64, 1))},
)
def mixture_density(half, params, inputs):
  weights, means, scales = jnp.split(mlp(half, params, inputs["x"]), 3, -1)
  scales = jax.nn.softplus(scales) + 1e-3
  log_p = jax.scipy.stats.norm.logpdf(inputs["y"], 3 * means, scales)
  losses = -jax.nn.logsumexp(jax.nn.log_softmax(weights) + log_p, -1)
  return Out(losses.mean(), losses)


@program(
  "sequences: forward and backward of a hidden Markov model with a neural emission",
  {"in": (8, 32), "out": (32, 5), "moves": (5, 5)},
  lambda rng: {"x": rng.standard_normal((40, 8))},
)
def hidden_markov(half, params, inputs):
  emission = jax.nn.log_softmax(mlp(half, params, inputs["x"]))
  moves = jax.nn.log_softmax(3 * params["moves"])

  def forward(alpha, e):
    alpha = e + jax.nn.logsumexp(alpha[:, None] + moves, axis=0)
    return alpha, alpha

  def backward(beta, e):
    return jax.nn.logsumexp(moves + (e + beta)[None], axis=1), beta

  last, alpha = jax.lax.scan(forward, emission[0], emission[1:])
  _, beta = jax.lax.scan(backward, jnp.zeros(5), emission, reverse=True)
  posterior = jax.nn.softmax(alpha + beta[1:])
  return Out(-jax.nn.logsumexp(last) / 40, {"alpha": alpha, "posterior": posterior})


@program(
  "series: a soft alignment (soft-DTW) by a scan over rows",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {"a": rng.standard_normal((20, 8)), "b": rng.standard_normal((20, 8))},
)
def soft_alignment(half, params, inputs):
  a, b = mlp(half, params, inputs["a"]), mlp(half, params, inputs["b"])
  cost = jnp.sum((a[:, None] - b[None]) ** 2, -1)
  soft_min = lambda *x: -0.1 * jax.nn.logsumexp(-jnp.stack(x) / 0.1, axis=0)

  def row(above, costs):
    def cell(left, now):
      cost, up, corner = now
      left = cost + soft_min(left, up, corner)
      return left, left

    return (
      new := jnp.concatenate([jnp.full(1, 1e6), jax.lax.scan(cell, 1e6, (costs, above[1:], above[:-1]))[1]])
    ), new

  _, table = jax.lax.scan(row, jnp.array([0.0, *[1e6] * 20]), cost)
  return Out(table[-1, -1], table[:, 1:])


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


@program(
  "events: a self-exciting point process, its intensity by differences of times",
  {"in": (8, 32), "out": (32, 1), "decay": lambda rng: 0.5},
  lambda rng: {"x": rng.standard_normal((50, 8)), "times": 1e4 + rng.exponential(size=50).cumsum()},
)
def point_process(half, params, inputs):
  base = jax.nn.softplus(mlp(half, params, inputs["x"])[:, 0])
  gap = inputs["times"][:, None] - inputs["times"][None]
  decay = jax.nn.softplus(params["decay"])
  weights = jnp.where(gap > 0, jnp.exp(-decay * jnp.maximum(gap, 0)), 0)
  intensity = 0.1 + base + weights @ base
  whole = jnp.sum(base * (1 - jnp.exp(-decay * (inputs["times"][-1] - inputs["times"])))) / decay
  return Out(
    (whole - jnp.log(intensity).sum()) / 50, {"intensity": intensity, "gap": jnp.diff(inputs["times"])}
  )
