"""Mixtures of experts with FP8 products under autocast: which products, what is said, and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import mpjax
from tests.casting._jaxprs import jit, named
from tests.fp8._programs import D, fp8
from tests.fp8._reference import normal, relative

TOKENS, EXPERTS, HIDDEN = 64, 4, 48
P = {
  "in": normal(D, D, seed=1) / np.sqrt(D),
  "router": normal(D, EXPERTS, seed=2),
  "up": normal(EXPERTS, D, HIDDEN, seed=3) / np.sqrt(D),
  "down": normal(EXPERTS, HIDDEN, D, seed=4) / np.sqrt(HIDDEN),
  "mix": normal(D, D, seed=5) / np.sqrt(D),
  "out": normal(D, 7, seed=6) / np.sqrt(D),
}
X = normal(TOKENS, D, seed=9)
WEIGHTS = ("up", "down")
ORDERS = {
  "grad(autocast)": lambda fun, policy: jax.grad(mpjax.autocast(fun, policy)),
  "autocast(grad)": lambda fun, policy: mpjax.autocast(jax.grad(fun), policy),
}


def layer(p, x):
  """Two experts for each token, chosen by what no rounding changes."""
  token = jnp.arange(TOKENS) + jnp.isnan(x[:, 0])
  chosen = jnp.stack([token % 2, 2 + token % 5 % 2], 1).ravel()
  order, sizes = jnp.argsort(chosen), jnp.bincount(chosen, length=EXPERTS)
  gates = jax.nn.softmax(x @ p["router"]).ravel()[order % TOKENS]
  up = jax.nn.silu(lax.ragged_dot(x[order // 2], p["up"], sizes))
  down = lax.ragged_dot(up, p["down"], sizes) * gates[:, None]
  return x + jnp.zeros_like(x).at[order // 2].add(down)


def model(p, x):
  x = jnp.tanh(layer(p, jnp.tanh(x @ p["in"])) @ p["mix"])
  return x @ p["out"]


def loss(p, x):
  return (model(p, x) ** 2).mean()


def test_experts_are_fp8_per_channel_under_every_recipe():
  experts, mix = 2 * 2 * 2 * TOKENS * D * HIDDEN, 2 * TOKENS * D * D
  for recipe in ("current", "delayed", "per_channel", "mx", "nvfp4"):
    policy = fp8(recipe=recipe, **({"keep_last": 0.0} if recipe == "nvfp4" else {}))
    explanation = mpjax.explain(loss, P, X, policy=policy)
    rows = [row for row in explanation.rows if row.primitive == "ragged_dot_general"]
    why = "per_channel scaling, E4M3FN forward, E4M3FN backward, under every recipe"
    assert [(row.after, row.why) for row in rows] == [
      ("float8_e4m3fn", f"an FP8 product of experts ({why})")
    ] * 2, recipe
    flops = explanation.matrix_flops()
    assert sum(flops[name] for name in flops if name != "bfloat16") == experts + mix, recipe


def test_experts_have_no_history():
  policy = fp8(recipe="delayed")
  state = mpjax.init_fp8_state(loss, policy)(P, X)
  assert len(state["amax"]) == 2  # of the router, whose sizes may fit another day, and of "mix"
  step = jax.grad(mpjax.autocast(loss, policy, fp8_state=state))
  assert len(named("fp8_ragged_dot", step, P, X)) == 6


def test_gradients_are_float32_in_content_and_near_those_of_float32():
  want = jax.jit(jax.grad(loss))(P, X)
  for found in jit(lambda p: [order(loss, fp8())(p, X) for order in ORDERS.values()])(P):
    for name in WEIGHTS:
      grad = np.asarray(found[name])
      assert grad.dtype == np.float32
      assert relative(grad, want[name]) < 0.1, name
      assert np.mean(grad == grad.astype(jnp.bfloat16).astype(np.float32)) < 0.02, name


def test_all_products_of_a_step_are_fp8():
  e4, e5 = "float8_e4m3fn", "float8_e5m2"
  policy = fp8(recipe="per_channel", gradient_dtype="e5m2")
  for order in ORDERS.values():
    found = [e.params["spec"] for e in named("fp8_ragged_dot", order(loss, policy), P, X)]
    formats = sorted(tuple(dtype.name for dtype in (*s.formats, s.out_dtype)) for s in found)
    assert formats == sorted([(e4, e4, "bfloat16"), (e4, e5, "float32"), (e5, e4, "bfloat16")] * 2)
    assert not named("ragged_dot_general", order(loss, policy), P, X)


def test_reasons():
  dims = lax.RaggedDotDimensionNumbers
  x, sizes = normal(D, 2, D), np.int32([16, 16])
  general = lambda w, numbers: (
    lambda p, x: jnp.tanh(lax.ragged_dot_general(jnp.tanh(x @ p), w, sizes, numbers)) @ p
  )
  batch = general(normal(D, D, D), dims((([2], [1]), ([0], [0])), [0], []))
  several = general(normal(2, D, D), dims((([2], [1]), ([], [])), [0], [0]))

  def why(fun, *args, **options):
    rows = mpjax.explain(fun, *args, policy=fp8(**options)).rows
    return {row.why for row in rows if row.primitive == "ragged_dot_general"}

  assert why(batch, P["mix"], x) == {"not FP8: its groups are of a batch dimension"}
  assert why(several, P["mix"], x) == {"not FP8: its groups are of one of several dimensions"}
  sizes_of = f"M={2 * TOKENS} x K={D} x N={HIDDEN}: smaller than fp8.min_dim=64"
  assert f"not FP8: {sizes_of}" in why(loss, P, X, min_dim=64)
