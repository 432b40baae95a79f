"""A function that is traced again: what was made of its program is found, unless anything in it has changed."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

import mpjax
from mpjax.jaxpr import PrimitiveFacts, Trait, register
from tests.casting._jaxprs import products

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
  cast = mpjax.autocast(loss, "bf16")
  (first,), (again,) = (bodies(cast, W, X) for _ in range(2))
  assert first is again


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


def test_overrides_and_the_table_of_primitives_may_change():
  overrides, mine = {"head": "fp32"}, Primitive("mine_for_a_test")
  mine.def_abstract_eval(lambda x: x)

  def fun(w, x):
    with jax.named_scope("head"):
      return mine.bind(x @ w) @ w

  cast = mpjax.autocast(fun, "bf16", overrides=overrides)
  trace = lambda run: str(jax.make_jaxpr(lambda *args: run(*args))(W, X))
  for change in (
    lambda: overrides.update(head="fp16"),
    lambda: register(mine, PrimitiveFacts("infer", "element-wise", traits=Trait.ELEMENTWISE)),
  ):
    before = trace(cast)
    change()
    assert before != trace(cast) == trace(mpjax.autocast(fun, "bf16", overrides=overrides))


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
