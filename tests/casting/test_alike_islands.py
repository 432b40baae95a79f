"""Layers that are alike: their islands are traced once, and compute, and are named, as if each were its own."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.jaxpr import parse_scopes
from tests.casting._jaxprs import equations

X = jax.random.normal(jax.random.key(0), (4, 8))


def params(layers: int) -> list[dict[str, jax.Array]]:
  keys = jax.random.split(jax.random.key(1), layers)
  return [{"w": jax.random.normal(k, (8, 8)) / 3, "scale": jnp.ones(8) + i} for i, k in enumerate(keys)]


def deep(weights, x, epsilons=None, constants=None):
  """Norm, product, softmax and product in each layer, under the layer's name."""
  for i, w in enumerate(weights):
    with jax.named_scope(f"block_{i}"):
      y = (
        x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + (epsilons[i] if epsilons else 1e-6)) * w["scale"]
      )
      if constants is not None:
        y = y + constants[i]
      x = x + jax.nn.softmax(y @ w["w"]) @ w["w"]
  return (x * x).mean()


def programs(layers: int) -> set[int]:
  """The programs of the islands of a deep model."""
  jaxpr = jax.make_jaxpr(mpjax.autocast(deep, "fp16"))(params(layers), X)
  return {id(e.params["jaxpr"]) for e in jaxpr.jaxpr.eqns if "remat" in e.primitive.name}


def test_more_layers_have_no_more_programs():
  assert len(programs(4)) == len(programs(12)) > 0


def near(found, expected, tolerance=0.05):
  for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
    assert np.linalg.norm(np.float32(a - b)) <= tolerance * np.linalg.norm(b)


@pytest.mark.parametrize("order", ["grad(autocast)", "autocast(grad)"])
@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_each_layer_has_its_own_gradients(order, policy):
  expected = jax.grad(deep)(params(5), X)
  cast = lambda f: mpjax.autocast(f, policy)
  gradient = jax.grad(cast(deep)) if order == "grad(autocast)" else cast(jax.grad(deep))
  near(gradient(params(5), X), expected)


def test_layers_that_differ_in_a_number_alone_are_not_alike():
  epsilons = [1e-6, 10.0, 1e-6, 30.0]
  loss = lambda weights, x: deep(weights, x, epsilons)
  near(jax.grad(mpjax.autocast(loss, "bf16"))(params(4), X), jax.grad(loss)(params(4), X))


def test_layers_that_differ_in_a_constant_array_have_each_their_own():
  constants = [np.full(8, 0.5 * i, np.float32) * np.arange(8) for i in range(4)]
  loss = lambda weights, x: deep(weights, x, constants=constants)
  near(jax.grad(mpjax.autocast(loss, "bf16"))(params(4), X), jax.grad(loss)(params(4), X))


def test_layers_of_another_policy_are_not_alike():
  cast = mpjax.autocast(deep, "bf16", overrides={"block_1": "fp32", "block_2": "fp16"})
  near(jax.grad(cast)(params(4), X), jax.grad(deep)(params(4), X))
  products = [e for e in equations(jax.grad(cast), params(4), X) if e.primitive.name == "dot_general"]
  assert {e.invars[0].aval.dtype.name for e in products} == {"bfloat16", "float32", "float16"}


def test_compiled_operations_have_the_name_of_their_own_layer():
  text = jax.jit(jax.grad(mpjax.autocast(deep, "bf16"))).lower(params(4), X).as_text(debug_info=True)
  names = re.findall(r'"([^"]*/exp)"', text)
  assert {parse_scopes(name.rpartition("/")[0]).path() for name in names} == {f"block_{i}" for i in range(4)}


def test_gradients_under_transformations_are_the_same():
  gradient = jax.grad(mpjax.autocast(deep, "bf16"))
  expected = gradient(params(4), X)
  stacked = jnp.stack([X, 2 * X])
  near(jax.tree.map(lambda g: g[0], jax.vmap(gradient, (None, 0))(params(4), stacked)), expected)
  near(jax.jit(gradient)(params(4), X), expected)
  _, tangent = jax.jvp(mpjax.autocast(deep, "bf16"), (params(4), X), (expected, jnp.zeros_like(X)))
  squares = sum(jnp.vdot(g, g) for g in jax.tree.leaves(expected))
  np.testing.assert_allclose(tangent, squares, rtol=0.05)


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
  scaled = [e for e in equations(cast, params(4), X) if e.primitive.name == "mul"]
  columns = [e.invars[0].aval.dtype.name for e in scaled if e.invars[0].aval.shape == (4, 1)]
  # Two operations in each layer: for the product, and again in the island.
  assert sorted(columns) == ["bfloat16"] * 12 + ["float32"] * 4


@pytest.mark.parametrize("call", ["jit", "scan"])
def test_functions_of_islands_keep_no_tracers_of_the_bodies_they_are_in(call):
  def block(x, w):
    y = jnp.tanh(x @ w)
    return y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6), None

  def loss(weights, x):
    if call == "scan":
      x, _ = jax.lax.scan(block, x, weights)
    else:
      for w in weights:
        x, _ = jax.jit(block)(x, w)
    return (x * x).mean()

  policy = {"base": "fp8", "fp8": {"recipe": "delayed", "emulate": True, "min_dim": 8, "first_layer": True}}
  args = jnp.stack([jnp.eye(16)] * 3), jnp.ones((16, 16))
  state = mpjax.init_fp8_state(loss, policy)(*args)
  cast = lambda weights, state, x: mpjax.autocast(loss, policy, fp8_state=state)(weights, x)
  with jax.checking_leaks():
    jax.make_jaxpr(jax.grad(cast, (0, 1)))(args[0], state, args[1])
