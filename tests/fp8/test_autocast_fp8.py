"""Which products are FP8 under autocast, in every kind of program, and what comes of it.

A case's products are written in the order of the program: `8` for FP8, `b` for bfloat16, `f` for float32.
"""

from __future__ import annotations

import functools
import itertools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from casting.jaxprs import jit, named
from flax import nnx

import mpjax
from mpjax.casting import quantised

P = jax.sharding.PartitionSpec
SHORT = {"float8_e4m3fn": "8", "float8_e5m2": "5", "bfloat16": "b", "float16": "h", "float32": "f"}
D = 32


def fp8(overrides=(), base="fp8", **options):
  recipe = {"recipe": "current", "emulate": True, "min_dim": 16, **options}
  return {"base": base, "fp8": recipe, "autocast": True, "overrides": overrides}


def normal(*shape, seed=0):
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weights(*sizes):
  return [normal(m, n, seed=i) / np.sqrt(m) for i, (m, n) in enumerate(itertools.pairwise(sizes))]


X, IMAGES = normal(D, D, seed=9), normal(2, 8, 8, D, seed=9)
W = weights(*[D] * 6)
SIX = weights(*[D] * 7)
SCANNED = (W[0], np.stack(W[1:4]), W[4])
TOKENS = np.arange(D) % 7
relu = jax.nn.relu


def kinds(fun, *args, policy=None):
  rows = mpjax.explain(fun, policy or fp8())(*args).rows
  return "".join(SHORT[row.after] for row in rows if row.flops)


def by_path(fun, *args, policy=None):
  """The kinds of products by module path, in the order of the program."""
  found = {}
  for row in mpjax.explain(fun, policy or fp8())(*args).rows:
    if row.flops:
      found[row.path] = found.get(row.path, "") + SHORT[row.after]
  return found


def traced(fun, *args):
  """The FP8 products of a program, as (dtype of lhs, dtype of rhs)."""
  specs = [e.params["spec"] for e in named("fp8_dot_general", fun, *args)]
  return sorted((SHORT4[s.lhs_dtype.name], SHORT4[s.rhs_dtype.name]) for s in specs)


SHORT4 = {"float8_e4m3fn": "4", "float8_e5m2": "5"}


def relative(a, b):
  flat = lambda tree: np.concatenate(
    [np.ravel(np.asarray(leaf, np.float64)) for leaf in jax.tree.leaves(tree)]
  )
  a, b = flat(a), flat(b)
  return np.linalg.norm(a - b) / np.linalg.norm(b)


# Plain functions


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
  return jax.lax.cond(x[0, 0] > 0, lambda x: relu(x @ w[1]) @ w[2], lambda x: x @ w[3], relu(x @ w[0]))


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


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_of_plain_functions(name):
  fun, expected = FUNCTIONS[name]
  w = weights_of(name)
  assert kinds(fun, w, X) == expected
  assert len(traced(mpjax.autocast(fun, fp8()), w, X)) == expected.count("8")


@pytest.mark.parametrize(("fun", "expected"), [(tied, "8888b"), (one_hot, "b888b")], ids=["tied", "one hot"])
def test_an_embedding_is_the_first_layer(fun, expected):
  assert kinds(fun, W, TOKENS) == expected


