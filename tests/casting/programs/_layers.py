"""Programs of layers that libraries ship, given their products: linen, Equinox; experts and ensembles."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tests.casting.programs._ideal import Out, program


def attention(half):
  """An attention function of linen's signature."""

  def attend(query, key, value, bias=None, mask=None, **_):
    scores = half.einsum("bqhd,bkhd->bhqk", query / query.shape[-1] ** 0.5, key)
    if mask is not None:
      scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return half.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)

  return attend


class Block(nn.Module):
  half: object

  @nn.compact
  def __call__(self, x):
    dense = functools.partial(nn.Dense, dot_general=self.half.dot_general)
    attend = nn.MultiHeadDotProductAttention(
      2,
      qkv_dot_general=self.half.dot_general,
      out_dot_general=self.half.dot_general,
      attention_fn=attention(self.half),
    )
    x = x + attend(nn.LayerNorm()(x), mask=nn.make_causal_mask(x[..., 0]))
    return x + dense(x.shape[-1])(nn.gelu(dense(64)(nn.LayerNorm()(x))))


class Transformer(nn.Module):
  half: object

  @nn.compact
  def __call__(self, tokens):
    embed = nn.Embed(40, 32)
    x = embed(tokens) * 32**0.5
    for _ in range(2):
      x = nn.remat(Block)(self.half)(x)
    return self.half.dot(nn.RMSNorm()(x), embed.embedding.T)


def linen(module):
  """Parameters of a linen module, whose shapes alone are made by it."""

  def draw(rng):
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.zeros((2, 12), int))["params"]

    def one(path, leaf):
      scale = "scale" in jax.tree_util.keystr(path)
      return scale + rng.standard_normal(leaf.shape) * (0.1 if leaf.ndim < 2 else leaf.shape[0] ** -0.5)

    return jax.tree_util.tree_map_with_path(one, shapes)

  return draw


class Plain:
  dot_general = staticmethod(jax.lax.dot_general)
  einsum = staticmethod(jnp.einsum)
  dot = staticmethod(jnp.matmul)


@program(
  "language: a linen transformer, its embedding its head, each block under remat",
  {"model": linen(Transformer(Plain()))},
  lambda rng: {"x": rng.integers(0, 40, (4, 12)), "y": rng.integers(0, 40, (4, 12))},
)
def linen_transformer(half, params, inputs):
  logits = Transformer(half).apply({"params": params["model"]}, inputs["x"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["y"])
  return Out(
    losses.mean(), {"losses": losses, "logits": logits}, jnp.bincount(inputs["y"].ravel(), length=40)
  )


@program(
  "language: two experts for each token by top_k, ragged products of the sorted tokens",
  {"router": lambda rng: 2.0 * rng.permutation(np.eye(16))[:, :4], "up": (4, 16, 32), "down": (4, 32, 16)},
  # Products with the router are exact, so that the choice is float32's.
  lambda rng: {
    "x": rng.permuted(np.tile(np.arange(-8, 8) / 4, (64, 1)), axis=1),
    "y": rng.standard_normal((64, 16)),
  },
)
def ragged_experts(half, params, inputs):
  gates, chosen = jax.lax.top_k(jax.nn.softmax(half.dot(inputs["x"], params["router"])), 2)
  gates = gates / gates.sum(-1, keepdims=True)
  order = jnp.argsort(chosen.ravel())
  sizes = jnp.bincount(chosen.ravel(), length=4)
  ragged = lambda x, w: half(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)
  hidden = jax.nn.silu(ragged(inputs["x"][order // 2], params["up"]))
  weighted = ragged(hidden, params["down"]) * gates.ravel()[order, None]
  out = jnp.zeros((64, 16)).at[order // 2].add(weighted)
  return Out(jnp.mean((out - inputs["y"]) ** 2), out, {"chosen": chosen, "sizes": sizes})


@program(
  "compression: weights rounded to 8 bits with a straight-through gradient, pruned below a quantile",
  {"in": (16, 32), "out": (32, 4)},
  lambda rng: {"x": rng.standard_normal((32, 16)), "y": rng.standard_normal((32, 4))},
)
def quantised_weights(half, params, inputs):
  def quantised(w):
    scale = jnp.max(jnp.abs(w), 0) / 127
    codes = jnp.round(w / scale)
    return w + jax.lax.stop_gradient(codes * scale - w), codes.astype(int)

  kept = jnp.abs(params["in"]) >= jnp.quantile(jnp.abs(params["in"]), 0.5)
  first, codes = quantised(jnp.where(kept, params["in"], 0))
  second, more = quantised(params["out"])
  out = half.dot(jax.nn.gelu(half.dot(inputs["x"], first)), second)
  return Out(jnp.mean((out - inputs["y"]) ** 2), out, {"in": codes, "out": more, "kept": kept.astype(int)})


@program(
  "uncertainty: an ensemble under vmap, its disagreement and the mean of its probabilities",
  {"in": (5, 8, 32), "out": (5, 32, 4)},
  lambda rng: {"x": rng.standard_normal((48, 8)), "y": rng.integers(0, 4, 48)},
)
def ensemble(half, params, inputs):
  member = lambda p: jax.nn.log_softmax(2 * half.dot(jax.nn.relu(half.dot(inputs["x"], p["in"])), p["out"]))
  log_p = jax.vmap(member)(params)
  mean = jax.nn.logsumexp(log_p, 0) - jnp.log(5.0)
  entropy = lambda log_p: -jnp.sum(jnp.exp(log_p) * log_p, -1)
  information = entropy(mean) - entropy(log_p).mean(0)
  picked = jnp.take_along_axis(mean, inputs["y"][:, None], -1)[:, 0]
  return Out(-picked.mean(), {"information": information, "mean": mean})


@program(
  "sequences: a recurrent cell as an Equinox module, filtered and mapped",
  {"embed": (20, 16), "in": (16, 48), "hidden": (16, 48), "head": (16, 20)},
  lambda rng: {"x": rng.integers(0, 20, (4, 12)), "y": rng.integers(0, 20, (4, 12))},
  needs="equinox",
)
def equinox_recurrent(half, params, inputs):
  import equinox as eqx

  class Cell(eqx.Module):
    into: jax.Array
    hidden: jax.Array
    norm: eqx.nn.LayerNorm
    size: int = eqx.field(static=True)

    def __call__(self, h, x):
      ar, az, an = jnp.split(half.dot(x, self.into), 3)
      br, bz, bn = jnp.split(half.dot(h, self.hidden), 3)
      z = jax.nn.sigmoid(az + bz)
      h = (1 - z) * jnp.tanh(an + jax.nn.sigmoid(ar + br) * bn) + z * h
      return h, self.norm(h)

  cell = Cell(params["in"], params["hidden"], eqx.nn.LayerNorm(16), 16)

  @eqx.filter_vmap(in_axes=(None, 0))
  def run(cell, tokens):
    return jax.lax.scan(lambda h, x: cell(h, x), jnp.zeros(cell.size), 4 * params["embed"][tokens])

  last, states = run(cell, inputs["x"])
  logits = half.dot(states, params["head"])
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, inputs["y"])
  return Out(losses.mean(), {"losses": losses, "last": last})
