"""Which parameters may cross devices in a narrower dtype: those that nothing reads in a wider one."""

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.step._gather_dtypes import read_in  # programs that no mesh is needed for

W = X = np.ones((8, 8), np.float32)
half = lambda w: w.astype(jnp.bfloat16)
product = lambda w, x: half(w) @ half(x)


@jax.custom_vjp
def with_rule(w, x):
  return product(w, x)


with_rule.defvjp(lambda w, x: (with_rule(w, x), (w, x)), lambda kept, g: (g @ kept[1], kept[0] @ g))


@jax.custom_vjp
def narrow_in_its_rule(w, x):
  return product(w, x)


narrow_in_its_rule.defvjp(lambda w, x: (half(w) @ half(x), (half(w), x)), lambda kept, g: (g @ kept[1], g))


def loop(step, first, rows=None):
  return jax.lax.scan(
    lambda x, row: (step(x, row), None), first, rows, length=None if rows is not None else 2
  )[0]


def head(w, x):
  return mpjax.linear_cross_entropy(x, w, jnp.arange(8), rows=4)


def either(w, x, other):
  return jax.lax.cond(x[0, 0] > 0, half, other, w)


PROGRAMS = {
  "cast": (product, "bfloat16"),
  "cast twice": (lambda w, x: product(w, x) + half(w), "bfloat16"),
  "moved, then cast": (lambda w, x: half(w.T.reshape(64)[:8]) * half(x[0]), "bfloat16"),
  "read as it is, too": (lambda w, x: product(w, x).astype(jnp.float32) + w, None),
  "in two dtypes": (lambda w, x: (product(w, x), w.astype(jnp.float16)), None),
  "returned": (lambda w, x: (product(w, x), w), None),
  "inside jit": (jax.jit(product), "bfloat16"),
  "inside jit and outside": (lambda w, x: jax.jit(half)(w).sum() + w.sum(), None),
  "inside checkpoint": (jax.checkpoint(product), "bfloat16"),
  "a constant of a loop": (lambda w, x: loop(lambda x, _: half(w) @ x, half(x)), "bfloat16"),
  "rows of a loop": (lambda w, x: loop(lambda x, row: x * half(row), half(x[0]), w), "bfloat16"),
  "carried by a loop": (lambda w, x: loop(lambda w, _: w * 1.0, w) @ x, None),
  "in both branches": (lambda w, x: either(w, x, lambda w: half(w) * 2), "bfloat16"),
  "in one branch as it is": (lambda w, x: either(w, x, lambda w: half(w * 2)), None),
  "kept by a rule of its own": (with_rule, None),
  "kept narrow by a rule of its own": (narrow_in_its_rule, "bfloat16"),
  "by the loss of a large vocabulary": (mpjax.autocast(head, "bf16"), "bfloat16"),
  "under a derivative": (
    lambda w, x: jax.grad(lambda w: jnp.square(product(w, x)).sum().astype(jnp.float32))(w),
    "bfloat16",
  ),
  "not at all": (lambda w, x: x, None),
}


def narrower(dtype):
  return dtype.name if dtype is not None and dtype.itemsize < 4 else None


def test_a_parameter_is_narrow_where_every_read_is():
  for name, (program, expected) in PROGRAMS.items():
    assert narrower(*read_in(jax.make_jaxpr(lambda w, x, of=program: of(w, x))(W, X), [0])) == expected, name


def test_under_autocast_products_are_narrow_and_islands_are_not():
  loss = lambda product, fixed, x: jax.nn.softmax(x @ product * fixed.astype(jnp.float32)).sum()
  closed = jax.make_jaxpr(mpjax.autocast(loss, "bf16"))(W, W, X)
  # The program's own float32 stays.
  assert [*map(narrower, read_in(closed, [0, 1]))] == ["bfloat16", None]
