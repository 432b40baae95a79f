"""Programs whose products are FP8 under autocast, and what is read of them.

A program's products are written in its order: `8` for FP8, `b` for bfloat16, `f` for float32.
"""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from tests.casting._jaxprs import named
from tests.fp8._reference import normal

P = jax.sharding.PartitionSpec
SHORT = {"float8_e4m3fn": "8", "bfloat16": "b", "float32": "f"}
FORMATS = {"float8_e4m3fn": "4", "float8_e5m2": "5"}
D = 32


def fp8(overrides=(), base="fp8", **options):
  recipe = {"recipe": "current", "emulate": True, "min_dim": 16, **options}
  return {"base": base, "fp8": recipe, "autocast": True, "overrides": overrides}


def weights(*sizes):
  return [normal(m, n, seed=i) / np.sqrt(m) for i, (m, n) in enumerate(itertools.pairwise(sizes))]


X = normal(D, D, seed=9)
W = weights(*[D] * 6)
SIX = weights(*[D] * 7)
SCANNED = (W[0], np.stack(W[1:4]), W[4])
TOKENS = np.arange(D) % 7
relu = jax.nn.relu


def kinds(fun, *args, policy=None):
  rows = mpjax.explain(fun, *args, policy=policy or fp8()).rows
  return "".join(SHORT[row.after] for row in rows if row.flops)


def by_path(fun, *args, policy=None):
  """The kinds of products by module path, in the order of the program."""
  found = {}
  for row in mpjax.explain(fun, *args, policy=policy or fp8()).rows:
    if row.flops:
      found[row.path] = found.get(row.path, "") + SHORT[row.after]
  return found


def traced(fun, *args):
  """The FP8 products of a program, as (dtype of lhs, dtype of rhs)."""
  specs = [e.params["spec"] for e in named("fp8_dot_general", fun, *args)]
  return sorted((FORMATS[s.lhs_dtype.name], FORMATS[s.rhs_dtype.name]) for s in specs)


def mlp(w, x):
  for layer in w[:-1]:
    x = relu(x @ layer)
  return x @ w[-1]


def loss(w, x):
  return (mlp(w, x) ** 2).mean()


def each(wrap):
  """A multilayer perceptron whose layers are each a call."""

  def apply(w, x):
    layer = wrap(lambda w, x: relu(x @ w))
    for own in w[:-1]:
      x = layer(own, x)
    return x @ w[-1]

  return apply


def scanned(step, w, x):
  first, middle, last = w
  return jax.lax.scan(step, relu(x @ first), middle)[0] @ last


def looped(w, x):
  body = lambda c: (c[0] + 1, relu(c[1] @ w[1]))
  return jax.lax.while_loop(lambda c: c[0] < 3, body, (0, x @ w[0]))[1] @ w[2]


def branches(w, x):
  x = relu(x @ w[0])
  x = jax.lax.cond(x[0, 0] > 0, lambda x: relu(x @ w[1]) @ w[2], lambda x: x @ w[3], x)
  return x @ w[4]


def ends_in_cond(w, x):
  return jax.lax.cond(x[0, 0] < 9, lambda x: relu(x @ w[1]) @ w[2], lambda x: x @ w[3], relu(x @ w[0]))


def attention(w, x):
  x = x @ w[0]
  q, k, v = x @ w[1], x @ w[2], x @ w[3]
  return jax.nn.softmax(q @ k.T / D) @ v @ w[4] @ w[5]


def shared(w, x):
  mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(mlp, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"))(w, x)


def tied(w, tokens):
  table, *layers = w
  x = table[tokens]
  for layer in layers:
    x = relu(x @ layer)
  return x @ table.T


def one_hot(w, tokens):
  return mlp(w, jax.nn.one_hot(tokens, D))


@jax.custom_vjp
def ruled(x, w):
  return relu(x @ w)


ruled.defvjp(lambda x, w: (relu(x @ w), (x, w)), lambda r, g: (g @ r[1].T, r[0].T @ g))


@jax.custom_jvp
def forward_ruled(x, w):
  return relu(x @ w)


forward_ruled.defjvps(lambda t, _, x, w: t @ w, lambda t, _, x, w: x @ t)


def region(w, x):
  full = mpjax.full_precision(lambda x: relu(x @ w[2]))
  return full(relu(x @ w[0]) @ w[1]) @ w[3] @ w[4]


def by_hand(w, x):
  w, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (w, x))
  return mlp(w, x).astype(jnp.float32)


def pinned(w, x):
  x = relu(x @ w[0]) @ w[1]
  return jnp.matmul(x, w[2], precision="highest") @ w[3] @ w[4]


