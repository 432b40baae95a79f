"""Which parameters may cross devices in a narrower dtype: those that nothing reads in a wider one."""

import jax
import jax.numpy as jnp
import pytest

import mpjax
from mpjax.step._gather_dtypes import read_in


def narrower(dtype):
  return dtype.name if dtype is not None and dtype.itemsize < 4 else None


W = jnp.ones((8, 8))
X = jnp.ones((8, 8))
half = lambda w: w.astype(jnp.bfloat16)


@jax.custom_vjp
def with_rule(w, x):
  return half(w) @ half(x)


with_rule.defvjp(lambda w, x: (with_rule(w, x), (w, x)), lambda kept, g: (g @ kept[1], kept[0] @ g))


@jax.custom_vjp
def narrow_in_its_rule(w, x):
  return half(w) @ half(x)


narrow_in_its_rule.defvjp(lambda w, x: (half(w) @ half(x), (half(w), x)), lambda kept, g: (g @ kept[1], g))


def scanned(w, x):
  return jax.lax.scan(lambda x, _: (half(w) @ x, None), half(x), length=2)[0]


def over_rows(w, x):
  return jax.lax.scan(lambda x, row: (x * half(row), None), half(x[0]), w)[0]


def head(w, x):
  return mpjax.linear_cross_entropy(x, w, jnp.arange(8), rows=4)


def carried(w, x):
  return jax.lax.scan(lambda w, _: (w * 1.0, None), w, length=2)[0] @ x


PROGRAMS = {
  "cast": (lambda w, x: half(w) @ half(x), "bfloat16"),
  "cast twice": (lambda w, x: half(w) @ half(x) + half(w), "bfloat16"),
  "moved, then cast": (lambda w, x: half(w.T.reshape(64)[:8]) * half(x[0]), "bfloat16"),
  "read as it is, too": (lambda w, x: (half(w) @ half(x)).astype(jnp.float32) + w, None),
  "in two dtypes": (lambda w, x: (half(w) @ half(x), w.astype(jnp.float16)), None),
  "returned": (lambda w, x: (half(w) @ half(x), w), None),
  "inside jit": (jax.jit(lambda w, x: half(w) @ half(x)), "bfloat16"),
  "inside jit and outside": (lambda w, x: jax.jit(half)(w).sum() + w.sum(), None),
  "inside checkpoint": (jax.checkpoint(lambda w, x: half(w) @ half(x)), "bfloat16"),
  "a constant of a loop": (scanned, "bfloat16"),
  "rows of a loop": (over_rows, "bfloat16"),
  "carried by a loop": (carried, None),
  "in both branches": (lambda w, x: jax.lax.cond(x[0, 0] > 0, half, lambda w: half(w) * 2, w), "bfloat16"),
  "in one branch as it is": (lambda w, x: jax.lax.cond(x[0, 0] > 0, half, lambda w: half(w * 2), w), None),
  "kept by a rule of its own": (with_rule, None),
  "kept narrow by a rule of its own": (narrow_in_its_rule, "bfloat16"),
  "by the loss of a large vocabulary": (lambda w, x: mpjax.autocast(head, "bf16")(w, x), "bfloat16"),
  "under a derivative": (lambda w, x: jax.grad(lambda w: (half(w) @ half(x)).sum().astype(jnp.float32))(w), "bfloat16"),
  "not at all": (lambda w, x: x, None),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_parameter_is_narrow_where_every_read_is(name):
  program, expected = PROGRAMS[name]
  assert narrower(*read_in(jax.make_jaxpr(program)(W, X), [0])) == expected


def test_under_autocast_products_are_narrow_and_islands_are_not():
  def loss(p, x):
    x = x @ p["product"]
    return jax.nn.softmax(x * p["fixed"].astype(jnp.float32)).sum()

  params = {name: jnp.ones((8, 8)) for name in ("fixed", "product")}
  names = sorted(params)
  flat = lambda x, *leaves: mpjax.autocast(loss, "bf16")(dict(zip(names, leaves, strict=True)), x)
  closed = jax.make_jaxpr(flat)(X, *(params[name] for name in names))
  found = dict(zip(names, read_in(closed, [1, 2]), strict=True))
  # The program's own float32 stays.
  assert {name: narrower(dtype) for name, dtype in found.items()} == {"product": "bfloat16", "fixed": None}
