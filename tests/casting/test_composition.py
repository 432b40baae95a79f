"""`mpjax.autocast` composes with JAX's transformations, in any order and nesting, and with itself."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import mpjax
from tests.casting._conformance import TOLERANCE, exact, leaf_failures, normal
from tests.casting._jaxprs import multiplied, named, operands, products, run_together

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
BF16 = mpjax.autocast(policy="bf16")
FP16 = mpjax.autocast(policy="fp16")
FP32 = mpjax.autocast(policy="fp32")


def layer(w, x):
  """A product, an island and a residual: x's shape in, x's shape out."""
  return x + jax.nn.softmax(jnp.tanh(x @ w)) * 0.5


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


total = lambda f: lambda w, x: sum(jnp.sum(y**2) for y in jax.tree.leaves(f(w, x)))
TRANSFORMS = {
  "jit": jax.jit,
  "grad": lambda f: jax.grad(total(f)),
  "value_and_grad": lambda f: jax.value_and_grad(total(f), argnums=(0, 1)),
  "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x[:4], x)),
  "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](x[:4], x),
  "vjp": lambda f: lambda w, x: jax.vjp(f, w, x)[1](x),
  "grad_of_grad": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(total(f))(w, x) ** 2)),
  "vmap": lambda f: jax.vmap(f, (None, 0)),
  "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, y: (f(w, c) * y, c.sum()), x, jnp.ones((3, 1))),
  "while_loop": lambda f: lambda w, x: jax.lax.while_loop(
    lambda c: c[0] < 3, lambda c: (c[0] + 1, f(w, c[1])), (0, x))[1],
  "fori_loop": lambda f: lambda w, x: jax.lax.fori_loop(0, 3, lambda i, x: f(w, x), x),
  "map": lambda f: lambda w, x: jax.lax.map(lambda row: f(w, row), x, batch_size=4),
  "cond": lambda f: lambda w, x: jax.lax.cond(x[0, 0] > 5, lambda x: x, lambda x: f(w, x), x),
  "switch": lambda f: lambda w, x: jax.lax.switch(x.astype(int)[0, 0] * 0 + 1, [lambda w, x: x, f, f], w, x),
  "checkpoint": jax.checkpoint,
  "custom_jvp": with_jvp,
  "custom_vjp": with_vjp,
  "shard_map": sharded,
  "pmap": lambda f: lambda w, x: jax.pmap(f, in_axes=(None, 0))(w, x[:, None])[:, 0],
}  # fmt: skip
TYPES = """
  grad switch, grad jit, grad map, value_and_grad vmap, jvp scan, linearize cond, vjp fori_loop, scan checkpoint,
  scan vmap, vmap jit, checkpoint scan, while_loop switch, shard_map scan, jvp grad scan, jvp grad custom_jvp,
  jit grad scan checkpoint, grad shard_map checkpoint scan"""


def compose(f, names):
  for name in reversed(names):
    f = TRANSFORMS[name](f) if name != "autocast" else BF16(f)
  return f


def placed(composition):
  """`layer` in the transformations, and the same with autocast first, among them and last."""
  names = composition.split()
  positions = {0, len(names) // 2 + (len(names) > 1), len(names)}
  casts = {f"{composition} at {i}": compose(layer, [*names[:i], "autocast", *names[i:]]) for i in positions}
  return {f"{composition} at -": compose(layer, names), **casts}


def test_types_and_products_of_longer_compositions():
  for composition in TYPES.split(","):
    (_, plain), *casts = placed(composition).items()
    want = jax.eval_shape(plain, W, X)
    for name, cast in casts:
      jaxpr, got = jax.make_jaxpr(cast, return_shape=True)(W, X)
      assert got == want, name
      assert operands(jaxpr.jaxpr) == {"bf16 bf16"}, name


def test_fp32_is_the_identity():
  program = lambda f: re.sub("0x[0-9a-f]+", "", str(jax.make_jaxpr(f)(W, X)))
  for name, transform in TRANSFORMS.items():
    want = program(transform(layer))
    assert program(FP32(transform(layer))) == program(transform(FP32(layer))) == want, name


NESTED = [  # (outer, inner, dtypes of a product in the outer, one in the inner, and one in the outer again)
  (BF16, FP16, "bf16 f16 bf16"),
  (BF16, FP32, "bf16 f32 bf16"),
  (mpjax.full_precision, BF16, "f32 bf16 f32"),
  (FP32, BF16, "f32 bf16 f32"),
]


@pytest.mark.parametrize(("outer", "inner", "want"), NESTED)
def test_the_innermost_policy_wins(outer, inner, want):
  # Told apart by their numbers of columns.
  a, b, c = (normal(4, n, scale=0.5, seed=n) for n in (5, 6, 7))
  product = lambda w: lambda _, x: (x @ w)[..., :4] + x
  for name in ("jit", "scan", "checkpoint"):

    def f(x, wrap=TRANSFORMS[name]):
      x = inner(wrap(product(b)))(W, product(a)(None, x))
      return jnp.sum(product(c)(None, x[0] if isinstance(x, tuple) else x) ** 2)

    for run in (outer(f), jax.grad(outer(f))):
      found = {5: set(), 6: set(), 7: set()}
      for dot in named("dot_general", run, X):
        sizes = {n for v in (*dot.invars[:2], *dot.outvars) for n in v.aval.shape}
        (columns,) = sizes & found.keys()
        found[columns] |= set(multiplied(dot).split())
      assert [*found.values()] == [{dtype} for dtype in want.split()], name


class Model:
  """A method that is jitted once: JAX remembers traces by function and types, and must not mix up policies."""

  @functools.partial(jax.jit, static_argnums=0)
  def method(self, x):
    return x @ W


squared = jax.custom_vjp(lambda x: x @ x)
squared.defvjp(lambda x: (squared(x), x), lambda x, g: (2 * g @ x.T,))
JITTED = jax.jit(lambda x: x @ W)
CACHED = [
  JITTED,
  functools.partial(jax.jit(lambda w, x: x @ w), W),
  Model().method,
  jax.checkpoint(lambda x: x @ W),
  jax.jit(jax.checkpoint(JITTED)),
  jax.vmap(JITTED),
  jax.grad(lambda x: JITTED(x).sum()),
  lambda x: jax.lax.scan(lambda c, y: (JITTED(c), None), x, None, length=2)[0],
  lambda x: jax.lax.cond(x[0, 0] > 0, JITTED, lambda x: x, x),
  squared,
  jax.jit(jax.grad(lambda x: squared(x).sum())),
]


def test_no_policy_gets_the_program_of_another():
  for i, f in enumerate(CACHED):
    for policy in (None, "bf16", "fp16", "fp32", "bf16", None, "fp16"):
      cast = f if policy is None else mpjax.autocast(f, policy)
      want = {"bf16": {"bf16"}, "fp16": {"f16"}}.get(policy, {"f32"})
      assert products(cast, X[:4]) == products(jax.jit(cast), X[:4]) == want, (i, policy)
      if f is JITTED:  # an eager call in between
        cast(X[:4])
  step = jax.jit(lambda policy, x: mpjax.autocast(lambda x: x @ W, policy)(x), static_argnums=0)
  for policy, dtype in (("bf16", "bf16"), ("fp16", "f16"), ("fp32", "f32"), ("bf16", "bf16")):
    assert operands(step.trace(policy, X).jaxpr.jaxpr) == {f"{dtype} {dtype}"}


def test_closed_over_arrays_and_tracers():
  constant = jnp.asarray(exact(W))

  def captured(x):  # by a jitted function inside
    scale = x.sum()
    return jax.jit(lambda y: y @ constant * scale)(x)

  programs = {  # in which w and x are tracers of transformations outside
    "gradients": lambda cast: jax.grad(lambda w, x: cast(lambda y: jnp.sum((y @ w) @ constant))(x), (0, 1)),
    "rows": lambda cast: lambda w, x: jax.vmap(lambda w: cast(lambda x: x @ w)(x))(jnp.stack([w, 2 * w])),
    "captured": lambda cast: lambda w, x: cast(captured)(x),
  }
  plain = {f"plain {name}": program(lambda f: f) for name, program in programs.items()}
  results, found = run_together({name: program(BF16) for name, program in programs.items()} | plain, W, X)
  for name in programs:
    assert [*leaf_failures("output", results[name], results[f"plain {name}"], TOLERANCE["bf16"])] == [], name
    assert found[name] == {"bf16 bf16"}, name