OPTIONS = {
  "first layer": ({"first_layer": True}, "8888b"),
  "last layer": ({"last_layer": True}, "b8888"),
  "both": ({"first_layer": True, "last_layer": True}, "88888"),
  "larger than all": ({"min_dim": 64}, "bbbbb"),
  "as large": ({"min_dim": 32}, "b888b"),
  "block": ({"recipe": "block"}, "b888b"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_of_the_recipe(name):
  options, expected = OPTIONS[name]
  assert kinds(mlp, W, X, policy=fp8(**options)) == expected


def test_attention_can_be_asked_for():
  assert kinds(attention, SIX, X, policy=fp8(attention=True)) == "b888888b"


@pytest.mark.parametrize(
  ("sizes", "recipe", "expected"),
  [
    ((D, D, 40, D, D, D), "current", "bbb8b"),
    ((D, D, 48, D, D, D), "current", "b888b"),
    ((D, D, 48, D, D, D), "block", "bbb8b"),
    ((D, D, 8, D, D, D), "current", "bbb8b"),
    ((D, D, D, D, 10), "current", "b88b"),
  ],
  ids=["40", "48", "48 in blocks", "8", "classes"],
)
def test_dimensions(sizes, recipe, expected):
  assert kinds(mlp, weights(*sizes), X, policy=fp8(recipe=recipe)) == expected


def test_vmap_outside_leaves_rows_that_are_too_few():
  def outside(w, x):
    return jax.vmap(mpjax.autocast(functools.partial(mlp, w), fp8()))(x)

  assert traced(outside, W, X) == []  # each call sees a vector
  assert traced(outside, W, jnp.stack([X, X])) == [("4", "4")] * 3


def test_a_dimension_that_is_symbolic_may_be_no_multiple_of_16():
  (rows,) = jax.export.symbolic_shape("rows")
  explanation = mpjax.explain(mlp, fp8())(W, jax.ShapeDtypeStruct((rows, D), jnp.float32))
  whys = [row.why for row in explanation.rows if row.primitive == "dot_general"]
  assert all("symbolic" in why for why in whys[1:-1])


# Modules


class Linen(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(D, D, name="embed", dtype=self.dtype)(tokens)
    for i in range(2):
      h = nn.LayerNorm(name=f"norm{i}", dtype=self.dtype)(x)
      h = nn.MultiHeadDotProductAttention(2, name=f"attn{i}", dtype=self.dtype)(h)
      h = nn.Dense(2 * D, name=f"up{i}", dtype=self.dtype)(x + h)
      x = x + nn.Dense(D, name=f"down{i}", dtype=self.dtype)(nn.gelu(h))
    return nn.Dense(D, name="head", dtype=self.dtype)(x)


BLOCKS = {
  f"Linen/{layer}{i}{part}": "8"
  for i in range(2)
  for layer, parts in (("attn", ("/query", "/key", "/value", "/out")), ("up", ("",)), ("down", ("",)))
  for part in parts
}
LINEN = {**BLOCKS, "Linen/attn0": "bb", "Linen/attn1": "bb", "Linen/head": "b"}
SEQUENCE = np.arange(2 * D).reshape(2, D) % D


@functools.cache
def linen(dtype=None):
  model = Linen(dtype)
  return model.apply, jax.eval_shape(model.init, jax.random.key(0), SEQUENCE)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_linen(dtype):
  apply, variables = linen(dtype)
  found = {path.removesuffix("/dropout"): k for path, k in by_path(apply, variables, SEQUENCE).items()}
  assert found == LINEN


@pytest.mark.parametrize(
  ("policy", "expected"),
  [
    (fp8(exclude=[".*/attn0"]), lambda path: "attn0" not in path),
    (fp8(exclude=["attn"]), lambda path: True),  # matches no whole component
    (fp8(exclude="down1"), lambda path: "down1" not in path),
    (fp8(include=["up0", "attn1"]), lambda path: "up0" in path or "attn1" in path),
    (fp8(include=["(up|down)."], exclude=["down0"]), lambda path: path[6:] in ("up0", "up1", "down1")),
    (fp8(overrides={".*/attn0": "bf16"}), lambda path: "attn0" not in path),
    (fp8(overrides={"up0": "bf16", "down0/?": "bf16"}), lambda path: path[6:] not in ("up0", "down0")),
    (fp8(overrides={"up0": "fp8", "Linen": "bf16"}), lambda path: path[6:] == "up0"),
    (fp8(overrides={".*/attn0/query": "fp8", "attn0": "bf16"}), lambda p: "attn0" not in p or "query" in p),
  ],
  ids=lambda x: str(x.get("overrides") or x["fp8"]) if isinstance(x, dict) else "",
)
def test_modules_chosen_by_path(policy, expected):
  apply, variables = linen()
  found = by_path(apply, variables, SEQUENCE, policy=policy)
  assert {p for p, kind in found.items() if kind == "8"} == {p for p in BLOCKS if expected(p)}


def test_float32_modules_within_fp8():
  apply, variables = linen()
  found = by_path(apply, variables, SEQUENCE, policy=fp8(overrides={"up0": "fp32"}))
  assert found == {**LINEN, "Linen/up0": "f"}


@pytest.fixture
def units(monkeypatch):
  """A device that has FP8 units, as far as autocast is told."""
  monkeypatch.setattr(quantised, "fp8_units", lambda recipe, device=None: (True, ""))


def test_an_fp8_module_within_bfloat16(units):
  shapes = jax.eval_shape(Wide().init, jax.random.key(0), jax.ShapeDtypeStruct((4, 128), jnp.int32))
  tokens = jax.ShapeDtypeStruct((4, 128), jnp.int32)
  found = by_path(Wide().apply, shapes, tokens, policy={"base": "bf16", "overrides": {"up": "fp8"}})
  assert found == {"Wide/up": "8", "Wide/down": "b", "Wide/head": "b"}
  assert by_path(Wide().apply, shapes, tokens, policy="fp8") == {
    "Wide/up": "8",
    "Wide/down": "8",
    "Wide/head": "b",
  }


class Wide(nn.Module):
  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(128, 128)(tokens)
    x = nn.Dense(256, name="up")(x)
    return nn.Dense(128, name="head")(nn.Dense(128, name="down")(nn.relu(x)))


def test_linen_layers_under_lifted_transforms():
  class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
      return nn.relu(nn.Dense(D, name="dense")(x)), None

  class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Dense(D, name="first")(x)
      scan = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
      x, _ = scan(name="layers")(x, None)
      return nn.Dense(D, name="head")(nn.jit(nn.Dense)(D, name="jitted")(x))

  model = Stack()
  variables = jax.eval_shape(model.init, jax.random.key(0), X)
  found = by_path(model.apply, variables, X)
  assert "".join(found.values()) == "b88b"
  grads = jax.grad(lambda v: mpjax.autocast(lambda v: (model.apply(v, X) ** 2).mean(), fp8())(v))
  assert traced(grads, variables) == [("4", "4")] * 3 + [("4", "5")] * 2 + [("5", "4")] * 2


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.embed = nnx.Embed(D, D, rngs=rngs)
    self.attn = nnx.MultiHeadAttention(2, D, rngs=rngs, decode=False)
    self.layers = nnx.List([nnx.Linear(D, D, rngs=rngs) for _ in range(2)])

  def __call__(self, tokens):
    x = self.embed(tokens)
    x = x + self.attn(x)
    for layer in self.layers:
      x = nnx.relu(layer(x))
    return self.embed.attend(x)


def test_nnx():
  model = Nnx(nnx.Rngs(0))
  found = by_path(model, SEQUENCE)
  assert found == {
    **{f"Nnx/attn/{name}": "8" for name in ("query", "key", "value", "out")},
    "Nnx/attn": "bb",
    "Nnx/layers/0": "8",
    "Nnx/layers/1": "8",
    "Nnx/embed": "b",
  }
  chosen = by_path(model, SEQUENCE, policy=fp8(include=["layers/1"]))
  assert [path for path, kind in chosen.items() if kind == "8"] == ["Nnx/layers/1"]


def test_nnx_layers_in_a_scan():
  class Stack(nnx.Module):
    def __init__(self):
      self.first = nnx.Linear(D, D, rngs=nnx.Rngs(0))
      self.layers = nnx.vmap(lambda key: nnx.Linear(D, D, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 3)
      )
      self.last = nnx.Linear(D, D, rngs=nnx.Rngs(1))

    def __call__(self, x):
      x = self.first(x)
      x = nnx.scan(lambda x, layer: nnx.relu(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
        x, self.layers
      )
      return self.last(x)

  assert "".join(by_path(Stack(), X).values()) == "b8b"


def test_equinox():
  eqx = pytest.importorskip("equinox")
  model = eqx.nn.MLP(D, D, D, 3, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)
  apply = lambda params, x: jax.vmap(eqx.combine(params, static))(x)
  assert kinds(apply, params, X) == "b88b"
  assert traced(mpjax.autocast(apply, fp8()), params, X) == [("4", "4")] * 2


def test_haiku():
  hk = pytest.importorskip("haiku")
  model = hk.without_apply_rng(hk.transform(lambda x: hk.nets.MLP([D, D, D, 10])(x)))
  params = jax.eval_shape(model.init, jax.random.key(0), X)
  assert by_path(model.apply, params, X) == {
    "mlp/linear_0": "b",
    "mlp/linear_1": "8",
    "mlp/linear_2": "8",
    "mlp/linear_3": "b",
  }


# Convolutions

CONVOLUTIONS = {
  "1x1": ((1, 1), (1, 1), "VALID"),
  "1x1 strided": ((1, 1), (2, 2), "SAME"),
  "1x1 of two strides": ((1, 1), (3, 2), "VALID"),
  "patches": ((4, 4), (4, 4), "VALID"),
  "patches that leave a rest": ((3, 3), (3, 3), "VALID"),
  "patches with gaps": ((2, 3), (3, 4), "VALID"),
  "oblong patches": ((2, 8), (2, 8), "SAME"),
  "the whole image": ((8, 8), (8, 8), "VALID"),
}
LAYOUTS = {
  "NHWC": ("NHWC", "HWIO", "NHWC"),
  "NCHW": ("NCHW", "OIHW", "NCHW"),
  "mixed": ("NHWC", "OHWI", "NCHW"),
}


def conv(kernel, strides, padding, layout, **options):
  image, filters, _ = LAYOUTS[layout]
  size = {"N": 16, "C": D, "H": 8, "W": 8}
  x = normal(*(size[c] for c in image), seed=1)
  size = {"I": D, "O": 16, "H": kernel[0], "W": kernel[1]}
  w = normal(*(size[c] for c in filters), seed=2) / np.sqrt(D * np.prod(kernel))
  return (
    lambda x, w: jax.lax.conv_general_dilated(
      x, w, strides, padding, dimension_numbers=LAYOUTS[layout], **options
    ),
    x,
    w,
  )


ALL = fp8(first_layer=True, last_layer=True)


@pytest.mark.parametrize(
  ("name", "layout"),
  [
    *((name, "NHWC") for name in CONVOLUTIONS),
    *((name, layout) for name in ("1x1 strided", "patches with gaps") for layout in ("NCHW", "mixed")),
  ],
)
def test_convolutions_that_are_products(name, layout):
  fun, x, w = conv(*CONVOLUTIONS[name], layout)
  assert kinds(fun, x, w, policy=ALL) == "8"

  def both(fun):
    def loss(x, w):
      out = fun(x, w)
      return jnp.sum(jnp.sin(out)), out

    return jit(jax.grad(loss, (0, 1), has_aux=True))

  (grads, out), (exact, plain) = both(mpjax.autocast(fun, ALL))(x, w), both(fun)(x, w)
  assert [a.shape for a in (out, *grads)] == [a.shape for a in (plain, x, w)]
  assert relative(out, plain) < 0.05
  for ours, reference in zip(grads, exact, strict=True):
    assert relative(ours, reference) < 0.15
    assert not np.asarray(ours)[np.asarray(reference) == 0].any()  # what no window covers


def test_both_backward_products_of_a_convolution():
  fun, x, w = conv(*CONVOLUTIONS["patches"], "NCHW")
  grads = jax.grad(lambda x, w: jnp.sum(jnp.sin(mpjax.autocast(fun, ALL)(x, w))), (0, 1))
  assert traced(grads, x, w) == [("4", "4"), ("4", "5"), ("5", "4")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_convolutions_that_are_none(layout):
  policy = ALL
  for kernel, strides, padding, options in (
    ((3, 3), (1, 1), "SAME", {}),
    ((3, 3), (2, 2), "VALID", {}),
    ((4, 4), (4, 4), [(1, 1), (0, 0)], {}),
    ((2, 2), (2, 2), "VALID", {"rhs_dilation": (2, 2)}),
    ((1, 1), (1, 1), [(0, 0), (0, 0)], {"lhs_dilation": (2, 1)}),
  ):
    fun, x, w = conv(kernel, strides, padding, layout, **options)
    assert kinds(fun, x, w, policy=policy) == "b"
    assert traced(mpjax.autocast(fun, policy), x, w) == []
  fun, x, w = conv((1, 1), (1, 1), "VALID", layout, feature_group_count=2)
  axis = LAYOUTS[layout][1].index("I")
  assert kinds(fun, x, np.take(w, range(16), axis), policy=policy) == "b"


def test_convolutions_in_one_and_three_dimensions():
  policy = ALL
  for n in (1, 3):
    x, w = normal(4, *(4,) * n, 16), normal(*(2,) * n, 16, 32, seed=1) / 16
    letters = "XYZ"[:n]
    fun = lambda x, w, n=n, s=letters: jax.lax.conv_general_dilated(
      x, w, (2,) * n, "VALID", dimension_numbers=(f"N{s}C", f"{s}IO", f"N{s}C")
    )
    expected = "b" if n == 1 else "8"  # 4 x 2 rows are too few
    assert kinds(fun, x, w, policy=policy) == expected
    assert relative(jit(mpjax.autocast(fun, policy))(x, w), fun(x, w)) < 0.05


def test_a_vision_model():
  class Vision(nn.Module):
    @nn.compact
    def __call__(self, x):
      x = nn.Conv(D, (2, 2), (2, 2), name="patch")(x)
      x = nn.relu(nn.Conv(D, (3, 3), name="overlaps")(x))
      x = nn.relu(nn.Conv(D, (1, 1), name="point")(x))
      return nn.Dense(16, name="head")(x.mean((1, 2)))

  model = Vision()
  variables = jax.eval_shape(model.init, jax.random.key(0), IMAGES)
  assert by_path(model.apply, variables, IMAGES) == {
    "Vision/patch": "b",
    "Vision/overlaps": "b",
    "Vision/point": "8",
    "Vision/head": "b",
  }


# Derivatives

SLOW = {"reverse over forward", "forward over reverse", "jit", "vmap over weights", "remat of layers"}
marked = lambda names: [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]


def mean_of(fun):
  return lambda w, x: sum(jnp.mean(jnp.square(out)) for out in jax.tree.leaves(fun(w, x)))


def gradients(name):
  """Gradients of autocast, and autocast's of gradients: both not yet jitted."""
  inner = mean_of(FUNCTIONS[name][0])
  return jax.grad(mpjax.autocast(inner, fp8()), (0, 1)), mpjax.autocast(jax.grad(inner, (0, 1)), fp8())


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "while"])
def test_both_backward_products_are_fp8_and_gradients_e5m2(name):
  outside, _ = gradients(name)
  products = traced(outside, weights_of(name), X)
  n = FUNCTIONS[name][1].count("8")
  assert products.count(("4", "4")) == n * (2 if "remat" in name else 1)
  assert products.count(("4", "5")) == products.count(("5", "4")) == n


NOT_INLINED = ("while", "custom_vjp", "custom_jvp")  # nothing is left of a derivative rule in a gradient


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name not in NOT_INLINED])
def test_autocast_of_a_gradient_has_the_products_of_the_gradient_of_autocast(name):
  outside, inside = gradients(name)
  w = weights_of(name)
  unordered = lambda pairs: sorted("".join(sorted(pair)) for pair in pairs)
  assert unordered(traced(inside, w, X)) == unordered(traced(outside, w, X))


VALUES = "jit", "remat of layers", "scan", "cond", "shard_map", "vmap over weights", "attention", "custom_vjp"


@pytest.mark.parametrize("name", marked(VALUES))
def test_gradients_are_near_those_of_bfloat16(name):
  outside, inside = gradients(name)
  w = weights_of(name)
  half = jit(jax.grad(mpjax.autocast(mean_of(FUNCTIONS[name][0]), "bf16"), (0, 1)))(w, X)
  assert 1e-4 < relative(jit(outside)(w, X), half) < 0.2
  assert 1e-4 < relative(jit(inside)(w, X), half) < 0.2


DIRECTION = [normal(D, D, seed=i + 20) / 6 for i in range(5)]


def inner_product(a, b):
  return sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))


