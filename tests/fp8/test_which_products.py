"""FP8 under autocast: which products of functions and modules, why not others, dtypes, devices without units."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx

import mpjax
from tests.casting._jaxprs import jit, named
from tests.fp8._programs import SHORT, D, W, X, by_path, fp8, loss, mlp, products, relu, weights
from tests.fp8._reference import normal

P = jax.sharding.PartitionSpec
FORMATS = {"float8_e4m3fn": "4", "float8_e5m2": "5"}
SIX = weights(*[D] * 7)
SCANNED = (W[0], np.stack(W[1:4]), W[4])
TOKENS = np.arange(D) % 7


def kinds(fun, *args, policy=None):
  return "".join(SHORT[row.after] for row in products(fun, *args, policy=policy))


def traced(fun, *args):
  """The FP8 products of a program, as (dtype of lhs, dtype of rhs)."""
  specs = [e.params["spec"] for e in named("fp8_dot_general", fun, *args)]
  return sorted(tuple(FORMATS[dtype.name] for dtype in s.formats) for s in specs)


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


def pinned(w, x):
  x = relu(x @ w[0]) @ w[1]
  return jnp.matmul(x, w[2], precision="highest") @ w[3] @ w[4]


def heads(w, x):
  x = relu(x @ w[0]) @ w[1]
  return x @ w[2], x @ w[3]


FUNCTIONS = {
  "mlp": (mlp, "b888b"),
  "loss": (loss, "b888b"),
  "jit": (jax.jit(mlp), "b888b"),
  "remat": (jax.checkpoint(mlp), "b888b"),
  "scan": (functools.partial(scanned, lambda x, w: (relu(x @ w), None)), "b8b"),
  "scan of remat": (functools.partial(scanned, jax.checkpoint(lambda x, w: (relu(x @ w), None))), "b8b"),
  "while": (looped, "b8b"),
  "cond": (branches, "b888b"),
  "cond at the end": (ends_in_cond, "bb8b"),
  "shard_map": (shared, "b888b"),
  "vmap": (lambda w, x: jax.vmap(functools.partial(mlp, w))(jnp.stack([x, x])), "b888b"),
  "custom_vjp": (lambda w, x: ruled(ruled(x @ w[0], w[1]) @ w[2], w[3]) @ w[4], "bb8bb"),
  "custom_jvp": (lambda w, x: forward_ruled(forward_ruled(x @ w[0], w[1]) @ w[2], w[3]) @ w[4], "bb8bb"),
  "attention": (attention, "b888bb8b"),
  "full_precision": (region, "b8f8b"),
  "precision asked for": (pinned, "b8f8b"),
  "two heads": (heads, "b8bb"),
  "transposed weight": (lambda w, x: x @ w[0].T @ w[1].T @ w[2].T, "b8b"),
  "weight of a computation": (lambda w, x: x @ w[0] @ (w[1] * jnp.tanh(w[2])) @ w[3], "b8b"),
  "residual": (lambda w, x: (x + relu(x @ w[0]) @ w[1]) @ w[2], "b8b"),
  "weight first": (lambda w, x: w[2] @ (w[1] @ (w[0] @ x)), "b8b"),
  "small batch": (lambda w, x: mlp(w, x[:8]), "bbbbb"),
  "folded batch": (lambda w, x: mlp(w, x.reshape(16, 2, D)), "b888b"),
}


def weights_of(name):
  if name == "attention":
    return SIX
  return SCANNED if "scan" in name else W


def mean_of(fun):
  return lambda w, x: sum(jnp.mean(jnp.square(out)) for out in jax.tree.leaves(fun(w, x)))


def gradients(name):
  """Gradients of autocast, and autocast's of gradients: both not yet jitted."""
  inner = mean_of(FUNCTIONS[name][0])
  return jax.grad(mpjax.autocast(inner, fp8()), (0, 1)), mpjax.autocast(jax.grad(inner, (0, 1)), fp8())


