"""Layers that are alike: their islands are traced once, and compute, and are named, as if each were its own."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.jaxpr import parse_scopes
from tests.casting._jaxprs import named, run_together

NORMAL = np.random.default_rng(0).standard_normal((13, 8, 8)).astype(np.float32)
X = NORMAL[-1, :4]


def params(layers):
  return [{"w": w / 3, "scale": np.float32(np.ones(8) + i)} for i, w in enumerate(NORMAL[:layers])]


def deep(weights, x, epsilons=None, constants=None):
  """Norm, product, softmax and product in each layer, under the layer's name."""
  for i, w in enumerate(weights):
    with jax.named_scope(f"block_{i}"):
      epsilon = epsilons[i] if epsilons else 1e-6
      y = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + epsilon) * w["scale"]
      if constants is not None:
        y = y + constants[i]
      x = x + jax.nn.softmax(y @ w["w"]) @ w["w"]
  return (x * x).mean()


def of_checkpoints(weights, x):
  """Calls of one function that is computed again in the backward pass."""
  layer = jax.checkpoint(lambda x, w: x + jax.nn.softmax(x @ w) @ w)
  return (functools.reduce(lambda x, w: layer(x, w["w"]), weights, x) ** 2).mean()


@pytest.mark.parametrize("loss", [deep, of_checkpoints])
def test_more_layers_have_no_more_programs(loss):
  cast = mpjax.autocast(loss, "fp16")
  of = lambda layers: [
    e for e in jax.make_jaxpr(cast)(params(layers), X).jaxpr.eqns if "remat" in e.primitive.name
  ]
  four, twelve = ({id(e.params["jaxpr"]) for e in of(layers)} for layers in (4, 12))
  assert len(four) == len(twelve) > 0


def near(found, expected, tolerance=0.05):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(np.float32(a) - b) <= tolerance * np.linalg.norm(b)


def test_each_layer_has_its_own_gradients_under_transformations_too():
  bf16 = mpjax.autocast(policy="bf16")
  losses = {
    "plain": deep,
    # Layers that differ in a number alone, and in a constant array, are not alike.
    "epsilons": lambda w, x: deep(w, x, epsilons=[1e-6, 10.0, 1e-6, 30.0]),
    "constants": lambda w, x: deep(w, x, constants=[np.float32(0.5 * i * np.arange(8)) for i in range(4)]),
  }
  functions = {f"{name} in float32": jax.grad(loss) for name, loss in losses.items()}
  functions |= {f"{name} in bf16": jax.grad(bf16(loss)) for name, loss in losses.items()}
  functions |= {
    "plain under autocast": bf16(jax.grad(deep)),
    "plain in fp16": jax.grad(mpjax.autocast(deep, "fp16")),
    "plain by overrides": jax.grad(
      mpjax.autocast(deep, "bf16", overrides={"block_1": "fp32", "block_2": "fp16"})
    ),
    "plain in a vmap": lambda w, x: jax.tree.map(
      lambda g: g[0], jax.vmap(jax.grad(bf16(deep)), (None, 0))(w, jnp.stack([x, 2 * x]))
    ),
  }
  results, found = run_together(functions, params(4), X)
  for name, got in results.items():
    near(got, results[name.split()[0] + " in float32"])
  assert found["plain by overrides"] == {"bf16 bf16", "f32 f32", "f16 f16"}
  gradient = results["plain in bf16"]
  along = lambda w, x: jax.jvp(bf16(deep), (w, x), (gradient, 0 * x))[1]
  squares = sum(np.vdot(g, g) for g in jax.tree.leaves(gradient))
  np.testing.assert_allclose(jax.jit(along)(params(4), X), squares, rtol=0.05)


def test_compiled_operations_have_the_name_of_their_own_layer():
  text = jax.jit(jax.grad(mpjax.autocast(deep, "bf16"))).lower(params(4), X).as_text(debug_info=True)
  names = re.findall(r'"([^"]*/exp)"', text)
  assert {parse_scopes(name.rpartition("/")[0]).path() for name in names} == {f"block_{i}" for i in range(4)}


@jax.jit
def repeated(rows):
  """A column of rows as a matrix, which an island makes itself; cheap operations under a name of their own."""
  with jax.named_scope("inner"):
    scaled = rows * 1.37 * 0.71
  return jnp.broadcast_to(rows + scaled, (4, 8))


def test_layers_that_call_one_function_under_another_policy_are_not_alike():
  def loss(weights, x):
    for i, w in enumerate(weights):
      with jax.named_scope(f"block_{i}"):
        y = repeated(x @ w["w"][:, :1])
        x = jax.nn.softmax(jnp.tanh(y) + x @ w["w"]) @ w["w"] + y @ w["w"]
    return (x * x).mean()

  cast = mpjax.autocast(loss, "bf16", overrides={"block_2/inner": "fp32"})
  columns = [e.invars[0].aval for e in named("mul", cast, params(4), X)]
  # One operation in each layer, for the product and the island.
  of_columns = sorted(aval.dtype.name for aval in columns if aval.shape == (4, 1))
  assert of_columns == ["bfloat16"] * 6 + ["float32"] * 2


def test_functions_of_islands_keep_no_tracers_of_the_bodies_they_are_in():
  def block(x, w):
    y = jnp.tanh(x @ w)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6), None

  def of_calls(weights, x):
    for w in weights:
      x, _ = jax.jit(block)(x, w)
    return (x * x).mean()

  of_a_scan = lambda weights, x: (jax.lax.scan(block, x, weights)[0] ** 2).mean()
  policy = {"base": "fp8", "fp8": {"recipe": "delayed", "emulate": True, "min_dim": 8, "first_layer": True}}
  weights, x = np.stack([np.eye(16, dtype=np.float32)] * 3), np.ones((16, 16), np.float32)
  for loss in (of_calls, of_a_scan):
    state = mpjax.init_fp8_state(loss, policy)(weights, x)
    cast = lambda weights, state, x: mpjax.autocast(loss, policy, fp8_state=state)(weights, x)
    with jax.checking_leaks():
      jax.make_jaxpr(jax.grad(cast, (0, 1)))(weights, state, x)
