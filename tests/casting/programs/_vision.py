"""Vision: convolutions with batch statistics, segmentation, detection, registration, sound, poses."""

import jax
import jax.numpy as jnp

from tests.casting.programs._ideal import Out, program


def batch_norm(x, weights):
  """Over batch and pixels; the statistics, too."""
  mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
  return (x - mean) * jax.lax.rsqrt(var + 1e-5) * (1 + weights[0]) + weights[1], (mean, var)


@program(
  "images: a residual network, its batch statistics into running ones",
  {"stem": (3, 3, 3, 8), "a": (3, 3, 8, 8), "b": (3, 3, 8, 8), "head": (8, 5)}
  | {f"norm{i}": (2, 8) for i in range(3)},
  lambda rng: {
    "x": 2 + rng.standard_normal((8, 8, 8, 3)),
    "y": rng.integers(0, 5, 8),
    "running": rng.random((3, 2, 8)),
  },
)
def residual_network(half, params, inputs):
  x, first = batch_norm(half.conv(inputs["x"], params["stem"]), params["norm0"])
  x = jax.nn.relu(x)
  y, second = batch_norm(half.conv(x, params["a"]), params["norm1"])
  y, third = batch_norm(half.conv(jax.nn.relu(y), params["b"]), params["norm2"])
  logits = half.dot(jax.nn.relu(x + y).mean((1, 2)), params["head"])
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["y"][:, None], -1)[:, 0]
  running = 0.9 * inputs["running"] + 0.1 * jnp.stack([jnp.stack(s) for s in (first, second, third)])
  return Out(losses.mean(), {"logits": logits, "running": jax.lax.stop_gradient(running)})


@program(
  "images: segmentation by a small U-Net, a Dice and a focal loss, classes counted by a product",
  {"down": (3, 3, 3, 8), "deep": (3, 3, 8, 16), "up": (3, 3, 24, 8), "out": (1, 1, 8, 3)},
  lambda rng: {"x": rng.standard_normal((4, 16, 16, 3)), "y": rng.integers(0, 3, (4, 16, 16))},
)
def segmentation(half, params, inputs):
  a = jax.nn.relu(half.conv(inputs["x"], params["down"]))
  pooled = jax.lax.reduce_window(a, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
  b = jax.nn.relu(half.conv(pooled, params["deep"]))
  b = jax.image.resize(b, (4, 16, 16, 16), "bilinear")
  c = jax.nn.relu(half.conv(jnp.concatenate([a, b], -1), params["up"]))
  logits = half.conv(c, params["out"])
  p, y = jax.nn.softmax(logits), jax.nn.one_hot(inputs["y"], 3)
  dice = 1 - (2 * jnp.sum(p * y, (1, 2)) + 1) / (jnp.sum(p + y, (1, 2)) + 1)
  focal = -jnp.sum((1 - p) ** 2 * y * jax.nn.log_softmax(logits), -1)
  counts = y.reshape(-1, 3).T @ y.reshape(-1, 3)
  return Out(dice.mean() + focal.mean(), {"dice": dice, "focal": focal}, counts.astype(int))


@program(
  "images: boxes of anchors, a generalised overlap, kept by non-maximum suppression of given scores",
  {"in": (8, 32), "out": (32, 4)},
  lambda rng: {
    "x": rng.standard_normal((40, 8)),
    "anchors": rng.uniform(0, 1000, (40, 2)),
    "target": rng.uniform(0, 1000, (40, 2)),
    "scores": rng.random(40),
  },
)
def boxes(half, params, inputs):
  def corners(centre, size):
    return centre - size / 2, centre + size / 2

  def overlap(a, b):
    area = lambda low, high: jnp.prod(jnp.maximum(high - low, 0), -1)
    inside = area(jnp.maximum(a[0], b[0]), jnp.minimum(a[1], b[1]))
    union = area(*a) + area(*b) - inside
    hull = area(jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))
    return inside / union - (hull - union) / hull, inside / union

  move, grow = jnp.split(half.dot(jax.nn.relu(half.dot(inputs["x"], params["in"])), params["out"]), 2, -1)
  found = corners(inputs["anchors"] + 20 * move, 200 * jnp.exp(0.3 * grow))
  score, _ = overlap(found, corners(inputs["target"], 200))
  given = corners(inputs["anchors"], 200)
  _, pairs = overlap([x[:, None] for x in given], [x[None] for x in given])
  order = jnp.argsort(-inputs["scores"])
  pairs = pairs[order][:, order]

  def keep(i, kept):
    return kept.at[i].set(~jnp.any(kept & (jnp.arange(40) < i) & (pairs[i] > 0.1)))

  kept = jax.lax.fori_loop(0, 40, keep, jnp.zeros(40, bool))
  return Out(jnp.mean(1 - score), {"score": score, "move": move}, {"kept": kept.astype(int), "order": order})