# Nothing is left of a derivative rule in a gradient; and where a program ends in a cond, two backward products are
# not known for what they are and stay in bfloat16. A while loop has no gradient.
OTHER_PRODUCTS = ("custom_vjp", "custom_jvp", "cond at the end")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_products_of_plain_functions_and_of_both_their_gradients(name):
  fun, expected = FUNCTIONS[name]
  w, n = weights_of(name), expected.count("8")
  assert kinds(fun, w, X) == expected
  assert len(traced(mpjax.autocast(fun, fp8()), w, X)) == n
  if name == "while":
    return
  outside, inside = gradients(name)
  found = traced(outside, w, X)
  assert found.count(("4", "4")) == n * (2 if "remat" in name else 1)
  assert found.count(("4", "5")) == found.count(("5", "4")) == n
  if name not in OTHER_PRODUCTS:
    unordered = lambda pairs: sorted("".join(sorted(pair)) for pair in pairs)
    assert unordered(traced(inside, w, X)) == unordered(found)


def test_an_embedding_is_the_first_layer():
  assert kinds(tied, W, TOKENS) == "8888b"
  assert kinds(one_hot, W, TOKENS) == "b888b"


# Sizes of layers, the recipe, and the kinds of the products.
RECIPES = [
  ((D,) * 6, {"first_layer": True}, "8888b"),
  ((D,) * 6, {"last_layer": True}, "b8888"),
  ((D,) * 6, {"min_dim": 64}, "bbbbb"),
  ((D, D, 40, D, D, D), {}, "bbb8b"),
  ((D, D, 48, D, D, D), {}, "b888b"),
  ((D, D, 48, D, D, D), {"recipe": "mx"}, "bbb8b"),
]


def test_options_and_sizes():
  for row in RECIPES:
    sizes, options, expected = row
    assert kinds(mlp, weights(*sizes), X, policy=fp8(**options)) == expected, row
  assert kinds(attention, SIX, X, policy=fp8(attention=True)) == "b888888b"


def test_vmap_outside_leaves_rows_that_are_too_few():
  def outside(w, x):
    return jax.vmap(mpjax.autocast(functools.partial(mlp, w), fp8()))(x)

  assert traced(outside, W, X) == []  # each call sees a vector
  assert traced(outside, W, jnp.stack([X, X])) == [("4", "4")] * 3


def conv(kernel):
  layout = ("NHWC", "HWIO", "NHWC")
  call = functools.partial(jax.lax.conv_general_dilated, padding="VALID", dimension_numbers=layout)
  return (lambda w, x: call(x, w, (kernel, kernel))), np.ones((kernel, kernel, D, D), np.float32)


IMAGES = np.ones((2, 8, 8, D), np.float32)
EVERY = {"first_layer": True, "last_layer": True}
# A function, its weights and data, the recipe, and what is said of some products.
REASONS = [
  (mlp, W, X, {}, [(0, "first layer"), (-1, "last layer")]),
  (
    mlp,
    W,
    X,
    {},
    [(i, "an FP8 product (current scaling, E4M3FN forward, E5M2 backward)") for i in (1, 2, 3)],
  ),
  (attention, SIX, X, {}, [(i, "two activations") for i in (4, 5)]),
  (mlp, weights(D, D, 40, D, D), X, {}, [(1, "M=32 x K=32 x N=40: N is not a mul")]),
  (mlp, W, X[:8], {}, [(1, "M=8 x K=32 x N=32: M is not a multiple of 16")]),
  (mlp, W, X, {"min_dim": 64}, [(1, "smaller than fp8.min_dim=64")]),
  (mlp, W, jax.ShapeDtypeStruct((*jax.export.symbolic_shape("n"), D), jnp.float32), {}, [(1, "symbolic")]),
  (FUNCTIONS["custom_vjp"][0], W, X, {}, [(1, "custom derivative rule")]),
  *((*conv(kernel), IMAGES, EVERY, [(0, "not FP8: it is a convolution")]) for kernel in (1, 2, 3)),
]


