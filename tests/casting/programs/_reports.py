"""What users reported as wrong in silence, each kind as it is, in a loop, under `vmap` or on a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from tests.casting.programs._ideal import Out, program


def on_devices(fun, *by_rows):
  """Runs a jitted function with its first arguments whole, and those `by_rows` divided over devices."""
  n = min(len(jax.devices()), 4)
  mesh = jax.make_mesh((n,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  specs = tuple(P("rows") if rows else P() for rows in by_rows)
  return jax.jit(jax.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("rows")))


# Sums of cotangents of an activation: one for each edge, and one for each step.
GRAPH = {"in": (16, 12), "out": (12, 8)}


def graph(rng):
  edges = 4096
  return {
    "x": rng.standard_normal((16, 16)),
    "sender": rng.integers(0, 16, edges),
    "receiver": rng.integers(0, 64, edges),
    "weight": rng.uniform(0.5, 1.5, edges),
  }


def of_messages(half, params, inputs, messages):
  total = jax.ops.segment_sum(messages, inputs["receiver"], 64) / 64
  out = half.dot(total, params["out"])
  return Out(jnp.mean((out - 1) ** 2), out)


@program("graphs: 256 edges a node, its features looked up for each, mapped over edges", GRAPH, graph)
def edges_of_nodes_mapped(half, params, inputs):
  features = jnp.tanh(half.dot(inputs["x"], params["in"]))
  look_up = jax.vmap(lambda node, weight: jnp.take(features, node, axis=0) * weight)
  return of_messages(half, params, inputs, look_up(inputs["sender"], inputs["weight"]))


@program("graphs: the same, edges divided over devices", GRAPH, graph)
def edges_of_nodes_on_devices(half, params, inputs):
  features = jnp.tanh(half.dot(inputs["x"], params["in"]))
  look_up = on_devices(lambda f, node, weight: f[node] * weight[:, None], False, True, True)
  return of_messages(half, params, inputs, look_up(features, inputs["sender"], inputs["weight"]))


def queries(rng):
  return {"x": rng.standard_normal((24, 16)), "queries": 0.3 * rng.standard_normal((1024, 12))}


def read_memory(half, memory, query):
  return half.dot(jax.nn.softmax(half.dot(memory, query[:, None])[:, 0])[None], memory)[0]


@program("language: a memory that each of 1024 steps of a scan reads", GRAPH, queries)
def memory_of_a_decoder(half, params, inputs):
  memory = jnp.tanh(half.dot(inputs["x"], params["in"]))
  step = lambda carry, query: (carry, read_memory(half, memory, query))
  _, found = jax.lax.scan(step, 0.0, inputs["queries"])
  return Out(jnp.mean((half.dot(found, params["out"]) - 1) ** 2), found)


@program("fields: one code that 256 queries in turn multiply", {"in": (16, 12)}, queries)
def code_of_many_uses(half, params, inputs):
  code = jnp.tanh(half.dot(inputs["x"], params["in"]))
  loss = sum(jnp.tanh(code * (1 + query)).sum() for query in inputs["queries"][:256]) / 256
  return Out(loss, code)


# Float32 data and a small half-precision result, which layers read, too.
def anchors(rng):
  centre = rng.uniform(0, 1280, (64, 2))
  corners = np.concatenate([centre - 8, centre + 8], -1)
  return {
    "x": rng.standard_normal((64, 16)),
    "boxes": corners,
    "truth": corners + rng.standard_normal((64, 4)),
  }


BOXES = {"w": (2, 20, 32), "o": lambda rng: 0.3 * rng.standard_normal((2, 32, 4))}


def overlap(a, b):
  side = jnp.maximum(jnp.minimum(a[:, 2:], b[:, 2:]) - jnp.maximum(a[:, :2], b[:, :2]), 0)
  inter = side[:, 0] * side[:, 1]
  area = lambda z: (z[:, 2] - z[:, 0]) * (z[:, 3] - z[:, 1])
  return inter / (area(a) + area(b) - inter + 1e-9)


def refined(half, w, o, x, boxes):
  """A second stage: boxes, and what a network adds to them."""
  return boxes + half.dot(jax.nn.relu(half.dot(jnp.concatenate([x, boxes / 1280], -1), w)), o)


@program("detection: boxes in pixels, refined twice, in a scan over the stages", BOXES, anchors)
def boxes_refined_in_a_scan(half, params, inputs):
  def stage(boxes, weights):
    boxes = refined(half, *weights, inputs["x"], boxes)
    return boxes, 1 - overlap(boxes, inputs["truth"]).mean()

  boxes, losses = jax.lax.scan(stage, inputs["boxes"], (params["w"], params["o"]))
  return Out(losses.sum(), boxes)


@program("detection: the same on devices, boxes divided", BOXES, anchors)
def boxes_refined_on_devices(half, params, inputs):
  stage = on_devices(functools.partial(refined, half), False, False, True, True)
  first = stage(params["w"][0], params["o"][0], inputs["x"], inputs["boxes"])
  second = stage(params["w"][1], params["o"][1], inputs["x"], first)
  return Out(2 - overlap(first, inputs["truth"]).mean() - overlap(second, inputs["truth"]).mean(), second)


@program(
  "diffusion: a denoised image of little noise, which a network of features reads, too",
  {"a": (32, 48), "b": (48, 32), "features": (32, 16)},
  lambda rng: {"image": 0.5 * rng.standard_normal((64, 32)), "noise": rng.standard_normal((64, 32))},
)
def denoised(half, params, inputs):
  sigma, data = 0.005, 0.5
  total = (sigma**2 + data**2) ** 0.5
  x = inputs["image"] + sigma * inputs["noise"]
  made = half.dot(jax.nn.silu(half.dot(x / total, params["a"])), params["b"])
  found = (data / total) ** 2 * x + sigma * data / total * made
  of_features = half.dot(found - inputs["image"], params["features"])
  loss = ((total / (sigma * data)) * (found - inputs["image"])) ** 2
  return Out(loss.mean() + 0.1 * (of_features**2).mean(), found)


def samples(rng):
  return {
    "x": rng.standard_normal((64, 16)),
    "at": rng.uniform(size=64),
    "map": rng.standard_normal((160, 8)),
  }


@program(
  "attention that samples a map at points that it moves, mapped over queries",
  {"offset": (16, 4), "value": (8, 8), "out": (8, 8)},
  samples,
)
def sampled_points(half, params, inputs):
  width = inputs["map"].shape[0]
  value = half.dot(jnp.sin(inputs["map"]), params["value"])

  def sample(at, offset):
    points = (at + offset / width) * width - 0.5
    left = jnp.floor(points)
    i = jnp.clip(left.astype(int), 0, width - 2)
    part = (points - left)[:, None]
    return (value[i] * (1 - part) + value[i + 1] * part).mean(0)

  out = half.dot(jax.vmap(sample)(inputs["at"], half.dot(inputs["x"], params["offset"])), params["out"])
  return Out(jnp.mean((out - 1) ** 2), out)


# Filters that a program closes over as arrays of NumPy.
ROW = np.exp(-((np.arange(7) - 3.0) ** 2) / 4.5)
WINDOW = np.asarray(np.outer(ROW, ROW) / ROW.sum() ** 2, np.float32)[:, :, None, None]
BANK = np.maximum(0, 1 - np.abs(np.arange(33.0)[:, None] - np.linspace(0, 32, 8)) / 6).astype(np.float32)
TAPS = (ROW / ROW.sum()).astype(np.float32)[:, None, None]


def blurred(x):
  return jax.lax.conv_general_dilated(x, WINDOW, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def likeness(a, b):
  """SSIM of images [N, H, W, 1]."""
  ma, mb = blurred(a), blurred(b)
  va, vb, cab = blurred(a * a) - ma * ma, blurred(b * b) - mb * mb, blurred(a * b) - ma * mb
  return ((2 * ma * mb + 1e-4) * (2 * cab + 9e-4)) / ((ma * ma + mb * mb + 1e-4) * (va + vb + 9e-4))


def pictures(rng):
  smooth = 0.7 + 0.1 * np.sin(np.arange(20) / 9)[:, None] + 0.05 * np.cos(np.arange(20) / 7)
  target = (smooth + 0.05 * rng.standard_normal((4, 20, 20)))[..., None]
  return {"x": target + 0.05 * rng.standard_normal(target.shape), "target": target}


@program("images: likeness of a network's image, by a constant window", {"w": (20, 20)}, pictures)
def likeness_of_images(half, params, inputs):
  image = inputs["x"] + 0.1 * jnp.tanh(half.dot(inputs["x"][..., 0], params["w"]))[..., None]
  return Out(1 - likeness(image, inputs["target"]).mean(), likeness(inputs["x"], inputs["target"]))


def frames(rng):
  return {"frames": 3 * rng.standard_normal((32, 33))}


def log_mel(frame):
  """Logarithms of the power in bands: 1e6 and more, beyond float16."""
  return jnp.log(jnp.maximum((1000 * frame) ** 2 @ BANK, 1e-10)) - 15


@program("speech: a bank of filters before a layer, on devices, frames divided", {"w": (8, 8)}, frames)
def filter_bank_on_devices(half, params, inputs):
  mel = on_devices(log_mel, True)(inputs["frames"])
  return Out(jnp.mean((half.dot(mel, params["w"]) - 1) ** 2), mel)


@program(
  "signals: a smoothing filter straight before a layer, mapped over channels",
  {"w": (26, 8)},
  lambda rng: {"x": 5 + rng.standard_normal((16, 32, 3)), "y": rng.standard_normal((3, 16, 8))},
)
def smoothed_signals(half, params, inputs):
  smooth = lambda x: jax.lax.conv_general_dilated(
    x[..., None], TAPS, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
  )[..., 0]
  signal = jax.vmap(smooth, -1)(inputs["x"])
  return Out(jnp.mean((half.dot(signal - 5, params["w"]) - inputs["y"]) ** 2), signal)


# A product that contracts one element multiplies: a schedule that maps a time to a number.
SCHEDULE = {"scale": (1, 1), "shift": (1,), "first": (8, 16), "last": (16, 8)}


def times(rng):
  return {"x": rng.standard_normal((32, 8)), "t": rng.uniform(size=32)}


def gamma(params, t):
  return -10 + 15 * (t[:, None] @ jnp.abs(params["scale"]) + params["shift"])


def of_schedule(half, params, inputs, g):
  made = half.dot(jnp.tanh(half.dot(inputs["x"] * jax.nn.sigmoid(-g), params["first"])), params["last"])
  return Out(jnp.mean((made - inputs["x"]) ** 2 * jax.nn.sigmoid(g)), {"gamma": g, "made": made})


@program("diffusion: a learned schedule, a layer from one number to one, mapped over times", SCHEDULE, times)
def learned_schedule_mapped(half, params, inputs):
  mapped = jax.vmap(lambda t: gamma(params, t[None])[0])(inputs["t"])
  return of_schedule(half, params, inputs, mapped)
