"""`custom_jvp`, `custom_vjp` and `custom_vmap` under `mpjax.autocast`: the user's rules stay in force."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import jit, named, run_together

W = jnp.asarray(normal(4, 4, scale=0.5))
X = jnp.asarray(normal(8, 4, seed=1))
HALF = {"bf16": "bf16", "fp16": "f16"}
BF16 = mpjax.autocast(policy="bf16")


# Each rule gives a derivative that is wrong by a factor of 7, so that it shows which one was used.


def jvp_elementwise():
  f = jax.custom_jvp(jnp.sin)
  f.defjvp(lambda primals, tangents: (f(*primals), 7 * tangents[0]))
  return lambda w, x: f(x @ w)


def jvp_with_products():
  f = jax.custom_jvp(lambda w, x: jnp.tanh(x @ w))
  f.defjvp(lambda p, t: (f(*p), 7 * (p[1] @ t[0] + t[1] @ p[0])))
  return f


def jvp_by_argument():
  f = jax.custom_jvp(lambda w, x: jnp.exp(x @ w))
  f.defjvps(lambda t, out, w, x: 7 * (x @ t), lambda t, out, w, x: out * (t @ w))
  return f


def jvp_with_integers():
  f = jax.custom_jvp(lambda w, i, x: (x @ w) * i)
  f.defjvp(lambda p, t: (f(*p), 7 * (t[2] @ p[0]) + 7 * p[2] @ t[0]))
  return lambda w, x: f(w, jnp.arange(4), x)


def jvp_nondiff():
  @functools.partial(jax.custom_jvp, nondiff_argnums=(0, 2))
  def f(function, x, n):
    return function(x) * n

  f.defjvp(lambda function, n, p, t: (f(function, p[0], n), 7 * t[0]))
  return lambda w, x: f(jnp.tanh, x @ w, 2)


def jvp_symbolic_zeros():
  f = jax.custom_jvp(lambda w, x: x @ w)

  def rule(primals, tangents):
    zero = jax.custom_derivatives.SymbolicZero
    w, x = primals
    parts = [7 * (x @ tangents[0])] if type(tangents[0]) is not zero else []
    parts += [tangents[1] @ w] if type(tangents[1]) is not zero else []
    return f(w, x), sum(parts)

  f.defjvp(rule, symbolic_zeros=True)
  return f


def vjp_elementwise():
  f = jax.custom_vjp(jnp.sin)
  f.defvjp(lambda x: (jnp.sin(x), None), lambda _, g: (7 * g,))
  return lambda w, x: f(x @ w)


def vjp_with_products():
  f = jax.custom_vjp(lambda w, x: jnp.tanh(x @ w))
  f.defvjp(lambda w, x: (f(w, x), (w, x)), lambda r, g: (7 * r[1].T @ g, 7 * g @ r[0].T))
  return f


def vjp_with_integers():
  f = jax.custom_vjp(lambda w, i, x: (x @ w) * i)
  f.defvjp(lambda w, i, x: (f(w, i, x), (w, i, x)), lambda r, g: (7 * r[2].T @ g, None, g @ r[0].T))
  return lambda w, x: f(w, jnp.arange(4), x)


def vjp_nondiff():
  @functools.partial(jax.custom_vjp, nondiff_argnums=(0, 2))
  def f(function, x, n):
    return function(x) * n

  f.defvjp(lambda function, x, n: (function(x) * n, x), lambda function, n, x, g: (7 * g * n,))
  return lambda w, x: f(jnp.tanh, x @ w, 2)


def vjp_symbolic_zeros():
  f = jax.custom_vjp(lambda w, x: (x @ w, x.sum()))

  def backward(r, g):
    zero = jax.custom_derivatives.SymbolicZero
    g = [jnp.zeros(g.shape, g.dtype) if type(g) is zero else g for g in g]
    return 7 * r[1].T @ g[0], g[0] @ r[0].T + g[1]

  f.defvjp(lambda w, x: (f(w.value, x.value), (w.value, x.value)), backward, symbolic_zeros=True)
  return lambda w, x: f(w, x)[0]


def vjp_with_constant():
  mask = np.tri(8, 4, dtype=bool)
  f = jax.custom_vjp(lambda w, x: (x @ w) * mask)
  f.defvjp(lambda w, x: ((x @ w) * mask, (w, x)), lambda r, g: (7 * r[1].T @ (g * mask), g @ r[0].T))
  return f


def vjp_of_trees():
  f = jax.custom_vjp(lambda p, x: {"y": x @ p["w"], "n": jnp.sum(x)})
  f.defvjp(
    lambda p, x: (f(p, x), (p, x)), lambda r, g: ({"w": 7 * r[1].T @ g["y"]}, g["y"] @ r[0]["w"].T + g["n"])
  )
  return lambda w, x: f({"w": w}, x)["y"]


def straight_through():
  f = jax.custom_vjp(lambda x: jnp.round(x))
  f.defvjp(lambda x: (jnp.round(x), None), lambda _, g: (7 * g,))
  return lambda w, x: f(x @ w * 4) @ w


def gradient_clip():
  f = jax.custom_vjp(lambda bound, x: x)
  f.defvjp(lambda bound, x: (x, bound), lambda bound, g: (None, jnp.clip(7 * g, -bound, bound)))
  return lambda w, x: f(0.25, x @ w) @ w


def custom_gradient():
  @jax.custom_gradient
  def f(x):
    return jnp.exp(x), lambda g: 7 * g

  return lambda w, x: f(x @ w)


RULES = (
  jvp_elementwise,
  jvp_with_products,
  jvp_by_argument,
  jvp_with_integers,
  jvp_nondiff,
  jvp_symbolic_zeros,
  vjp_elementwise,
  vjp_with_products,
  vjp_with_integers,
  vjp_nondiff,
  vjp_symbolic_zeros,
  vjp_with_constant,
  vjp_of_trees,
  straight_through,
  gradient_clip,
  custom_gradient,
)  # fmt: skip
CONTEXTS = {
  "alone": lambda f: f,
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, x: (c + f(w, x), None), jnp.zeros((8, 4)), x[None])[0],
  "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x])).sum(0),
}  # fmt: skip


@pytest.mark.parametrize("policy", HALF)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rules_stay_in_force(rule, policy):
  functions = {}
  for name, context in CONTEXTS.items():
    f = context(rule())
    functions[name], functions[f"{name}, cast"] = both(f), both(mpjax.autocast(f, policy))
  results, products = run_together(functions, W, X)
  # Rounding to whole numbers magnifies an error.
  tolerance = TOLERANCE[policy] * (10 if rule is straight_through else 2)
  for name in CONTEXTS:
    assert [*leaf_failures("result", results[f"{name}, cast"], results[name], tolerance)] == [], name
    assert products[f"{name}, cast"] == {f"{HALF[policy]} {HALF[policy]}"}, name


def both(f):
  """The sum of what `f` gives, and its gradients."""
  return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)), (0, 1))


@pytest.mark.parametrize("rule", [r for r in RULES if "jvp" in r.__name__], ids=lambda rule: rule.__name__)
def test_rules_in_forward_mode(rule):
  f = rule()
  ones = (jnp.ones_like(W), jnp.ones_like(X))
  results = jit(lambda w, x: [jax.jvp(g, (w, x), ones) for g in (BF16(f), f)])(W, X)
  assert [*leaf_failures("result", *results, 2 * TOLERANCE["bf16"])] == []


def test_a_rule_has_a_rule():
  f = jax.custom_jvp(lambda x: x @ W)
  g = jax.custom_jvp(lambda t: t @ W)
  f.defjvp(lambda p, t: (f(*p), 7 * g(t[0])))
  g.defjvp(lambda p, t: (g(*p), 3 * t[0]))
  both = lambda f: jit(jax.grad(lambda x: jax.jvp(f, (x,), (x,))[1].sum()))(X)
  assert [*leaf_failures("result", both(BF16(f)), both(f), TOLERANCE["bf16"])] == []


def test_the_rule_is_run_only_when_differentiated():
  ran = []
  f = jax.custom_vjp(lambda x: x @ W)
  f.defvjp(lambda x: (ran.append("forward"), (f(x), None))[1], lambda _, g: (ran.append("backward"), (g,))[1])
  jax.jit(BF16(f))(X)
  assert ran == []
  jax.grad(lambda x: BF16(f)(x).sum())(X)
  assert set(ran) == {"forward", "backward"}


def test_what_a_rule_sees_is_traced_in_float32():
  seen = set()
  f = jax.custom_vjp(lambda x: x @ W)

  def backward(residual, g):
    seen.update((residual.dtype, g.dtype))
    return (g @ W.T,)

  f.defvjp(lambda x: (f(x), x), backward)
  grad = jax.grad(lambda x: BF16(lambda x: f(x @ W))(x).sum())
  assert grad(X).dtype == np.float32
  assert seen == {np.dtype("float32")}


def test_custom_vmap_rule_is_used_under_vmap():
  @jax.custom_batching.custom_vmap
  def f(x, w):
    return x @ w

  @f.def_vmap
  def _(size, batched, x, w):
    assert batched == [True, False]
    assert x.dtype == w.dtype == np.float32
    return 7 * (x @ w), True

  rows = jnp.stack([X, 2 * X])
  for wrap in (lambda f: f, jax.jit, lambda f: lambda x: BF16(f)(x)):
    inside = jit(BF16(jax.vmap(wrap(lambda x: f(x, W)))))(rows)
    outside = jit(jax.vmap(BF16(wrap(lambda x: f(x, W)))))(rows)
    for got in (inside, outside):
      assert [*leaf_failures("output", got, 7 * rows @ W, TOLERANCE["bf16"])] == []
  unbatched = BF16(lambda x: f(x, W))
  assert [*leaf_failures("output", unbatched(X), X @ W, TOLERANCE["bf16"])] == []
  assert {str(e.invars[0].aval.dtype) for e in named("dot_general", jax.vmap(unbatched), rows)} == {
    "bfloat16"
  }


def test_custom_vmap_rule_with_trees_and_unbatched_results():
  @jax.custom_batching.custom_vmap
  def f(tree):
    return {"y": tree["x"] @ W, "one": jnp.ones(())}

  @f.def_vmap
  def _(size, batched, tree):
    return {"y": 7 * tree["x"] @ W, "one": jnp.ones(())}, {"y": True, "one": False}

  rows = jnp.stack([X, 2 * X])
  got = jax.vmap(BF16(lambda x: f({"x": x})))(rows)
  assert [*leaf_failures("output", got, {"y": 7 * rows @ W, "one": jnp.ones(2)}, TOLERANCE["bf16"])] == []
