"""Positions in transformers, as people spell them: angles as products, in loops, calls and on devices."""

import jax
import jax.numpy as jnp

from tests.casting.programs._ideal import Out, program

T, D, FIRST = 24, 32, 3000  # the rows of a long text that a window sees
QKV = {"q": (D, D), "k": (D, D), "v": (D, D)}


def embedded(rng):
  return {"x": rng.standard_normal((2, T, D)), "y": rng.standard_normal((2, T, D))}


def attend(half, q, k, v, bias=0.0):
  """Causal attention of one head: [B, T, D]."""
  scores = half.einsum("bqd,bkd->bqk", q, k) * q.shape[-1] ** -0.5 + bias
  scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
  return half.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v)


def rotate(x, angles):
  """Turns pairs of features by angles [T, D / 2]."""
  a, b = jnp.split(x, 2, -1)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def frequencies(d=D):
  return 1.0 / 10000 ** (jnp.arange(0, d, 2, dtype=jnp.float32) / d)


def rotary_attention(half, params, inputs, angles):
  q, k, v = (half.dot(inputs["x"], params[name]) for name in "qkv")
  q, k = rotate(q, angles), rotate(k, angles)
  out = attend(half, q, k, v)
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"q": q, "out": out})


@program("language: rotary positions, angles by einsum", QKV, embedded)
def rotary_by_einsum(half, params, inputs):
  positions = jnp.arange(FIRST, FIRST + T, dtype=jnp.float32)
  return rotary_attention(half, params, inputs, jnp.einsum("i,j->ij", positions, frequencies()))


@program("language: rotary positions of a decoder's scan with a cache, an angle at a step", QKV, embedded)
def rotary_in_a_decoding_scan(half, params, inputs):
  def step(cache, token):
    at, x = token
    angle = jnp.einsum("i,j->ij", (FIRST + at[None]).astype(jnp.float32), frequencies())  # [1, D / 2]
    q, k, v = (half.dot(x, params[name]) for name in "qkv")
    cache = {"k": cache["k"].at[:, at].set(rotate(k[:, None], angle)[:, 0]), "v": cache["v"].at[:, at].set(v)}
    scores = half.einsum("bd,bkd->bk", rotate(q[:, None], angle)[:, 0], cache["k"]) * D**-0.5
    scores = jnp.where(jnp.arange(T) <= at, scores, -1e9)
    return cache, half.einsum("bk,bkd->bd", jax.nn.softmax(scores), cache["v"])

  empty = {"k": jnp.zeros((2, T, D)), "v": jnp.zeros((2, T, D))}
  cache, out = jax.lax.scan(step, empty, (jnp.arange(T), jnp.swapaxes(inputs["x"], 0, 1)))
  return Out(jnp.mean((jnp.swapaxes(out, 0, 1) - inputs["y"]) ** 2), {"out": out, "k": cache["k"]})


@program(
  "language: sinusoidal positions by dot, and a clock of the diffusion's kind",
  {"in": (D, D), "clock": (D, D)},
  lambda rng: {**embedded(rng), "t": rng.integers(0, 1000, (2,))},
)
def sinusoidal_positions(half, params, inputs):
  def table(positions):
    angles = jnp.dot(positions.astype(jnp.float32)[:, None], frequencies()[None, :])
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)

  clock = jax.nn.silu(half.dot(table(inputs["t"]), params["clock"]))
  out = half.dot(inputs["x"] + table(FIRST + jnp.arange(T)), params["in"]) + clock[:, None]
  return Out(jnp.mean((out - inputs["y"]) ** 2), out)


@program(
  "language: rotary positions stretched by a cond on the length, in a jitted function of its own",
  QKV,
  lambda rng: {**embedded(rng), "length": rng.integers(1000, 5000)},
)
def rotary_behind_a_cond(half, params, inputs):
  @jax.jit
  def angles(length):
    positions = (length - T + jnp.arange(T)).astype(jnp.float32)
    stretched = lambda: jnp.tensordot(positions / 4, frequencies() ** 1.1, axes=0)
    return jax.lax.cond(length > 2000, stretched, lambda: jnp.tensordot(positions, frequencies(), axes=0))

  return rotary_attention(half, params, inputs, angles(inputs["length"]))


@program("language: rotary positions in a function with a derivative rule of its own", QKV, embedded)
def rotary_with_a_rule(half, params, inputs):
  def angles():
    return jnp.arange(FIRST, FIRST + T, dtype=jnp.float32)[:, None] @ frequencies()[None]

  @jax.custom_vjp
  def turned(x):
    return rotate(x, angles())

  turned.defvjp(lambda x: (turned(x), None), lambda _, g: (rotate(g, -angles()),))
  q, k, v = (half.dot(inputs["x"], params[name]) for name in "qkv")
  q, k = turned(q), turned(k)
  out = attend(half, q, k, v)
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"q": q, "out": out})


@program("language: rotary positions of rows divided over devices, from the device's place", QKV, embedded)
def rotary_over_devices(half, params, inputs):
  n = min(2, jax.device_count())
  mesh = jax.make_mesh((n,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
  rows, whole = jax.P(None, "rows"), jax.P()

  def turned(x):  # [B, T / n, D]
    here = FIRST + jax.lax.axis_index("rows") * (T // n) + jnp.arange(T // n)
    return rotate(x, jnp.einsum("i,j->ij", here.astype(jnp.float32), frequencies()))

  def layer(params, x):
    q, k, v = (half.dot(x, params[name]) for name in "qkv")
    return turned(q), turned(k), v

  layer = jax.shard_map(layer, mesh=mesh, in_specs=(whole, rows), out_specs=(rows, rows, rows))
  q, k, v = layer(params, inputs["x"])
  out = attend(half, q, k, v)
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"q": q, "out": out})


@program(
  "language: generation by a while_loop until an end that a table draws, positions from its counter",
  QKV,
  lambda rng: {
    "table": rng.standard_normal((50, 50)),
    "embed": rng.standard_normal((50, D)),
    "y": rng.standard_normal(D),
  },
)
def generation_until_an_end(half, params, inputs):
  def step(carry):
    i, token, tokens, states = carry
    x = inputs["embed"][token]
    angle = jnp.einsum("i,j->ij", jnp.atleast_1d(FIRST + i).astype(jnp.float32), frequencies())
    states = states.at[i].set(rotate(half.dot(x, params["q"])[None], angle)[0])
    token = jnp.argmax(inputs["table"][token] - 10 * (jnp.arange(50) == token))
    return i + 1, token, tokens.at[i].set(token), states

  start = 0, jnp.zeros((), int), jnp.full(T, -1), jnp.zeros((T, D))
  length, _, tokens, states = jax.lax.while_loop(lambda c: (c[0] < T) & (c[1] != 49), step, start)
  x = inputs["embed"][tokens]
  loss = jnp.mean((half.dot(x, params["k"]) + half.dot(x, params["v"]) - inputs["y"]) ** 2)
  return Out(loss, jax.lax.stop_gradient(states), {"length": length, "tokens": tokens})