def test_reasons():
  for fun, w, x, options, said in REASONS:
    rows = products(fun, w, x, policy=fp8(**options))
    assert [(i, words) for i, words in said if words not in rows[i].why] == []
    assert {rows[i].after for i, words in said if words.startswith("not FP8")} <= {"bfloat16"}


# Modules

SEQUENCE = np.arange(2 * D).reshape(2, D) % D


class Linen(nn.Module):
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, tokens):
    x = nn.Embed(D, D, name="embed", dtype=self.dtype)(tokens)
    x = x + nn.MultiHeadDotProductAttention(2, name="attn", dtype=self.dtype)(x)
    x = nn.gelu(nn.Dense(D, name="up", dtype=self.dtype)(x))
    return nn.Dense(D, name="head", dtype=self.dtype)(x)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_linen(dtype):
  model = Linen(dtype)
  variables = jax.eval_shape(model.init, jax.random.key(0), SEQUENCE)
  found = {path.removesuffix("/dropout"): k for path, k in by_path(model.apply, variables, SEQUENCE).items()}
  ends = {f"Linen/attn/{name}": "8" for name in ("query", "key", "value", "out")}
  assert found == {**ends, "Linen/attn": "bb", "Linen/up": "8", "Linen/head": "b"}


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


# Overrides, and which of the modules are FP8 under them.
CHOSEN = [
  ({"layers/1": "fp8", ".*": "bf16"}, {"layers/1"}),
  ({".*/attn": "bf16"}, {"layers/0", "layers/1"}),
  ({".*/attn/query": "fp8", "attn": "bf16"}, {"attn/query", "layers/0", "layers/1"}),
]


def test_modules_chosen_by_path():
  model = Nnx(nnx.Rngs(0))
  for overrides, expected in CHOSEN:
    found = by_path(model, SEQUENCE, policy=fp8(overrides))
    assert {path for path, kind in found.items() if kind == "8"} == {f"Nnx/{p}" for p in expected}, overrides
  assert by_path(model, SEQUENCE, policy=fp8({"layers/1": "fp32"}))["Nnx/layers/1"] == "f"


# The last layers

TEN = weights(*[D] * 11)
STACK = (TEN[0], np.stack(TEN[1:9]), TEN[9])
# keep_last, and the kinds of ten products with a weight, unrolled and with eight in a scan.
KEPT = [
  (0, "8888888888", "888"),
  (0.15, "88888888bb", "88b"),
  (0.9, "8bbbbbbbbb", "8bb"),
  (1, "bbbbbbbbbb", "bbb"),
]


@pytest.mark.parametrize(("share", "unrolled", "scanned"), KEPT)
def test_the_last_share_of_products_with_a_weight_stays(share, unrolled, scanned):
  policy = fp8(keep_last=share, **EVERY)
  scan = FUNCTIONS["scan"][0]
  assert kinds(mlp, TEN, X, policy=policy) == unrolled
  assert kinds(scan, STACK, X, policy=policy) == scanned
  # Of a whole step, too: the backward products of a layer that stays in bfloat16 stay with it.
  for fun, w, forward in ((mlp, TEN, unrolled), (scan, STACK, scanned)):
    step = lambda w, x, fun=fun: jax.grad(lambda w, x: mean_of(fun)(w, x), (0, 1))(w, x)
    found = kinds(step, w, X, policy=policy)
    assert found.count("8") == 3 * forward.count("8"), found
    assert found.startswith(forward)


def test_nvfp4_keeps_the_last_layers_and_says_so():
  rows = products(mlp, TEN, X, policy=fp8(recipe="nvfp4", **EVERY))
  assert [row.after for row in rows] == ["float4_e2m1fn"] * 8 + ["bfloat16"] * 2
  assert "fp8.keep_last=0.15" in rows[-1].why