DERIVATIVES = {
  "forward": (lambda f: lambda w: jax.jvp(f, (w,), (DIRECTION,))[1], 0.1),
  "twice": (lambda f: jax.grad(lambda w: inner_product(jax.grad(f)(w), DIRECTION)), 0.3),
  "forward over reverse": (lambda f: lambda w: jax.jvp(jax.grad(f), (w,), (DIRECTION,))[1], 0.3),
  "reverse over forward": (lambda f: jax.grad(lambda w: jax.jvp(f, (w,), (DIRECTION,))[1]), 0.3),
}


@pytest.mark.parametrize("name", marked(DERIVATIVES))
def test_other_derivatives_are_near_those_of_bfloat16(name):
  derivative, bound = DERIVATIVES[name]
  fun = lambda w: loss(w[:4], X)
  inside = jit(mpjax.autocast(derivative(fun), fp8()))
  ours, half = (jit(derivative(mpjax.autocast(fun, policy))) for policy in (fp8(), "bf16"))
  assert 1e-4 < relative(ours(W), half(W)) < bound
  assert 1e-4 < relative(inside(W), half(W)) < bound


POLICIES = jax.checkpoint_policies


@pytest.mark.parametrize(
  ("policy", "again"),
  [
    (None, 3),
    (POLICIES.everything_saveable, 0),
    (POLICIES.dots_saveable, 0),
    (POLICIES.dots_with_no_batch_dims_saveable, 0),
    (POLICIES.save_only_these_names("none"), 3),
  ],
  ids=["default", "everything", "dots", "dots without batch", "names"],
)
def test_a_checkpoint_policy_that_keeps_products_keeps_fp8_ones(policy, again):
  fun = jax.checkpoint(loss, policy=policy)
  assert len(traced(jax.grad(mpjax.autocast(fun, fp8())), W, X)) == 9 + again


