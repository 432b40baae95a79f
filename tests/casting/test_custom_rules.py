"""`custom_jvp`, `custom_vjp` and `custom_vmap` under `mpjax.autocast`: the user's rules stay in force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._conformance import TOLERANCE, leaf_failures, normal
from tests.casting._jaxprs import products, run_together

W = normal(4, 4, scale=0.5)
X = normal(8, 4, seed=1)
HALF = {"bf16": "bf16", "fp16": "f16"}
BF16 = mpjax.autocast(policy="bf16")


def with_jvp(fun, rule, **options):
  """`fun` with a rule, which makes its tangent of primals and tangents."""
  f = jax.custom_jvp(fun)
  f.defjvp(lambda primals, tangents: (f(*primals), rule(primals, tangents)), **options)
  return f


def with_vjp(fun, backward, forward=None, **options):
  """`fun` with a backward rule, which gets the operands, or what `forward` keeps, and the cotangent."""
  f = jax.custom_vjp(fun)
  f.defvjp(forward or (lambda *xs: (fun(*xs), xs)), backward, **options)
  return f


def jvp_with_symbolic_zeros(primals, tangents):
  w, x = primals
  zeros = [type(t) is jax.custom_derivatives.SymbolicZero for t in tangents]
  return sum(([] if zeros[0] else [7 * (x @ tangents[0])]) + ([] if zeros[1] else [tangents[1] @ w]))


def vjp_with_symbolic_zeros(r, g):
  zero = jax.custom_derivatives.SymbolicZero
  g = [jnp.zeros(g.shape, g.dtype) if type(g) is zero else g for g in g]
  return 7 * r[1].T @ g[0], g[0] @ r[0].T + g[1]


def branching_backward(residuals, g):
  x, w, is_steep = residuals
  return x.T @ (7 * g if is_steep else g), g @ w.T


after = lambda f: lambda w, x: f(x @ w)
between = lambda f: lambda w, x: f(x @ w) @ w
with_integers = lambda f: lambda w, x: f(w, jnp.arange(4), x)
MASK = np.tri(8, 4, dtype=bool)
# Each gives a derivative that is wrong by a factor of 7, so that it shows which rule was used.
RULES = {
  "jvp, elementwise": after(with_jvp(jnp.sin, lambda p, t: 7 * t[0])),
  "jvp, products": with_jvp(
    lambda w, x: jnp.tanh(x @ w), lambda p, t: 7 * (p[1] @ t[0] + t[1] @ p[0])),
  "jvp, integers": with_integers(with_jvp(
    lambda w, i, x: (x @ w) * i, lambda p, t: 7 * (t[2] @ p[0]) + 7 * p[2] @ t[0])),
  "jvp, symbolic zeros": with_jvp(lambda w, x: x @ w, jvp_with_symbolic_zeros, symbolic_zeros=True),
  "vjp, elementwise": after(with_vjp(jnp.sin, lambda _, g: (7 * g,), lambda x: (jnp.sin(x), None))),
  "vjp, products": with_vjp(
    lambda w, x: jnp.tanh(x @ w), lambda r, g: (7 * r[1].T @ g, 7 * g @ r[0].T)),
  "vjp, integers": with_integers(with_vjp(
    lambda w, i, x: (x @ w) * i, lambda r, g: (7 * r[2].T @ g, None, g @ r[0].T))),
  "vjp, symbolic zeros": lambda w, x: with_vjp(
    lambda w, x: (x @ w, x.sum()), vjp_with_symbolic_zeros,
    lambda w, x: ((x.value @ w.value, x.value.sum()), (w.value, x.value)), symbolic_zeros=True)(w, x)[0],
  "vjp, constant": with_vjp(
    lambda w, x: (x @ w) * MASK, lambda r, g: (7 * r[1].T @ (g * MASK), g @ r[0].T)),
  "straight through": lambda w, x: between(with_vjp(lambda x: jnp.round(x), lambda _, g: (7 * g,)))(w, 4 * x),
  "gradient clip": lambda w, x: with_vjp(
    lambda bound, x: x, lambda r, g: (None, jnp.clip(7 * g, -r[0], r[0])))(0.25, x @ w) @ w,
}  # fmt: skip
BRANCHING = with_vjp(lambda w, x: x @ w, branching_backward, lambda w, x: (x @ w, (x, w, True)))
CONTEXTS = {
  "jit": jax.jit,
  "checkpoint": jax.checkpoint,
  "scan": lambda f: lambda w, x: jax.lax.scan(lambda c, x: (c + f(w, x), None), 0 * x, x[None])[0],
  "vmap": lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, x])).sum(0),
}


def both(f):
  """The sum of what `f` gives, and its gradients."""
  return jax.value_and_grad(lambda w, x: jnp.sum(f(w, x)), (0, 1))


def compared(functions, policy, wrap=both):
  """Compares functions under autocast with themselves without it; all of their products are half precision."""
  pairs = {name: wrap(f) for name, f in functions.items()}
  pairs |= {f"{name}, cast": wrap(mpjax.autocast(f, policy)) for name, f in functions.items()}
  results, products = run_together(pairs, W, X)
  for name in functions:
    # Rounding to whole numbers magnifies an error.
    tolerance = TOLERANCE[policy] * (10 if name == "straight through" else 2)
    failures = leaf_failures("result", results[f"{name}, cast"], results[name], tolerance)
    assert [*failures] == [], name
    assert products[f"{name}, cast"] == {f"{HALF[policy]} {HALF[policy]}"}, name


@pytest.mark.parametrize("policy", HALF)
def test_rules_stay_in_force(policy):
  compared(RULES | {"a branch on what is kept": BRANCHING, "the same in jit": jax.jit(BRANCHING)}, policy)


def test_rules_stay_in_force_inside_of_calls():
  functions = {
    f"{name} in {place}": wrap(rule) for place, wrap in CONTEXTS.items() for name, rule in RULES.items()
  }
  compared({name: f for name, f in functions.items() if "integers" in name}, "bf16")
  for name, f in functions.items():
    assert products(both(BF16(f)), W, X) == {"bf16"}, name


def test_rules_in_forward_mode():
  ones = np.ones_like(W), np.ones_like(X)
  forward = lambda f: lambda w, x: jax.jvp(f, (w, x), ones)
  compared({name: rule for name, rule in RULES.items() if "jvp" in name}, "bf16", forward)


def test_the_rule_is_run_only_when_differentiated_and_sees_float32():
  seen = []
  f = with_vjp(
    lambda x: x @ W,
    lambda kept, g: (seen.extend([str(kept.dtype), str(g.dtype)]) or g @ W.T,),
    lambda x: (seen.append("forward") or x @ W, x),
  )
  cast = BF16(lambda x: f(x @ W))
  jax.eval_shape(cast, X)
  assert seen == []
  assert jax.eval_shape(jax.grad(lambda x: cast(x).sum()), X).dtype == np.float32
  assert set(seen) == {"forward", "float32"}


def test_custom_vmap_rule_is_used_under_vmap():
  @jax.custom_batching.custom_vmap
  def f(x, w):
    return x @ w

  @f.def_vmap
  def _(size, batched, x, w):
    assert batched == [True, False]
    assert x.dtype == w.dtype == np.float32
    return 7 * (x @ w), True

  @jax.custom_batching.custom_vmap
  def of_trees(tree):
    return {"y": tree["x"] @ W, "one": jnp.ones(())}

  @of_trees.def_vmap
  def _(size, batched, tree):
    return {"y": 7 * tree["x"] @ W, "one": jnp.ones(())}, {"y": True, "one": False}

  plain = lambda x: f(x, W)
  functions = {
    "unbatched": lambda rows: BF16(plain)(rows[0]),
    "trees": jax.vmap(BF16(lambda x: of_trees({"x": x}))),
    "inside": BF16(jax.vmap(plain)),
    "jit inside": BF16(jax.vmap(jax.jit(plain))),
    "outside": jax.vmap(BF16(plain)),
    "cast outside": jax.vmap(BF16(BF16(plain))),
  }
  rows = np.stack([X, 2 * X])
  results, found = run_together(functions, rows)
  want = dict.fromkeys(functions, 7 * rows @ W)
  want |= {"unbatched": X @ W, "trees": {"y": 7 * rows @ W, "one": np.ones(2, np.float32)}}
  assert [*leaf_failures("output", results, want, TOLERANCE["bf16"])] == []
  assert all(pairs == {"bf16 bf16"} for pairs in found.values())