# Derivatives


POLICIES = jax.checkpoint_policies


def test_a_checkpoint_policy_that_keeps_products_keeps_fp8_ones():
  for policy, again in (
    (None, 3),
    (POLICIES.dots_saveable, 0),
    (POLICIES.dots_with_no_batch_dims_saveable, 0),
  ):
    fun = jax.checkpoint(loss, policy=policy)
    assert len(traced(jax.grad(mpjax.autocast(fun, fp8())), W, X)) == 9 + again, policy
  for recompute in ("islands", "nothing"):
    assert len(traced(jax.grad(mpjax.autocast(loss, fp8(), recompute=recompute)), W, X)) == 9, recompute


# Values


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs skip_file_prefixes of warnings")
def test_the_warning_names_the_users_line():
  with pytest.warns(UserWarning, match="no FP8 units") as said:
    mpjax.autocast(loss, "fp8")(weights(*[128] * 4), normal(128, 128))
  assert said[0].filename == __file__


@pytest.mark.parametrize("policy", ["fp8", {"base": "fp8", "fp8": {"recipe": "mx", "min_dim": 16}}], ids=str)
def test_without_units_fp8_is_bfloat16_and_says_so(policy):
  w, x = weights(*[128] * 4), normal(128, 128)
  with pytest.warns(
    UserWarning, match=r"cpu has no FP8 units: they run in bfloat16 instead.*emulate: true"
  ) as said:
    out = jit(jax.value_and_grad(mpjax.autocast(loss, policy)))(w, x)
  assert len(said) == 1
  half = jit(jax.value_and_grad(mpjax.autocast(loss, "bf16")))(w, x)
  jax.tree.map(np.testing.assert_array_equal, out, half)
  rows = products(loss, w, x, policy=policy)
  assert {row.after for row in rows} == {"bfloat16"}
  assert all("emulate: true" in row.why for row in rows)


@pytest.mark.parametrize("recipe", ["current", "mx", "delayed"])
def test_what_is_not_finite_reaches_the_loss_scale(recipe):
  policy = {**fp8(recipe=recipe), "compute_dtype": "float16", "loss_scaling": {"init_scale": 2.0**10}}
  of = lambda w, batch: loss([w["first"], w["inner"], w["last"]], batch)
  step = mpjax.make_train_step(of, optax.adam(1e-2), policy, donate=False)
  state = step.init(dict(zip(("first", "inner", "last"), W, strict=False)), batch=X)
  state, metrics = step(state, X)
  assert bool(metrics["grads_finite"])
  for where, bad in (("input", np.nan), ("input", np.inf), ("weight", -np.inf)):
    x, inner = X.copy(), np.array(state.params["inner"])
    (x if where == "input" else inner)[3, 5] = bad
    given = state.replace(params={**state.params, "inner": inner})
    after, metrics = step(given, x)
    assert not bool(metrics["grads_finite"]), (where, bad)
    jax.tree.map(
      np.testing.assert_array_equal, (after.params, after.fp8_state), (given.params, given.fp8_state)
    )
    assert float(after.opt_state.scale) == float(state.opt_state.scale) / 2


def test_output_and_gradient_dtypes():
  out, grads = jax.eval_shape(jax.value_and_grad(mpjax.autocast(loss, fp8())), W, X)
  assert {a.dtype.name for a in jax.tree.leaves((out, grads))} == {"float32"}
  made = lambda fun: sorted(e.params["spec"].out_dtype.name for e in named("fp8_dot_general", fun, W, X))
  assert made(mpjax.autocast(mlp, fp8())) == ["bfloat16"] * 3
  grad = jax.grad(mpjax.autocast(loss, fp8()))  # of float32 weights it is float32, of activations not
  assert made(grad) == ["bfloat16"] * 6 + ["float32"] * 3
  assert made(mpjax.autocast(mlp, {**fp8(), "accum_dtype": "float32"})) == ["float32"] * 3