@pytest.mark.parametrize("recompute", ["islands", "dots", "nothing"])
def test_fp8_products_are_not_computed_again(recompute):
  assert len(traced(jax.grad(mpjax.autocast(loss, fp8(), recompute=recompute)), W, X)) == 9


def test_saved_activations_in_fp8():
  grad = lambda **options: jit(jax.grad(mpjax.autocast(loss, fp8(**options))))
  small, large = grad(saved_activations="fp8")(W, X), grad()(W, X)
  np.testing.assert_allclose(relative(small, large), 0, atol=1e-3)


# What is said


def test_reasons():
  rows = [row for row in mpjax.explain(mlp, fp8())(W, X).rows if row.flops]
  assert ["first layer" in rows[0].why, "last layer" in rows[-1].why] == [True, True]
  assert {row.why for row in rows[1:-1]} == {"an FP8 product (current scaling)"}
  reason = lambda fun, w, x=X, **options: [
    row.why for row in mpjax.explain(fun, fp8(**options))(w, x).rows if row.flops
  ]
  assert sum("two activations" in why for why in reason(attention, SIX)) == 2
  assert any("M=32 x K=32 x N=40: N is no mul" in why for why in reason(mlp, weights(D, D, 40, D, D)))
  assert any("M=8 x K=32 x N=32: M is no multiple of 16" in why for why in reason(mlp, W, X[:8]))
  assert any("smaller than fp8.min_dim=64" in why for why in reason(mlp, W, min_dim=64))
  assert any("custom derivative rule" in why for why in reason(*[FUNCTIONS["custom_vjp"][0], W]))
  fun, x, w = conv((3, 3), (1, 1), "SAME", "NHWC")
  assert "overlap" in reason(fun, w=x, x=w, first_layer=True, last_layer=True)[0]
  apply, variables = linen()
  whys = {
    row.path: row.why
    for row in mpjax.explain(apply, fp8(exclude=["up0"], include=["up.", "head"]))(variables, SEQUENCE).rows
    if row.flops
  }
  assert "fp8.exclude has 'up0'" in whys["Linen/up0"]
  assert "fp8.include" in whys["Linen/down0"]


