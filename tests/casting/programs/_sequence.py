"""Sequences: alignment, recurrence, state spaces, experts, adapters."""

import jax
import jax.numpy as jnp
import optax

from tests.casting.programs._ideal import Out, program


@program(
  "speech: CTC after a layer",
  {"in": (16, 24), "out": (24, 12)},
  lambda rng: {"x": 3 * rng.standard_normal((8, 30, 16)), "labels": rng.integers(1, 12, (8, 8))},
)
def ctc(half, params, inputs):
  logits = 4 * half.dot(jnp.tanh(half.dot(inputs["x"], params["in"])), params["out"])
  losses = optax.ctc_loss(
    logits, jnp.zeros(logits.shape[:2]), inputs["labels"], jnp.zeros(inputs["labels"].shape)
  )
  # The loss of a frame is what a fault of rounding shows in; a whole loss is large.
  return Out(losses.mean(), {"losses": losses, "frames": jax.nn.log_softmax(logits)})


@program(
  "speech: a GRU whose length differs, by while_loop",
  {"in": (16, 96), "hidden": (32, 96)},
  lambda rng: {"x": rng.standard_normal((16, 4, 16)), "length": rng.integers(8, 17)},
)
def gru_of_some_steps(half, params, inputs):
  def cell(i, hidden):
    x = jax.lax.dynamic_index_in_dim(inputs["x"], i, keepdims=False)
    a, b = half.dot(x, params["in"]), half.dot(hidden, params["hidden"])
    (ar, az, an), (br, bz, bn) = jnp.split(a, 3, -1), jnp.split(b, 3, -1)
    update = jax.nn.sigmoid(az + bz)
    return (1 - update) * jnp.tanh(an + jax.nn.sigmoid(ar + br) * bn) + update * hidden

  def step(hidden, i):
    return jax.lax.cond(i < inputs["length"], lambda h: cell(i, h), lambda h: h, hidden), None

  hidden, _ = jax.lax.scan(step, jnp.zeros((4, 32)), jnp.arange(16))
  loop = jax.lax.while_loop(
    lambda c: c[0] < inputs["length"], lambda c: (c[0] + 1, cell(*c)), (0, jnp.zeros((4, 32)))
  )
  return Out(jnp.sum(hidden**2), {"scan": hidden, "while": jax.lax.stop_gradient(loop[1])}, loop[0])


@program(
  "signals: a dense state space near the identity, by scan",
  {"in": (4, 16), "out": (16, 4), "skew": (16, 16)},
  lambda rng: {"x": rng.standard_normal((200, 4)), "y": rng.standard_normal((200, 4))},
)
def dense_state_space(half, params, inputs):
  skew = params["skew"] - params["skew"].T
  move = jnp.eye(16) + 0.002 * (skew - jnp.eye(16))

  def step(state, u):
    state = move @ state + 0.05 * u
    return state, state

  _, states = jax.lax.scan(step, jnp.ones(16), half.dot(inputs["x"], params["in"]))
  out = half.dot(states, params["out"])
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"states": states, "out": out})


@program(
  "language: linear attention, sums of outer products in a scan",
  {"q": (16, 16), "k": (16, 16), "v": (16, 16)},
  lambda rng: {"x": rng.standard_normal((64, 2, 16)), "y": rng.standard_normal((64, 2, 16))},
)
def linear_attention(half, params, inputs):
  q, k, v = (half.dot(inputs["x"], params[name]) for name in "qkv")
  q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1

  def step(carry, token):
    state, norm = carry
    q, k, v = token
    state = state + jnp.einsum("bi,bj->bij", k, v)
    norm = norm + k
    out = half.einsum("bi,bij->bj", q, state) / jnp.sum(q * norm, -1, keepdims=True)
    return (state, norm), out

  (state, norm), out = jax.lax.scan(step, (jnp.zeros((2, 16, 16)), jnp.zeros((2, 16))), (q, k, v))
  return Out(jnp.mean((out - inputs["y"]) ** 2), {"state": state, "norm": norm, "out": out})


@program(
  "language: experts with a capacity, chosen by hashed ids, places counted by a triangular product",
  {"up": (2, 16, 32), "down": (2, 32, 16), "router": (16, 2)},
  lambda rng: {
    "x": rng.standard_normal((600, 16)),
    "ids": rng.integers(0, 9999, 600),
    "y": rng.standard_normal((600, 16)),
  },
)
def experts_with_capacity(half, params, inputs):
  n, capacity = 600, 290
  chosen = jax.nn.one_hot(inputs["ids"] % 2, 2)  # [N, E]
  place = (jnp.tril(jnp.ones((n, n))) @ chosen - 1) * chosen  # how many came before
  kept = chosen * (place < capacity)
  slots = kept[:, :, None] * jax.nn.one_hot(place.astype(int), capacity)  # [N, E, C]
  gate = jnp.einsum("ne,ne->n", jax.nn.softmax(half.dot(inputs["x"], params["router"])), chosen)
  rows = half.einsum("nec,nd->ecd", slots, inputs["x"])
  hidden = jax.nn.gelu(half.einsum("ecd,edh->ech", rows, params["up"]))
  out = half.einsum("nec,ecd->nd", slots, half.einsum("ech,ehd->ecd", hidden, params["down"])) * gate[:, None]
  load = jnp.einsum("ne->e", kept)
  slot = jnp.einsum("ne,ne->n", place, chosen)
  discrete = {"place": slot.astype(int), "load": load.astype(int)}
  return Out(jnp.mean((out - inputs["y"]) ** 2), out, discrete)


@program(
  "language: low-rank adapters beside frozen weights",
  {"a": (32, 4), "b": lambda rng: rng.standard_normal((4, 32)) * 0.2},
  lambda rng: {
    "w": rng.standard_normal((32, 32)) / 32**0.5,
    "x": rng.standard_normal((32, 32)),
    "y": rng.standard_normal((32, 32)),
  },
)
def low_rank_adapters(half, params, inputs):
  frozen = jax.lax.stop_gradient(inputs["w"])
  out = half.dot(inputs["x"], frozen) + 2.0 * half.dot(half.dot(inputs["x"], params["a"]), params["b"])
  merged = half.dot(inputs["x"], frozen + 2.0 * params["a"] @ params["b"])
  return Out(
    jnp.mean((jnp.tanh(out) - inputs["y"]) ** 2), {"out": out, "merged": jax.lax.stop_gradient(merged)}
  )