def heads(w, x):
  x = relu(x @ w[0]) @ w[1]
  return x @ w[2], x @ w[3]


def summed(w, x):
  """A loss that is a product of vectors, and one with a matrix after the last layer."""
  return jnp.vdot(mlp(w, x), x)


FUNCTIONS = {
  "mlp": (mlp, "b888b"),
  "loss": (loss, "b888b"),
  "one layer": (lambda w, x: x @ w[0], "b"),
  "two layers": (lambda w, x: x @ w[0] @ w[1], "bb"),
  "jit": (jax.jit(mlp), "b888b"),
  "jit of layers": (each(jax.jit), "b888b"),
  "jit in jit": (jax.jit(each(jax.jit)), "b888b"),
  "remat": (jax.checkpoint(mlp), "b888b"),
  "remat of layers": (each(jax.checkpoint), "b888b"),
  "scan": (functools.partial(scanned, lambda x, w: (relu(x @ w), None)), "b8b"),
  "scan of remat": (functools.partial(scanned, jax.checkpoint(lambda x, w: (relu(x @ w), None))), "b8b"),
  "scan of jit": (functools.partial(scanned, jax.jit(lambda x, w: (relu(x @ w), None))), "b8b"),
  "all in a scan": (lambda w, x: jax.lax.scan(lambda x, w: (x @ w, None), x, w[1])[0], "8"),
  "weights of a scan as constants": (
    lambda w, x: jax.lax.scan(lambda x, _: (x @ w[1], None), x @ w[0], length=3)[0] @ w[2],
    "b8b",
  ),
  "map": (lambda w, x: jax.lax.map(functools.partial(mlp, w), jnp.stack([x, x])), "b888b"),
  "while": (looped, "b8b"),
  "cond": (branches, "b888b"),
  "cond at the end": (ends_in_cond, "bb8b"),
  "switch": (
    lambda w, x: jax.lax.switch(jnp.int32(x[0, 0]), [lambda x: x @ w[1]] * 3, x @ w[0]) @ w[2],
    "b888b",
  ),
  "shard_map": (shared, "b888b"),
  "vmap": (lambda w, x: jax.vmap(functools.partial(mlp, w))(jnp.stack([x, x])), "b888b"),
  "vmap over rows": (lambda w, x: jax.vmap(functools.partial(mlp, w))(x), "b888b"),
  "vmap over weights": (
    lambda w, x: jax.vmap(mlp, (0, None))([jnp.stack([a, a]) for a in w], x),
    "b888b",
  ),
  "custom_vjp": (lambda w, x: ruled(ruled(x @ w[0], w[1]) @ w[2], w[3]) @ w[4], "bb8bb"),
  "custom_jvp": (lambda w, x: forward_ruled(forward_ruled(x @ w[0], w[1]) @ w[2], w[3]) @ w[4], "bb8bb"),
  "attention": (attention, "b888bb8b"),
  "full_precision": (region, "b8f8b"),
  "by hand": (by_hand, "b888b"),
  "precision asked for": (pinned, "b8f8b"),
  "two heads": (heads, "b8bb"),
  "loss of a vector product": (summed, "b888bf"),
  "transposed weight": (lambda w, x: x @ w[0].T @ w[1].T @ w[2].T, "b8b"),
  "reshaped weight": (
    lambda w, x: jnp.einsum("bd,dhk->bhk", x @ w[0], w[1].reshape(D, 2, 16)).reshape(D, D) @ w[2],
    "b8b",
  ),
  "weight of a computation": (lambda w, x: x @ w[0] @ (w[1] * jnp.tanh(w[2])) @ w[3], "b8b"),
  "residual": (lambda w, x: (x + relu(x @ w[0]) @ w[1]) @ w[2], "b8b"),
  "weight first": (lambda w, x: w[2] @ (w[1] @ (w[0] @ x)), "b8b"),
  "dead product": (lambda w, x: (x @ w[4], x @ w[0] @ w[1] @ w[2])[1], "b8b"),
  "small batch": (lambda w, x: mlp(w, x[:8]), "bbbbb"),
  "odd batch": (lambda w, x: mlp(w, x[:17]), "bbbbb"),
  "folded batch": (lambda w, x: mlp(w, x.reshape(16, 2, D)), "b888b"),
}


def weights_of(name):
  if name == "attention":
    return SIX
  return SCANNED if "scan" in name and "constants" not in name else W


def mean_of(fun):
  return lambda w, x: sum(jnp.mean(jnp.square(out)) for out in jax.tree.leaves(fun(w, x)))