def test_the_table_says_which_products_are_fp8_and_why_others_are_not():
  apply, variables = linen()
  explanation = mpjax.explain(apply, fp8())(variables, SEQUENCE)
  flops = explanation.matrix_flops()
  rows, scores = 2 * D, 2 * 2 * (2 * D * D * D)  # both attention products of both layers
  assert flops == {"float8_e4m3fn": 2 * rows * D * D * (4 + 4) * 2, "bfloat16": 2 * scores + 2 * rows * D * D}
  text = str(explanation)
  assert "not in FP8" in text
  assert "two activations" in text
  assert "last layer" in text
  assert "not in FP8" not in str(mpjax.explain(apply, "bf16")(variables, SEQUENCE))


def test_flops_in_a_scan_count_for_each_step():
  fun = FUNCTIONS["scan"][0]
  flops = mpjax.explain(fun, fp8())(SCANNED, X).matrix_flops()
  assert flops == {"float8_e4m3fn": 3 * 2 * D**3, "bfloat16": 2 * 2 * D**3}


@pytest.mark.parametrize(
  "policy", ["fp8", {"base": "fp8", "fp8": {"recipe": "block", "min_dim": 16}}], ids=str
)
def test_without_units_fp8_is_bfloat16_and_says_so(policy):
  w, x = weights(*[128] * 4), normal(128, 128)
  with pytest.warns(
    UserWarning, match=r"cpu has no FP8 units: they run in bfloat16 instead.*emulate: true"
  ) as said:
    out = jit(jax.value_and_grad(mpjax.autocast(loss, policy)))(w, x)
  assert len(said) == 1
  assert said[0].filename == __file__
  half = jit(jax.value_and_grad(mpjax.autocast(loss, "bf16")))(w, x)
  jax.tree.map(np.testing.assert_array_equal, out, half)
  rows = [row for row in mpjax.explain(loss, policy)(w, x).rows if row.flops]
  assert {row.after for row in rows} == {"bfloat16"}
  assert all("emulate: true" in row.why for row in rows)


