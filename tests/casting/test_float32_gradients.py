"""Gradients of float32 parameters are float32 in content, and those of several uses are added in float32."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax

import mpjax
from tests.casting._jaxprs import equations, jit

HALF = {
  "bf16": "params=float32,compute=bfloat16,output=float32",
  "fp16": "params=float32,compute=float16,output=float32",
}
SMALL = 2.0**-13  # 1 + SMALL has more digits than either half format
ROWS = jnp.array([[1.0], [SMALL], [0.0], [0.0]])  # f32[4, 1]; each column of it sums to 1 + SMALL
ORDERS = {
  "grad(autocast)": lambda fun, policy: jax.grad(mpjax.autocast(fun, policy)),
  "autocast(grad)": lambda fun, policy: mpjax.autocast(jax.grad(fun), policy),
}


def conv(x, w):
  return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def sharded(w):
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  spec = jax.sharding.PartitionSpec
  return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(spec("data"), spec()), out_specs=spec("data"))(
    ROWS, w
  )


def scanned(w):
  return lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, ROWS.reshape(1, 4, 1))[0]


def scanned_layers(w):
  return lax.scan(lambda h, layer: (h @ layer, None), ROWS, w)[0]


@jax.custom_vjp
def with_rule(w):
  return ROWS @ w


with_rule.defvjp(lambda w: (ROWS @ w, ROWS), lambda x, ct: (x.T @ ct,))

DENSE = (1, 1)
FORMS = {  # a function of a parameter of ones, and its shape; every gradient is 1 + SMALL
  "dense": (lambda w: ROWS @ w, DENSE),
  "dense of rank 3": (lambda w: ROWS[None] @ w, DENSE),
  "transposed": (lambda w: ROWS @ w.T, DENSE),
  "einsum": (lambda w: jnp.einsum("nd,dhk->nhk", ROWS, w), (1, 1, 1)),
  "lhs": (lambda w: w @ ROWS.T, DENSE),
  "reshaped": (lambda w: ROWS @ w.reshape(1, 1), (1,)),
  "one of several": (lambda w: ROWS @ w[0], (1, 1, 1)),
  "scaled": (lambda w: ROWS @ (w * 2) / 2, DENSE),
  "masked": (lambda w: ROWS @ jnp.where(w > 0, w, 0.0), DENSE),
  "convolution": (lambda w: conv(ROWS[:, :, None], w), (1, 1, 1)),
  "vmap over rows": (lambda w: jax.vmap(lambda x: x @ w)(ROWS[None]), DENSE),
  "vmap over weights": (lambda w: jax.vmap(lambda w: ROWS @ w)(w), (1, 1, 1)),
  "vmap of a convolution": (lambda w: jax.vmap(lambda w: conv(ROWS[:, :, None], w))(w), (2, 1, 1, 1)),
  "jit": (jax.jit(lambda w: ROWS @ w), DENSE),
  "checkpoint": (jax.checkpoint(lambda w: ROWS @ w), DENSE),
  "checkpoint of dots": (
    jax.checkpoint(lambda w: ROWS @ w, policy=jax.checkpoint_policies.dots_saveable), DENSE),
  "scan": (scanned, DENSE),
  "scan over layers": (scanned_layers, (1, 1, 1)),
  "cond": (lambda w: lax.cond(jnp.sum(w) > 0, lambda w: ROWS @ w, lambda w: 2 * ROWS @ w, w), DENSE),
  "shard_map": (sharded, DENSE),
  "custom_vjp": (with_rule, DENSE),
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", HALF)
def test_gradients_of_parameters_are_not_rounded(order, policy):
  def run(ones):
    return {
      name: ORDERS[order](lambda w, fun=fun: jnp.sum(fun(w)), HALF[policy])(ones[name])
      for name, (fun, _) in FORMS.items()
    }

  ones = {name: jnp.ones(shape) for name, (_, shape) in FORMS.items()}
  found = {name: {float(x) for x in np.ravel(x)} for name, x in jit(run)(ones).items()}
  assert found == {name: {1 + SMALL} for name in FORMS}


@pytest.mark.parametrize("policy", HALF)
def test_gradients_that_leave_a_call_are_not_rounded(policy):
  """What follows a backward pass outside the call that it is in is no part of it: clipping by the norm."""
  grad = jax.grad(lambda w: jnp.sum(ROWS @ w))
  calls = {
    "none": grad,
    "jit": jax.jit(grad),
    "map": lambda w: lax.map(lambda _: grad(w), jnp.arange(2))[0],
    "carry": lambda w: lax.fori_loop(0, 2, lambda _, g: grad(w) + 0 * g, w),
    "cond": lambda w: lax.cond(w[0, 0] > 0, grad, jnp.zeros_like, w),
  }
  clipped = lambda g: g * jnp.minimum(1.0, 2 / jnp.linalg.norm(g))
  run = lambda w: {name: clipped(call(w)) for name, call in calls.items()}
  found = jit(mpjax.autocast(run, HALF[policy]))(jnp.ones(DENSE))
  assert {name: float(g[0, 0]) for name, g in found.items()} == dict.fromkeys(calls, 1 + SMALL)


USES = 300


def repeated(fun):
  return lambda w: sum(jnp.sum(fun(w)) for _ in range(USES))


def chained(w):
  h = jnp.ones((1, 1))
  for _ in range(USES):
    h = h @ w
  return jnp.sum(h)


ONE = jnp.ones((1, 1))
REUSES = {
  "product": repeated(lambda w: ONE @ w),
  "tied": lambda w: sum(jnp.sum(ONE @ w @ w.T) for _ in range(USES // 2)),
  "chain": chained,
  "convolution": repeated(lambda w: conv(ONE[None], w[None])),
  "elementwise": repeated(lambda w: (ONE @ ONE) * w),
  "bias": repeated(lambda w: ONE @ ONE + w[0]),
  "jit": repeated(jax.jit(lambda w: ONE @ w)),
  "checkpoint": repeated(jax.checkpoint(lambda w: ONE @ w)),
  "scan": lambda w: lax.scan(lambda h, _: (h @ w, None), ONE, None, length=USES)[0][0, 0],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_300_uses_of_one_are_300(order, policy):
  run = jit(lambda w: {name: ORDERS[order](fun, HALF[policy])(w) for name, fun in REUSES.items()})
  assert {name: float(x[0, 0]) for name, x in run(ONE).items()} == dict.fromkeys(REUSES, 300.0)


class Linen(nn.Module):
  """One layer applied many times."""

  @nn.compact
  def __call__(self, x):
    layer = nn.Dense(1, use_bias=False, kernel_init=nn.initializers.ones)
    return sum(jnp.sum(layer(x)) for _ in range(USES))


def of_linen(order):
  params = Linen().init(jax.random.key(0), ONE)
  return jit(ORDERS[order](lambda params: Linen().apply(params, ONE), HALF["bf16"]))(params)


def of_nnx(order):
  layer = nnx.Linear(1, 1, use_bias=False, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0))
  graph, state = nnx.split(layer)
  fun = repeated(lambda state: nnx.merge(graph, state)(ONE))
  return jit(ORDERS[order](fun, HALF["bf16"]))(state)


def of_equinox(order):
  layer = eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(1, 1, use_bias=False, key=jax.random.key(0)), ONE)
  return jit(ORDERS[order](repeated(lambda layer: layer(ONE[0])), HALF["bf16"]))(layer)


def of_a_tied_embedding(order):
  table = nn.Embed(1, 1, embedding_init=nn.initializers.ones)
  params = table.init(jax.random.key(0), jnp.zeros(1, int))
  attend = lambda params: table.apply(params, ONE, method="attend")
  look_up = lambda params: table.apply(params, jnp.zeros(1, int))
  fun = lambda params: sum(jnp.sum(attend(params)) + jnp.sum(look_up(params)) for _ in range(USES // 2))
  return jit(ORDERS[order](fun, HALF["bf16"]))(params)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("library", [of_linen, of_nnx, of_equinox, of_a_tied_embedding])
def test_a_layer_used_300_times_in_each_library(library, order):
  (grad,) = jax.tree.leaves(library(order))
  assert grad.dtype == jnp.float32
  assert float(grad.squeeze()) == USES


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_of_micro_batches_are_not_rounded(accumulate):
  params, tx = {"w": jnp.zeros((1, 1))}, optax.sgd(1.0)
  step = mpjax.make_train_step(
    lambda p, x: jnp.sum(x @ p["w"]), tx, "bf16", accumulate=accumulate, donate=False
  )
  state = step.init(params)
  state, _ = step(state, jnp.repeat(ROWS[:2], accumulate, axis=0))
  assert float(state.params["w"][0, 0]) == -(1 + SMALL)


def test_float16_gradients_of_parameters_reach_beyond_its_range():
  x = jnp.full((512, 1), 256.0)
  for order in ORDERS.values():
    grad = jax.jit(order(lambda w: jnp.sum(x @ w), HALF["fp16"]))(ONE)
    assert float(grad[0, 0]) == 512 * 256


@pytest.mark.parametrize("order", ORDERS)
def test_an_overflow_on_the_way_to_a_gradient_is_seen(order):
  loss = lambda w: jnp.sum(jnp.square(ROWS @ w) * 2.0**17)
  assert not bool(jnp.isfinite(jax.jit(ORDERS[order](loss, HALF["fp16"]))(ONE)).all())


@pytest.mark.parametrize("order", ORDERS)
def test_grad_dtype_of_a_policy_is_the_way_back(order):
  policy = {"base": "bf16", "grad_dtype": "bfloat16"}
  uses = jit(ORDERS[order](REUSES["product"], policy))
  rounded = jit(ORDERS[order](lambda w: jnp.sum(ROWS @ w), policy))
  assert (float(uses(ONE)[0, 0]), float(rounded(ONE)[0, 0])) == (256.0, 1.0)
  assert rounded(ONE).dtype == jnp.float32
  whole = jit(ORDERS[order](REUSES["product"], {"base": "bf16", "grad_dtype": "float32"}))
  assert float(whole(ONE)[0, 0]) == 300


def test_grad_dtype_is_float32_or_the_compute_dtype():
  with pytest.raises(ValueError, match="grad_dtype='float16' with compute_dtype='bfloat16'"):
    mpjax.autocast(jnp.sin, {"base": "bf16", "grad_dtype": "float16"})
  with pytest.raises(ValueError, match="grad_dtype='bfloat16' with FP8"):
    mpjax.autocast(jnp.sin, {"base": "fp8", "grad_dtype": "bfloat16"})


def test_gradients_of_activations_are_half_precision():
  loss = lambda w: jnp.sum(jnp.tanh(jnp.tanh(ROWS @ w) @ w) @ w)
  for order in ORDERS.values():
    dots = [e for e in equations(order(loss, HALF["bf16"]), ONE) if e.primitive.name == "dot_general"]
    by_dtype = [str(e.outvars[0].aval.dtype) for e in dots]
    assert by_dtype.count("float32") == 3
    assert set(by_dtype) == {"float32", "bfloat16"}


def test_derivatives_of_gradients():
  x = jax.random.normal(jax.random.key(0), (8, 4))
  w = jax.random.normal(jax.random.key(1), (4, 4))
  loss = lambda w: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
  for make in (
    jax.hessian,
    lambda f: jax.jacrev(jax.jacfwd(f)),
    lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w) ** 2)),
  ):
    got, want = jax.jit(make(mpjax.autocast(loss, "bf16")))(w), jax.jit(make(loss))(w)
    assert float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want)) < 0.03
