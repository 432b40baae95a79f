"""Gradients of float32 parameters are float32 in content, and those of several uses are added in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import mpjax
from tests.casting._jaxprs import jit, named

SMALL = 2.0**-13  # 1 + SMALL has more digits than either half format
ROWS = np.float32([[1.0] * 2, [SMALL] * 2, [0.0] * 2, [0.0] * 2])  # each column of it sums to 1 + SMALL
RUNS = (("grad(autocast)", "bf16"), ("autocast(grad)", "bf16"), ("grad(autocast)", "fp16"))
ORDERS = {
  "grad(autocast)": lambda fun, policy: jax.grad(mpjax.autocast(fun, policy)),
  "autocast(grad)": lambda fun, policy: mpjax.autocast(jax.grad(fun), policy),
}


def conv(x, w):
  return lax.conv_general_dilated(x, w, (1,), "VALID", dimension_numbers=("NWC", "WIO", "NWC"))


def experts(w):
  return lax.ragged_dot(ROWS, w, np.int32([4]))


def sharded(w):
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(jnp.matmul, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))(
    ROWS, w
  )


with_rule = jax.custom_vjp(lambda w: ROWS @ w)
with_rule.defvjp(lambda w: (ROWS @ w, ROWS), lambda x, ct: (x.T @ ct,))
with_tangent_rule = jax.custom_jvp(lambda w: ROWS @ w)
with_tangent_rule.defjvp(lambda primals, tangents: (ROWS @ primals[0], ROWS @ tangents[0]))
scanned_rows = lambda w: lax.scan(lambda total, x: (total + jnp.sum(x @ w), None), 0.0, ROWS[None])[0]
scanned_layers = lambda w: lax.scan(lambda h, layer: (h @ layer, None), ROWS, w)[0]
saving_dots = {"policy": jax.checkpoint_policies.dots_saveable}
ROW, HALVES, DENSE = np.ones((1, 2), np.float32), np.full((2, 2), 0.5, np.float32), (2, 2)
FORMS = {  # a function of a parameter of ones, and its shape; every gradient is 1 + SMALL
  "dense": (lambda w: ROWS @ w, DENSE),
  "transposed": (lambda w: ROWS @ w.T, DENSE),
  "einsum": (lambda w: jnp.einsum("nd,dhk->nhk", ROWS, w), (2, 1, 1)),
  "lhs": (lambda w: w @ ROWS.T, DENSE),
  "reshaped in a call": (lambda w: ROWS @ jax.jit(lambda w: w.reshape(2, 1))(w), (2,)),
  "used twice": (lambda w: (ROWS @ w + ROWS @ w) / 2, DENSE),
  "one of several": (lambda w: ROWS @ w[0], (1, 2, 2)),
  "masked": (lambda w: ROWS @ jnp.where(w > 0, w, 0.0), DENSE),
  "convolution": (lambda w: conv(ROWS[:, None], w), (1, 2, 2)),
  "experts": (experts, (1, 2, 2)),
  "experts of members": (
    lambda w: jax.vmap(lax.ragged_dot)(np.stack([ROWS] * 2), w, np.int32([[4]] * 2)), (2, 1, 2, 2)),
  "experts in a scan": (lambda w: lax.scan(lambda h, w: (h, experts(w)), 0.0, w)[1], (3, 1, 2, 2)),
  "vmap over rows": (lambda w: jax.vmap(lambda x: x @ w)(ROWS[None]), DENSE),
  "vmap over weights": (lambda w: jax.vmap(lambda w: ROWS @ w)(w), (1, 2, 2)),
  "checkpoint": (jax.checkpoint(lambda w: ROWS @ w), DENSE),
  "checkpoint of dots": (jax.checkpoint(lambda w: ROWS @ w, **saving_dots), DENSE),
  "scan": (scanned_rows, DENSE),
  "scan over layers": (scanned_layers, (1, 2, 2)),
  "cond": (lambda w: lax.cond(jnp.sum(w) > 0, lambda w: ROWS @ w, lambda w: 2 * ROWS @ w, w), DENSE),
  "shard_map": (sharded, DENSE),
  "custom_vjp": (with_rule, DENSE),
  "custom_jvp": (with_tangent_rule, DENSE),
}  # fmt: skip


def test_gradients_of_parameters_are_not_rounded():
  ones = {name: np.ones(shape, np.float32) for name, (_, shape) in FORMS.items()}
  for order, policy in RUNS:

    def run(ones, order=ORDERS[order], policy=policy):
      of = lambda fun: order(lambda w: jnp.sum(fun(w)), policy)
      return {name: of(fun)(ones[name]) for name, (fun, _) in FORMS.items()}

    found = {name: {float(x) for x in np.ravel(x)} for name, x in jit(run)(ones).items()}
    assert found == {name: {1 + SMALL} for name in FORMS}, (order, policy)


# Of three uses each gives so much: the sum has more digits than the half format has, which rounds it up.
EACH = {"bf16": 129.0, "fp16": 1025.0}


def repeated(fun):
  return lambda w: sum(jnp.sum(fun(w)) for _ in range(3))


REUSES = {  # of HALVES: each use gives 1
  "product": repeated(lambda w: ROW @ w),
  "tied": lambda w: jnp.sum(ROW @ w @ w.T) + jnp.sum(ROW @ w),
  "chain": lambda w: jnp.sum(ROW @ w @ w @ w),
  "convolution": repeated(lambda w: conv(ROW[None], w[None])),
  "experts": repeated(lambda w: lax.ragged_dot(ROW, w[None], np.int32([1]))),
  "elementwise": repeated(lambda w: (ROW @ HALVES) * w),
  "bias": repeated(lambda w: ROW @ HALVES + w[0]),
  "jit": repeated(jax.jit(lambda w: ROW @ w)),
  "checkpoint": repeated(jax.checkpoint(lambda w: ROW @ w)),
  "scan": lambda w: lax.scan(lambda h, _: (h @ w, None), ROW, None, length=3)[0].sum(),
}


def test_gradients_of_several_uses_are_added_in_float32():
  for order, policy in RUNS:
    of = lambda fun: ORDERS[order](lambda w: EACH[policy] * fun(w), policy)
    found = jit(lambda w: {name: of(fun)(w) for name, fun in REUSES.items()})(HALVES)
    sums = {name: float(x[0, 0]) for name, x in found.items()}
    assert sums == dict.fromkeys(REUSES, 3 * EACH[policy]), (order, policy)


def test_float16_gradients_reach_beyond_its_range_and_an_overflow_on_the_way_is_seen():
  x = np.full((512, 2), 256.0, np.float32)
  losses = (lambda w: jnp.sum(x @ w), lambda w: jnp.sum(jnp.square(ROWS @ w) * 2.0**17))
  run = jit(lambda w: [[order(fun, "fp16")(w) for fun in losses] for order in ORDERS.values()])
  for wide, overflown in run(HALVES):
    assert float(wide[0, 0]) == 512 * 256
    assert not np.isfinite(overflown).any()


def test_grad_dtype_of_a_policy_is_the_way_back():
  x = jnp.asarray(ROWS)
  rows = lambda w: jnp.sum(x @ w)
  for order in ORDERS.values():
    of = lambda dtype: order(rows, {"base": "bf16", "grad_dtype": dtype})
    found = jit(lambda w: [of(dtype)(w) for dtype in ("bfloat16", "float32")])(HALVES)
    assert [float(g[0, 0]) for g in found] == [1.0, 1 + SMALL]
    assert {g.dtype for g in found} == {np.dtype("float32")}
  with pytest.raises(ValueError, match="grad_dtype='float16' with compute_dtype='bfloat16'"):
    mpjax.autocast(jnp.sin, {"base": "bf16", "grad_dtype": "float16"})
  with pytest.raises(ValueError, match="grad_dtype='bfloat16' with FP8"):
    mpjax.autocast(jnp.sin, {"base": "fp8", "grad_dtype": "bfloat16"})


def test_gradients_of_activations_are_half_precision_and_of_a_weight_of_several_uses_float32():
  masked = lambda w: jnp.where(w > 0, w, 0.0)
  for read in (lambda w: w, masked, jax.jit(jnp.transpose)):

    def loss(w, read=read):
      w = read(w)
      return jnp.sum(jnp.tanh(jnp.tanh(ROWS @ w) @ w) @ w)

    for order in ORDERS.values():
      dots = named("dot_general", order(loss, "bf16"), HALVES)
      by_dtype = [str(e.outvars[0].aval.dtype) for e in dots]
      assert by_dtype.count("float32") == 3
      assert set(by_dtype) == {"float32", "bfloat16"}


def test_a_gradient_of_an_activation_is_half_precision_though_the_result_is_float32():
  loss = lambda w: jnp.sum(jnp.tanh(ROWS @ w) @ w)
  cast = mpjax.autocast(loss, {"base": "bf16", "accum_dtype": "float32"})
  dtypes = [str(e.outvars[0].aval.dtype) for e in named("dot_general", jax.grad(cast), HALVES)]
  assert sorted(dtypes) == ["bfloat16"] + ["float32"] * 4


def test_the_gradient_of_a_gradient_of_products_with_a_batch_runs_on_a_cpu():
  x = np.ones((2, 4, 2), np.float32)
  loss = lambda w: jnp.sum(jnp.tanh(x @ w) @ w)
  twice = lambda gradient: jax.jit(jax.grad(lambda w: jnp.vdot(gradient(w), gradient(w))))
  found, want = twice(jax.grad(mpjax.autocast(loss, "bf16")))(HALVES), twice(jax.grad(loss))(HALVES)
  np.testing.assert_allclose(found, want, rtol=0.02)