@pytest.mark.parametrize(
  "policy", [fp8(), fp8(overrides={"x": "fp32"}), "bf16", {"base": "fp8", "fp8": {}}], ids=str
)
def test_no_warning_where_nothing_is_amiss(policy):
  fun = lambda w, x: jax.named_scope("x")(mlp)(w, x)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    jax.eval_shape(mpjax.autocast(fun, policy), W, X)


def test_a_step_warns_too():
  step = mpjax.make_train_step(lambda w, b: loss(w, b), optax.sgd(0.1), "fp8")
  with pytest.warns(UserWarning, match="no FP8 units"):
    step(step.init(W), X)


# Values


@functools.cache
def stepped(recipe):
  """A step in float16 with a loss scale, and the state after a good batch."""
  policy = {**fp8(recipe=recipe), "compute_dtype": "float16", "loss_scaling": {"init_scale": 2.0**10}}
  of = lambda w, batch: loss([w["first"], w["inner"], w["last"]], batch)
  step = mpjax.make_train_step(of, optax.adam(1e-2), policy, donate=False)
  state = step.init(dict(zip(("first", "inner", "last"), W, strict=False)), batch=X)
  state, metrics = step(state, X)
  assert bool(metrics["grads_finite"])
  return step, state


@pytest.mark.parametrize(("where", "bad"), [("input", np.nan), ("input", np.inf), ("weight", -np.inf)])
@pytest.mark.parametrize("recipe", ["current", "block", "delayed"])
def test_what_is_not_finite_reaches_the_loss_scale(recipe, where, bad):
  step, state = stepped(recipe)
  x, inner = X.copy(), np.array(state.params["inner"])
  (x if where == "input" else inner)[3, 5] = bad
  state = state.replace(params={**state.params, "inner": jnp.asarray(inner)})
  after, metrics = step(state, x)
  assert not bool(metrics["grads_finite"])
  same = lambda a, b: np.testing.assert_array_equal(a, b)
  jax.tree.map(same, (after.params, after.fp8_state), (state.params, state.fp8_state))
  assert float(after.opt_state.scale) == float(state.opt_state.scale) / 2


