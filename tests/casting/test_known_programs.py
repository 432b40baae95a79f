"""A function that is traced again: what was made of its program is found, unless anything in it has changed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from tests.casting._jaxprs import products

P = jax.sharding.PartitionSpec
NORMAL = np.random.default_rng(0).standard_normal((3, 8, 8)).astype(np.float32)
W, X = NORMAL[0] / 3, NORMAL[1]


@jax.jit
def network(w, x):
  return jax.nn.softmax(jnp.tanh(x @ w) @ w)


def loss(w, x):
  return jnp.square(network(w, x)).sum()


def calls(fun, *args):
  """The inner `jit`s of a function that is traced anew."""
  equations = jax.make_jaxpr(lambda *args: fun(*args))(*args).jaxpr.eqns
  return [e for e in equations if e.primitive.name in ("jit", "pjit")]


def bodies(fun, *args):
  return [e.params["jaxpr"].jaxpr for e in calls(fun, *args)]


def test_a_second_trace_finds_what_the_first_has_made():
  for policy in ("bf16", "fp16"):
    (first,), (again,) = (bodies(mpjax.autocast(loss, policy), W, X) for _ in range(2))
    assert first is again
  (bf16,), (fp16,) = (bodies(mpjax.autocast(loss, policy), W, X) for policy in ("bf16", "fp16"))
  assert bf16 is not fp16


def test_a_method_of_one_object_is_one_function():
  class Model:
    def loss(self, w, x):
      return loss(w, x)

  model = Model()
  (first,), (again,) = (bodies(mpjax.autocast(model.loss, "bf16"), W, X) for _ in range(2))
  assert first is again


def test_a_function_that_is_called_twice_is_emitted_once():
  def twice(w, x, y):
    return jnp.square(network(w, x) - network(w, y)).sum()

  cast = mpjax.autocast(twice, "bf16")
  first, second = bodies(cast, W, X, X)
  assert first is second
  np.testing.assert_allclose(jax.grad(cast)(W, X, 2 * X), jax.grad(twice)(W, X, 2 * X), atol=0.05)


def test_transformations_of_it_are_those_of_a_function_that_was_never_traced():
  cast = mpjax.autocast(loss, "bf16")
  fresh = lambda w, x: mpjax.autocast(lambda w, x: loss(w, x), "bf16")(w, x)
  stacked = np.stack([X, 2 * X])
  for transformed in (
    lambda f: f(W, X),
    lambda f: jax.jit(f)(W, X),
    lambda f: jax.grad(f)(W, X),
    lambda f: jax.jit(jax.grad(f, 1))(W, X),
    lambda f: jax.vmap(jax.grad(f), (None, 0))(W, stacked),
    lambda f: jax.jvp(f, (W, X), (X, W))[1],
    lambda f: jax.lax.map(lambda x: f(W, x), stacked),
  ):
    np.testing.assert_array_equal(transformed(cast), transformed(fresh))


def test_what_the_function_closes_over_may_change():
  held = {"factor": 1.0, "array": np.ones(8, np.float32)}
  fun = lambda w: ((X @ w + held["array"]) * held["factor"]).sum()
  cast = mpjax.autocast(fun, "fp16")
  for changes in (
    {},
    {"factor": 3.0},
    {"array": np.zeros(8, np.float32)},
    {"array": np.full(8, -1e9, np.float32)},
  ):
    held |= changes
    np.testing.assert_allclose(cast(W), fun(W), rtol=0.02)


def test_what_may_be_a_weight_makes_another_program():
  closure = {}
  exact = jnp.tanh(X @ W)
  for order in ((W, jnp.asarray(W)), (jnp.asarray(W), W)):  # an array of NumPy is a constant
    run = mpjax.autocast(lambda x: jnp.tanh(x @ closure["w"]), "bf16")
    for closure["w"] in order:
      off = np.abs(run(X) - exact).max()
      assert (off < 1e-5) == isinstance(closure["w"], np.ndarray), off

  def flat(*args):
    w, offset, x = args if len(args) == 3 else (*args[0], args[1])
    found = offset + x @ w
    return jnp.mean((found - 1) ** 2) + jnp.mean((found @ w) ** 2)

  groups = ((W, X), X), (W, X, X)  # bias and data in one argument with the weights, or in their own
  trace = lambda run, args: str(jax.make_jaxpr(lambda *args: run(*args))(*args))
  alone = [trace(mpjax.autocast(lambda *args: flat(*args), "bf16"), args) for args in groups]
  assert alone[0] != alone[1]
  for order in ((0, 1), (1, 0)):
    run = mpjax.autocast(lambda *args: flat(*args), "bf16")
    assert [trace(run, groups[i]) for i in order] == [alone[i] for i in order]


def test_a_derivative_rule_may_change():
  held = {"slope": 2.0}

  def fun(w):
    product = jax.custom_vjp(lambda w: X @ w)
    slope = held["slope"]
    product.defvjp(lambda w: (X @ w, None), lambda _, ct: (slope * ct,))
    return product(w).sum()

  cast = mpjax.autocast(fun, "bf16")
  for slope in (2.0, 5.0):
    held["slope"] = slope
    np.testing.assert_array_equal(jax.grad(cast)(W), np.full_like(W, slope))


def test_shapes_dtypes_and_options_make_another_program():
  def fun(w, x):
    with jax.named_scope("head"):
      return network(w, x)

  ops = mpjax.OpLists.default()
  half = {"w": W.astype(np.float16), "x": X.astype(np.float16)}
  cast = lambda **options: mpjax.autocast(fun, "bf16", **options)
  for _ in range(2):
    assert products(cast(), W, X) == {"bf16"}
    assert products(cast(overrides={"head": "fp16"}), W, X) == {"f16"}
    assert products(cast(ops=ops.replace(deny=ops.deny | {"dot_general"})), W, X) == {"f32"}
    assert products(cast(), half["w"], half["x"]) == {"f16"}
    assert cast()(W, X[:3]).shape == (3, 8)


def test_the_ambient_precision_makes_another_program():
  stated = lambda w, x: jnp.matmul(x, w, precision="highest")
  cast = mpjax.autocast(stated, "bf16")
  assert products(lambda *args: cast(*args), W, X) == {"f32"}
  with jax.default_matmul_precision("highest"):
    assert products(lambda *args: cast(*args), W, X) == {"bf16"}


def test_a_mesh_makes_another_program():
  cast = mpjax.autocast(lambda w, x: jax.lax.with_sharding_constraint(network(w, x), P("data")), "bf16")
  for shape in ((8, 1), (2, 4)):
    with jax.set_mesh(jax.make_mesh(shape, ("data", "other"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
      assert jax.jit(lambda w, x: cast(w, x))(W, X).sharding.mesh.shape["data"] == shape[0]


def test_nothing_is_kept_of_functions_that_are_gone():
  def traced():
    array = jnp.ones((8, 8))

    @jax.jit
    def inner(w):
      return jax.nn.relu(w @ array) @ w

    fun = lambda w: inner(w).sum()
    jax.grad(mpjax.autocast(fun, "bf16"))(W)
    return [weakref.ref(x) for x in (array, inner, fun)]

  refs = [ref for _ in range(3) for ref in traced()]
  gc.collect()
  assert not any(ref() is not None for ref in refs)


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_no_tracer_is_kept(policy):
  cast = mpjax.autocast(loss, policy)
  with jax.checking_leaks():
    for _ in range(2):
      jax.jit(lambda w, x: jax.grad(cast)(w, x)).trace(W, X)
      jax.jit(lambda w, x: jax.vmap(jax.grad(lambda w, x: cast(w, x)), (None, 0))(w, x)).trace(W, X[:, None])
