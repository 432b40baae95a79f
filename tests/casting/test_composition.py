"""`mpjax.autocast` composes with JAX's transformations, in any order and nesting, and with itself."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._conformance import TOLERANCE, exact, leaf_failures, normal
from tests.casting._jaxprs import jit, lowered_products, products, run_together

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
BF16 = mpjax.autocast(policy="bf16")
FP16 = mpjax.autocast(policy="fp16")
FP32 = mpjax.autocast(policy="fp32")


def layer(w, x):
  """A product, an island and a residual: x's shape in, x's shape out."""
  return x + jax.nn.softmax(jnp.tanh(x @ w)) * 0.5


def scanned(f):
  return lambda w, x: jax.lax.scan(lambda c, y: (f(w, c) * y, c.sum()), x, jnp.ones((3, 1)))


def loop(f):
  return lambda w, x: jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1]


def with_jvp(f):
  g = jax.custom_jvp(lambda w, x: f(w, x))
  g.defjvp(lambda primals, tangents: jax.jvp(f, primals, tangents))
  return g


def with_vjp(f):
  g = jax.custom_vjp(lambda w, x: f(w, x))
  g.defvjp(lambda w, x: (f(w, x), (w, x)), lambda r, g: jax.vjp(f, *r)[1](g))
  return g


def sharded(f):
  mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))


def mapped(f):
  """Over devices by `pmap`."""
  return lambda w, x: jax.pmap(f, in_axes=(None, 0))(w, x[:, None])[:, 0]


total = lambda f: lambda w, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(w, x)))
TRANSFORMS = {
  "jit": jax.jit,
  "grad": lambda f: jax.grad(total(f)),
  "value_and_grad": lambda f: jax.value_and_grad(total(f), argnums=(0, 1)),
  "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x[:4], x)),
  "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](x[:4], x),
  "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](x),
  "hessian": lambda f: jax.hessian(total(f)),
  "grad of grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(total(f))(w, x) ** 2)),
  "vmap": lambda f: jax.vmap(f, (None, 0)),
  "scan": scanned,
  "while_loop": loop,
  "fori_loop": lambda f: lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: f(w, x), x),
  "map": lambda f: lambda w, x: jax.lax.map(lambda row: f(w, row), x, batch_size=4),
  "cond": lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 5, lambda x: x, lambda x: f(w, x), x),
  "switch": lambda f: lambda w, x: jax.lax.switch(x.astype(int)[0, 0] * 0 + 1, [lambda w, x: x, f, f], w, x),
  "checkpoint": jax.checkpoint,
  "custom_jvp": with_jvp,
  "custom_vjp": with_vjp,
  "shard_map": sharded,
  "pmap": mapped,
}
COMPOSITIONS = [(name,) for name in TRANSFORMS] + [
  ("grad", "scan"),
  ("grad", "checkpoint"),
  ("grad", "cond"),
  ("grad", "switch"),
  ("grad", "jit"),
  ("grad", "custom_jvp"),
  ("grad", "custom_vjp"),
  ("grad", "shard_map"),
  ("grad", "map"),
  ("value_and_grad", "vmap"),
  ("jvp", "scan"),
  ("jvp", "while_loop"),
  ("jvp", "custom_jvp"),
  ("linearize", "cond"),
  ("vjp", "fori_loop"),
  ("scan", "checkpoint"),
  ("scan", "vmap"),
  ("vmap", "custom_vjp"),
  ("vmap", "scan"),
  ("vmap", "jit"),
  ("checkpoint", "scan"),
  ("while_loop", "switch"),
  ("shard_map", "scan"),
  ("hessian", "scan"),
  ("hessian", "custom_jvp"),
  ("jit", "grad", "scan", "checkpoint"),
  ("grad", "scan", "custom_vjp"),
  ("grad", "shard_map", "checkpoint", "scan"),
]


def compose(f, names):
  for name in reversed(names):
    f = TRANSFORMS[name](f) if name != "autocast" else BF16(f)
  return f


@pytest.mark.parametrize("names", COMPOSITIONS, ids=" of ".join)
def test_composes_in_any_order(names):
  positions = {0, len(names) // 2 + (len(names) > 1), len(names)}
  casts = {f"at {i}": compose(layer, (*names[:i], "autocast", *names[i:])) for i in positions}
  results, products = run_together({"plain": compose(layer, names), **casts}, W, X)
  for i in casts:
    assert [*leaf_failures("output", results[i], results["plain"], 2 * TOLERANCE["bf16"])] == [], i
    assert products[i] == {"bf16 bf16"}, i


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_fp32_is_bitwise_the_identity(name):
  f = TRANSFORMS[name](layer)
  want, *results = jit(lambda w, x: [g(w, x) for g in (f, FP32(f), TRANSFORMS[name](FP32(layer)))])(W, X)
  for got in results:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      assert a.dtype == b.dtype
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_eager_calls_and_eager_gradients():
  got, want = (jax.value_and_grad(total(f))(W, X) for f in (BF16(layer), layer))
  assert [*leaf_failures("output", got, want, TOLERANCE["bf16"])] == []
  per_row = jax.vmap(BF16(lambda x: jax.nn.softmax(x @ W)))(X)
  assert [*leaf_failures("output", per_row, jax.nn.softmax(X @ W), TOLERANCE["bf16"])] == []


@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("transform", ["jit", "grad", "scan", "custom_vjp"])
def test_twice_is_once(policy, transform):
  cast = mpjax.autocast(policy=policy)
  f = TRANSFORMS[transform](layer)
  results, products = run_together({"once": cast(f), "twice": cast(cast(f))}, W, X)
  assert products["once"] == products["twice"]
  jax.tree.map(np.testing.assert_array_equal, results["once"], results["twice"])


NESTED = {  # the dtypes of the three products a (outer), b (inner), c (outer)
  "fp16 in bf16": (BF16, FP16, ["bf16", "f16", "bf16"]),
  "bf16 in fp16": (FP16, BF16, ["f16", "bf16", "f16"]),
  "fp32 in bf16": (BF16, FP32, ["bf16", "f32", "bf16"]),
  "full_precision in fp16": (FP16, mpjax.full_precision, ["f16", "f32", "f16"]),
  "bf16 in full_precision": (mpjax.full_precision, BF16, ["f32", "bf16", "f32"]),
  "bf16 in fp32": (FP32, BF16, ["f32", "bf16", "f32"]),
  "nothing in bf16": (BF16, lambda f: f, ["bf16", "bf16", "bf16"]),
}


@pytest.mark.parametrize("wrapping", ["plain", "jit", "scan", "checkpoint", "grad"])
@pytest.mark.parametrize("name", NESTED)
def test_the_innermost_policy_wins(name, wrapping):
  outer, inner, want = NESTED[name]
  wrap = TRANSFORMS.get(wrapping, lambda f: f) if wrapping != "grad" else lambda f: f
  # Told apart by their numbers of columns.
  a, b, c = (normal(4, n, scale=0.5, seed=n) for n in (5, 6, 7))
  product = lambda w: lambda _, x: (x @ w)[..., :4] + x

  def f(_, x):
    x = product(a)(None, x)
    x = inner(wrap(product(b)))(W, x)
    return product(c)(None, x[0] if isinstance(x, tuple) else x)

  run = outer(f)
  if wrapping == "grad":
    run = lambda w, x: jax.grad(lambda x: jnp.sum(outer(f)(w, x) ** 2))(x)
  found = {}
  for dtype, width in product_dtypes_by_columns(run, W, X):
    found.setdefault(width, set()).add(dtype)
  assert [found[n] for n in (5, 6, 7)] == [{dtype} for dtype in want]


def product_dtypes_by_columns(fun, *args):
  text = jax.jit(fun).trace(*args).lower(lowering_platforms=("tpu",)).as_text()
  pattern = r"stablehlo\.dot_general .*: \(tensor<([^>]*)>, tensor<([^>]*)>\) -> tensor<([^>]*)>"
  for found in re.finditer(pattern, text):
    shapes = [group.split("x") for group in found.groups()]
    (width,) = {n for *shape, _ in shapes for n in shape} & {"5", "6", "7"}
    for *_, dtype in shapes[:2]:
      yield dtype, int(width)


# Caches: JAX remembers traces by function and types, and must not mix up policies.


class Model:
  """A method that is jitted once, as users do."""

  @functools.partial(jax.jit, static_argnums=0)
  def method(self, x):
    return x @ W


@jax.custom_vjp
def squared(x):
  return x @ x


squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * g @ x.T,))
JITTED = jax.jit(lambda x: x @ W)
CACHED = {
  "jit": JITTED,
  "partial of jit": functools.partial(jax.jit(lambda w, x: x @ w), W),
  "method": Model().method,
  "checkpoint": jax.checkpoint(lambda x: x @ W),
  "jit of checkpoint of jit": jax.jit(jax.checkpoint(JITTED)),
  "vmap of jit": jax.vmap(JITTED),
  "grad of jit": jax.grad(lambda x: JITTED(x).sum()),
  "scan of jit": lambda x: jax.lax.scan(lambda c, y: (JITTED(c), None), x, None, length=2)[0],
  "cond of jit": lambda x: jax.lax.cond(x[0, 0] > 0, JITTED, lambda x: x, x),
  "custom_vjp": squared,
  "jit of grad of custom_vjp": jax.jit(jax.grad(lambda x: squared(x).sum())),
}


@pytest.mark.parametrize("name", CACHED)
def test_no_policy_gets_the_program_of_another(name):
  f, x = CACHED[name], X[:4]
  want = {"bf16": {"bf16"}, "fp16": {"f16"}, "fp32": {"f32"}, None: {"f32"}}
  for policy in (None, "bf16", "fp16", "fp32", "bf16", None, "fp16"):
    cast = f if policy is None else mpjax.autocast(f, policy)
    assert products(cast, x) == want[policy], policy
    assert products(jax.jit(cast), x) == want[policy], policy
    cast(x)


def test_one_jitted_function_with_the_policy_as_static_argument():
  step = jax.jit(lambda policy, x: mpjax.autocast(lambda x: x @ W, policy)(x), static_argnums=0)
  for policy, dtype in (("bf16", "bf16"), ("fp16", "f16"), ("fp32", "f32"), ("bf16", "bf16")):
    assert f"tensor<4x4x{dtype}>) ->" in step.lower(policy, X).as_text()


# Closures


def test_closed_over_arrays_and_tracers():
  constant = jnp.asarray(W)

  def loss(w, x):
    inside = BF16(lambda y: jnp.sum((y @ w) @ constant))  # w and x are tracers of grad and of jit
    return inside(x)

  got = jit(jax.grad(loss, (0, 1)))(W, X)
  want = jax.grad(lambda w, x: jnp.sum((x @ w) @ constant), (0, 1))(W, X)
  assert [*leaf_failures("gradient", got, want, TOLERANCE["bf16"])] == []
  assert set(lowered_products(jax.grad(loss, (0, 1)), W, X)) == {"bf16 bf16"}
  rows = jit(jax.vmap(lambda w: BF16(lambda x: x @ w)(X)))(np.stack([W, 2 * W]))
  assert [*leaf_failures("output", rows, np.stack([X @ W, X @ W * 2]), TOLERANCE["bf16"])] == []


def test_captured_by_a_jitted_function_inside():
  w = jnp.asarray(exact(W))

  def f(x):
    scale = x.sum()
    return jax.jit(lambda y: y @ w * scale)(x)

  got, want = jit(BF16(f))(X), f(X)
  assert [*leaf_failures("output", got, want, TOLERANCE["bf16"])] == []