def test_a_product_of_zeros_is_zero():
  w = [np.zeros_like(x) for x in W]
  out, grads = jit(jax.value_and_grad(mpjax.autocast(loss, fp8())))(w, X)
  assert float(out) == 0
  assert not any(np.asarray(g).any() for g in grads)


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e6, 1e18])
def test_scales_follow_the_magnitude(magnitude):
  fun = lambda w, x: x @ w[0] @ w[1]
  policy = fp8(last_layer=True)
  w = [W[0], W[1] * np.float32(magnitude)]
  assert relative(jit(mpjax.autocast(fun, policy))(w, X), fun(w, X)) < 0.05
  grads, exact = (jit(jax.grad(lambda w, f=f: f(w, X).sum()))(w) for f in (mpjax.autocast(fun, policy), fun))
  assert relative(grads[0], exact[0]) < 0.1
  assert relative(grads[1], exact[1]) < 0.1


def test_output_and_gradient_dtypes():
  out, grads = jax.eval_shape(jax.value_and_grad(mpjax.autocast(loss, fp8())), W, X)
  assert {a.dtype.name for a in jax.tree.leaves((out, grads))} == {"float32"}
  specs = [
    e.params["spec"].out_dtype.name for e in named("fp8_dot_general", mpjax.autocast(mlp, fp8()), W, X)
  ]
  assert set(specs) == {"bfloat16"}
  wide = named("fp8_dot_general", mpjax.autocast(mlp, {**fp8(), "accum_dtype": "float32"}), W, X)
  assert {e.params["spec"].out_dtype.name for e in wide} == {"float32"}


@pytest.mark.slow
def test_training_with_fp8_is_training():
  x = normal(64, D)
  y = np.tanh(x @ W[0] / 3)
  batch = {"x": x, "y": y}
  fun = lambda w, batch: ((mlp(w, batch["x"]) - batch["y"]) ** 2).mean()
  losses = {}
  for name, policy in {"fp8": fp8(), "bf16": {"base": "bf16", "autocast": True}}.items():
    step = mpjax.make_train_step(fun, optax.adam(3e-3), policy)
    state = step.init(W[:4])
    for _ in range(60):
      state, metrics = step(state, batch)
    losses[name] = float(metrics["loss"])
  assert losses["fp8"] < 1.25 * losses["bf16"] + 1e-3
