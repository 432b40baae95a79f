"""Sampling and search: draws and ids that come from float32 alone, beside models in half precision; a sequence's ratio."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.casting.programs._ideal import Out, program

V, D = 600, 16
MODEL = {"embed": lambda rng: rng.standard_normal((V, D)), "up": (D, 32), "out": (32, V)}


def log_probs(half, params, tokens):
  return jax.nn.log_softmax(
    half.dot(jnp.tanh(half.dot(params["embed"][tokens], params["up"])), params["out"])
  )


def of(log_probs, tokens):
  return jnp.take_along_axis(log_probs, tokens[..., None], -1)[..., 0]


def tables(rng):
  """Logits as a service gives them, ids, and a key."""
  logits = 3 * rng.standard_normal((8, V))
  return {"logits": logits, "tokens": rng.integers(0, V, (8, 6)), "seed": rng.integers(0, 2**31)}


@program("language: top-p sampling from logits that are an input, scored by a model", MODEL, tables)
def top_p_sampling(half, params, inputs):
  order = jnp.argsort(-inputs["logits"])
  sorted_logits = jnp.take_along_axis(inputs["logits"], order, -1)
  mass = jnp.cumsum(jax.nn.softmax(sorted_logits), -1)
  size = jnp.sum(mass < 0.9, -1) + 1
  kept = jnp.where(jnp.arange(V) < size[:, None], sorted_logits, -jnp.inf)
  at = jax.random.categorical(jax.random.key(inputs["seed"]), kept)
  drawn = jnp.take_along_axis(order, at[:, None], -1)
  score = of(log_probs(half, params, inputs["tokens"][:, :1]), drawn)
  return Out(-score.mean(), {"score": score, "mass": mass}, {"drawn": drawn, "size": size})


@program("language: speculative decoding, a draft accepted by the target's table", MODEL, tables)
def speculative_decoding(half, params, inputs):
  accept, again = jax.random.split(jax.random.key(inputs["seed"]))
  draft, target = jax.nn.softmax(inputs["logits"] * 0.7), jax.nn.softmax(inputs["logits"])
  tokens = inputs["tokens"]
  gather = lambda p: jnp.take_along_axis(p, tokens, -1)
  taken = jax.random.uniform(accept, tokens.shape) < gather(target) / gather(draft)
  length = jnp.sum(jnp.cumprod(taken.astype(int), -1), -1)
  rest = jnp.maximum(target - draft, 0)
  rest = rest / rest.sum(-1, keepdims=True)
  instead = jax.random.categorical(again, jnp.log(rest))
  score = of(log_probs(half, params, tokens), tokens)
  mask = jnp.arange(6) <= length[:, None]
  return Out(-jnp.sum(score * mask) / mask.sum(), score, {"length": length, "instead": instead})


@program(
  "retrieval: ids looked up and counted by products of one-hots, rows by their matrix",
  {"table": (700, 16), "out": (16, 8)},
  lambda rng: {
    "at": rng.integers(0, 700, 300),
    "ids": 1000 + rng.permutation(700),
    "y": rng.standard_normal((300, 8)),
  },
)
def lookup_by_one_hot(half, params, inputs):
  chosen = jax.nn.one_hot(inputs["at"], 700)
  ids = jnp.einsum("nv,v->n", chosen, inputs["ids"].astype(jnp.float32))
  matrix = (chosen @ inputs["ids"][:, None].astype(jnp.float32))[:, 0]
  counts = jnp.ones((1, 300)) @ chosen
  out = half.dot(half.dot(chosen, params["table"]), params["out"])
  discrete = {"ids": ids.astype(int), "matrix": jnp.round(matrix).astype(int), "counts": counts.astype(int)}
  return Out(jnp.mean((out - inputs["y"]) ** 2), out, discrete)


@program(
  "statistics: quantile regression, with quantiles of an input",
  {"in": (16, 32), "out": (32, 5)},
  lambda rng: {"x": rng.standard_normal((200, 16)), "y": 50 + rng.standard_normal(200)},
)
def quantile_regression(half, params, inputs):
  levels = jnp.array([0.05, 0.25, 0.5, 0.75, 0.95])
  at = jnp.quantile(inputs["y"], levels)
  where = jnp.searchsorted(at, inputs["y"])
  predicted = at + half.dot(jax.nn.gelu(half.dot(inputs["x"], params["in"])), params["out"])
  error = inputs["y"][:, None] - predicted
  losses = jnp.maximum(levels * error, (levels - 1) * error)
  return Out(losses.mean(), {"quantiles": at, "losses": losses}, where)


@program(
  "language: a cross entropy with smoothing and a z-loss, a value head that states float32 behind a view",
  {"in": lambda rng: 2.0 * rng.permutation(np.eye(16)), "out": (16, 40), "value": (16, 1)},
  lambda rng: {
    "x": rng.integers(-32, 32, (4, 12, 16)) / 8,  # a product that is exact: the norm may not be rounded
    "y": rng.integers(0, 40, (4, 12)),
    "score": rng.standard_normal(4),
  },
)
def float32_head(half, params, inputs):
  x = half.dot(inputs["x"], params["in"])
  x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
  logits = half.dot(x, params["out"])
  norm = jax.nn.logsumexp(logits, -1)
  smooth = 0.9 * jax.nn.one_hot(inputs["y"], 40) + 0.1 / 40
  losses = norm - jnp.sum(smooth * logits, -1) + 1e-3 * norm**2
  value = jnp.matmul(x[:, -1], params["value"], precision=jax.lax.Precision.HIGHEST)[:, 0]
  return Out(losses.mean() + jnp.mean((value - inputs["score"]) ** 2), {"losses": losses, "value": value})


MIXED = {"in": (16, 32), "out": (32, 40), "mix": (40, 8)}


def mixed(rng):
  return {"x": 3 * rng.standard_normal((64, 16)), "y": rng.standard_normal((64, 8))}


@program("language: an entropy of probabilities behind views, which a product reads, too", MIXED, mixed)
def entropy_behind_views(half, params, inputs):
  p = jax.nn.softmax(4 * half.dot(jnp.tanh(half.dot(inputs["x"], params["in"])), params["out"]))
  mixed = half.dot(p, params["mix"])
  p = jnp.swapaxes(p.reshape(8, 8, 40)[:, ::-1], 0, 1)
  entropy = -jnp.sum(p * jnp.log(p), -1)
  return Out(
    jnp.mean((mixed - inputs["y"]) ** 2) - 0.01 * entropy.mean(), {"entropy": entropy, "mixed": mixed}
  )


@program(
  "language: an entropy inside a checkpointed, jitted loss, of probabilities that a scan hands on",
  MIXED,
  mixed,
)
def entropy_behind_calls(half, params, inputs):
  @jax.checkpoint
  def entropy(p):
    return -jnp.sum(p * jnp.log(p), -1)

  def chunk(_, x):
    p = jax.nn.softmax(4 * half.dot(jnp.tanh(half.dot(x, params["in"])), params["out"]))
    return None, (p, half.dot(p, params["mix"]))

  _, (p, mixed) = jax.lax.scan(chunk, None, inputs["x"].reshape(4, 16, 16))
  lost = jax.jit(entropy)(p)
  loss = jnp.mean((mixed.reshape(64, 8) - inputs["y"]) ** 2) - 0.01 * lost.mean()
  return Out(loss, {"entropy": lost, "mixed": mixed})


@program(
  "control: a sequence's ratio with itself, picked by a product with a one-hot and by a gather",
  {"turn": lambda rng: 2.0 * rng.permutation(np.eye(20))},
  lambda rng: {
    "x": rng.integers(-12, 12, (4, 50, 20))
    / 8,  # a product that is exact: log-probabilities may not be rounded
    "actions": rng.integers(0, 20, 50),
    "gain": rng.standard_normal(4),
  },
)
def sequence_ratio(half, params, inputs):
  log_p = jax.nn.log_softmax(half.dot(inputs["x"], params["turn"]))
  new = jnp.einsum("btv,tv->bt", log_p, jax.nn.one_hot(inputs["actions"], 20))
  old = jax.lax.stop_gradient(jnp.take_along_axis(log_p, inputs["actions"][None, :, None], -1)[..., 0])
  ratio = jnp.exp(jnp.sum(new - old, -1))
  return Out(-jnp.mean(ratio * inputs["gain"]), {"ratio": ratio, "picked": new})