@program(
  "images: warped by a learnt flow, bilinear by gathers, a smoothness of differences",
  {"in": (3, 3, 2, 8), "flow": (3, 3, 8, 2)},
  lambda rng: {"a": rng.standard_normal((16, 16)), "b": rng.standard_normal((16, 16))},
)
def registration(half, params, inputs):
  both = jnp.stack([inputs["a"], inputs["b"]], -1)[None]
  flow = 2 * jnp.tanh(half.conv(jnp.tanh(half.conv(both, params["in"])), params["flow"]))[0]
  grid = jnp.stack(jnp.meshgrid(jnp.arange(16.0), jnp.arange(16.0), indexing="ij"), -1)
  at = jnp.moveaxis(grid + flow, -1, 0)
  warped = jax.scipy.ndimage.map_coordinates(inputs["a"], list(at), order=1, mode="nearest")
  smooth = jnp.mean(jnp.diff(flow, axis=0) ** 2) + jnp.mean(jnp.diff(flow, axis=1) ** 2)
  return Out(jnp.mean((warped - inputs["b"]) ** 2) + 0.1 * smooth, {"flow": flow, "warped": warped})


@program(
  "sound: a log-mel spectrogram by FFT and a filter bank, a convolution after it",
  {"conv": (1, 5, 8, 8), "out": (8, 4)},
  lambda rng: {
    "wave": rng.standard_normal((2, 1024)),
    "filters": rng.random((33, 8)) / 10,
    "y": rng.integers(0, 4, 2),
  },
)
def spectrogram(half, params, inputs):
  at = jnp.arange(0, 1024 - 64, 32)[:, None] + jnp.arange(64)
  frames = inputs["wave"][:, at] * jnp.hanning(64)
  power = jnp.abs(jnp.fft.rfft(frames)) ** 2
  features = jnp.log(half.dot(power, inputs["filters"]) + 1e-6)
  features = (features - features.mean()) / features.std()
  hidden = jax.nn.gelu(half.conv(features[:, None], params["conv"]))
  logits = half.dot(hidden.mean((1, 2)), params["out"])
  losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), inputs["y"][:, None], -1)
  return Out(losses.mean(), hidden)


@program(
  "robots: poses aligned by an SVD (Kabsch), features weighted by a network",
  {"in": (3, 32), "out": (32, 1)},
  lambda rng: {
    "a": rng.standard_normal((30, 3)),
    "b": rng.standard_normal((30, 3)) / 3,
    "order": rng.permutation(3),
  },
)
def aligned_poses(half, params, inputs):
  a = inputs["a"]
  b = a[:, inputs["order"]] + inputs["b"]
  weight = jax.nn.softmax(half.dot(jnp.tanh(half.dot(a - b, params["in"])), params["out"])[:, 0])[:, None]
  a0, b0 = a - jnp.sum(weight * a, 0), b - jnp.sum(weight * b, 0)
  u, _, vt = jnp.linalg.svd((weight * a0).T @ b0)
  sign = jnp.ones(3).at[2].set(jnp.sign(jnp.linalg.det(u @ vt)))
  turn = (u * sign) @ vt
  return Out(jnp.mean((a0 @ turn - b0) ** 2), {"turn": turn, "weight": weight})
