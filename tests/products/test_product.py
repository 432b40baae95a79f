"""The FP8 product and its derivatives against float64, within what rounding to FP8 explains."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  AMD,
  E4M3,
  E4M3_AMD,
  E5M2,
  E5M2_AMD,
  FORWARD_ERROR,
  GRADIENT_ERROR,
  SAVED,
  check_product,
  compiled,
  examples,
  flushed,
  matmul,
  normal,
  products,
  relative,
  tensors,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised


# The product


@pytest.mark.slow
@examples(15)
@given(products(), tensors(), tensors(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_product_of_any_shape_and_magnitude_is_within_the_rounding_of_fp8(case, lhs, rhs, out_dtype):
  lhs, rhs = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs))
  out = compiled(lambda x, w: fp8_dot_general(x, w, case.dims, out_dtype=out_dtype))(lhs, rhs)
  assert (out.dtype, out.shape) == (out_dtype, case.shape(case.out))
  check_product(out, f"{case.lhs},{case.rhs}->{case.out}", lhs, rhs, E4M3, E4M3)


@pytest.mark.slow
@examples(12)
@given(products(), tensors(), tensors(), tensors(), st.sampled_from([{"margin": 1}, AMD, SAVED]))
def test_gradients_are_within_the_rounding_of_fp8(case, lhs, rhs, ct, recipe):
  lhs, rhs, ct = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs)), ct(case.shape(case.out))
  run = with_gradients(lambda lhs, rhs: fp8_dot_general(lhs, rhs, case.dims, recipe))
  out, d_lhs, d_rhs = run(lhs, rhs, ct)
  forward, gradient = (E4M3_AMD, E5M2_AMD) if recipe is AMD else (E4M3, E5M2)
  margin = recipe.get("margin", 0)
  check_product(out, f"{case.lhs},{case.rhs}->{case.out}", lhs, rhs, forward, forward, margin=margin)
  check_product(d_lhs, f"{case.out},{case.rhs}->{case.lhs}", ct, rhs, gradient, forward, margin=margin)
  check_product(d_rhs, f"{case.lhs},{case.out}->{case.rhs}", lhs, ct, forward, gradient, margin=margin)


@pytest.mark.slow
@examples(6)
@given(products(), tensors(-10, 10), tensors(-10, 10), tensors(-10, 10), tensors(-10, 10))
def test_tangents_are_within_the_rounding_of_fp8(case, lhs, rhs, d_lhs, d_rhs):
  lhs, rhs = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs))
  d_lhs, d_rhs = d_lhs(lhs.shape), d_rhs(rhs.shape)
  fun = lambda lhs, rhs: fp8_dot_general(lhs, rhs, case.dims)
  spec = f"{case.lhs},{case.rhs}->{case.out}"

  @compiled
  def run(lhs, rhs, d_lhs, d_rhs):
    _, by_lhs = jax.jvp(lambda x: fun(x, rhs), (lhs,), (d_lhs,))
    _, by_rhs = jax.jvp(lambda x: fun(lhs, x), (rhs,), (d_rhs,))
    return by_lhs, by_rhs, jax.jvp(fun, (lhs, rhs), (d_lhs, d_rhs))[1]

  by_lhs, by_rhs, both = run(lhs, rhs, d_lhs, d_rhs)
  check_product(by_lhs, spec, d_lhs, rhs, E5M2, E4M3)
  check_product(by_rhs, spec, lhs, d_rhs, E4M3, E5M2)
  np.testing.assert_allclose(both, np.asarray(by_lhs) + np.asarray(by_rhs), rtol=1e-5, atol=1e-30)


@pytest.mark.slow
@examples(6)
@given(products(), tensors(-8, 8), tensors(-8, 8), tensors(-8, 8), tensors(-8, 8))
def test_second_derivatives_are_within_the_rounding_of_fp8(case, lhs, rhs, ct, v):
  lhs, rhs, ct = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs)), ct(case.shape(case.out))
  v = v(lhs.shape)

  @compiled
  def run(rhs, ct, v):
    def directional(rhs):
      return jax.vjp(lambda lhs: fp8_dot_general(lhs, rhs, case.dims), lhs)[1](ct)[0]

    return jax.vjp(directional, rhs)[1](v)[0], jax.jvp(directional, (rhs,), (rhs,))[1]

  # <v, gradient of lhs> is a product of v and ct, both of which are gradients.
  of_rhs, tangent = run(rhs, ct, v)
  check_product(of_rhs, f"{case.out},{case.lhs}->{case.rhs}", ct, v, E5M2, E5M2)
  check_product(tangent, f"{case.out},{case.rhs}->{case.lhs}", ct, rhs, E5M2, E5M2)


@pytest.mark.slow
@examples(6)
@given(
  products(),
  tensors(-5, 5),
  tensors(-5, 5),
  tensors(-5, 5),
  st.tuples(*[st.sampled_from([2.0**-9, 0.37, 1.0, 300.0])] * 3),
)
def test_given_scales_are_the_ones_used_and_saturate(case, lhs, rhs, ct, scales):
  lhs, rhs, ct = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs)), ct(case.shape(case.out))
  scales = tuple(float(np.float32(s)) for s in scales)
  fun = lambda lhs, rhs: fp8_dot_general(
    lhs, rhs, case.dims, "delayed", scales=tuple(jnp.float32(s) for s in scales)
  )
  out, d_lhs, d_rhs = with_gradients(fun)(lhs, rhs, ct)
  of = lambda x, y, z: f"{x},{y}->{z}"
  check_product(out, of(case.lhs, case.rhs, case.out), lhs, rhs, E4M3, E4M3, scales[:2])
  check_product(d_lhs, of(case.out, case.rhs, case.lhs), ct, rhs, E5M2, E4M3, (scales[2], scales[1]))
  check_product(d_rhs, of(case.lhs, case.out, case.rhs), lhs, ct, E4M3, E5M2, (scales[0], scales[2]))


RECIPES = {"current": "current", "mx": "mx", "saved": SAVED, "amd": AMD, "margin": {"margin": 3}}


@functools.cache
def with_gradients_of(name):
  if name == "delayed":
    return with_gradients(lambda x, w: matmul(x, w, "delayed", scales=tuple(map(np.float32, (2, 3, 4)))))
  return with_gradients(lambda x, w: matmul(x, w, RECIPES[name]))


def test_no_magnitudes_make_nan_of_finite_operands():
  left, right = normal(6, 16), normal(16, 5, seed=1)
  left[2] = 0
  right[:, 3] = 0
  # What is large never meets what is large.
  left[:, 8:] = 0
  right[8:] *= np.float32(1e4)
  exponents = (-38, -30, -20, 0, 20, 30, 38)
  sized = lambda x, exponent: flushed(np.clip(x.astype(np.float64) * 10.0**exponent, -3e38, 3e38))
  for row in itertools.product(exponents, repeat=2):
    lhs, rhs = map(sized, (left, right), row)
    out, *grads = with_gradients_of("current")(lhs, rhs, np.ones((6, 5), np.float32))
    check_product(out, "ij,jk->ik", lhs, rhs, E4M3, E4M3)
    assert (np.asarray(out)[2] == 0).all(), row
    assert (np.asarray(out)[:, 3] == 0).all(), row
    assert not any(np.isnan(g).any() for g in grads), row


def test_dtypes_of_results_and_gradients():
  w, ct = normal(16, 4), np.ones((8, 4), np.float32)
  for in_dtype in (np.float32, jnp.bfloat16, np.float16):
    for out_dtype in (None, "float32" if in_dtype == jnp.bfloat16 else "bfloat16"):
      x = normal(8, 16).astype(in_dtype)
      out, d_x, d_w = with_gradients(lambda x, w, dtype=out_dtype: matmul(x, w, out_dtype=dtype))(x, w, ct)
      assert out.dtype == (out_dtype or in_dtype)
      assert (d_x.dtype, d_w.dtype) == (in_dtype, "float32")
      check_product(out, "ij,jk->ik", x.astype(np.float32), w, E4M3, E4M3)


def test_sums_are_of_float32():
  # bfloat16 would stop at 256, float16 at 2048 with ones.
  out = matmul(np.ones((1, 20_000), np.float32), np.ones((20_000, 1), np.float32))
  assert float(out[0, 0]) == 20_000


def test_products_of_nothing():
  for name in ("current", "mx", "saved"):
    for x, w in (((0, 32), (32, 32)), ((32, 0), (0, 32)), ((32, 32), (32, 0))):
      out, *grads = with_gradients_of(name)(*(np.ones(s, np.float32) for s in (x, w, (x[0], w[1]))))
      assert not np.asarray(out).any(), (name, x, w)
      assert [g.shape for g in grads] == [x, w]


# Zeros, infinities, not numbers: of (lhs, rhs, gradient) and what comes of them, (result, gradients of lhs and rhs)

FACTORS = ((0, 1), (2, 1), (0, 2))


@pytest.mark.parametrize("name", RECIPES)
def test_zero_tensors_give_zeros(name):
  square = [normal(32, 32, seed=i) for i in range(3)]
  for zero in ((0,), (1,), (2,), (0, 1, 2)):
    results = with_gradients_of(name)(*(x * (i not in zero) for i, x in enumerate(square)))
    for result, factors in zip(results, FACTORS, strict=True):
      assert np.isfinite(result).all()
      assert np.asarray(result).any() == (not set(factors) & set(zero)), (zero, factors)


@pytest.mark.parametrize(
  ("name", "dtype"),
  [
    *[(name, np.float32) for name in (*RECIPES, "delayed")],
    *[("current", dtype) for dtype in (jnp.bfloat16, np.float16)],
  ],
)
def test_what_is_not_finite_reaches_every_result_that_depends_on_it(name, dtype):
  row, column = np.arange(32)[:, None], np.arange(32)
  reached = (row == 3, False, row == 5), (column == 5, column == 3, False), (False, row == 3, column == 5)
  for bad, where in itertools.product((np.inf, -np.inf, np.nan), range(3)):
    operands = [normal(32, 32, seed=i).astype(dtype) for i in range(3)]
    operands[where][3, 5] = bad
    for got, expected in zip(with_gradients_of(name)(*operands), reached[where], strict=True):
      found = ~np.isfinite(np.asarray(got, np.float32))
      np.testing.assert_array_equal(found, np.broadcast_to(expected, (32, 32)), err_msg=f"{bad} {where}")


# Gradients beside bfloat16's


def test_gradients_beside_those_of_bfloat16():
  cast = lambda x: x.astype(jnp.bfloat16)
  bf16 = with_gradients(lambda x, w: (cast(x) @ cast(w)).astype(jnp.float32))
  for name, bound, scale in (
    ("current", GRADIENT_ERROR, 1e-15),
    ("current", GRADIENT_ERROR, 1e15),
    ("margin", GRADIENT_ERROR, 1e-15),
    ("amd", GRADIENT_ERROR, 1e15),
    ("mx", FORWARD_ERROR, 1e15),
  ):
    x, w, ct = normal(64, 256, scale=scale), normal(256, 96, seed=1), normal(64, 96, seed=2, scale=1e-6)
    want = [x.astype(np.float64) @ w, ct.astype(np.float64) @ w.T, x.T.astype(np.float64) @ ct]
    ours, wide = (
      [relative(got, r) for got, r in zip(run(x, w, ct), want, strict=True)]
      for run in (with_gradients_of(name), bf16)
    )
    assert ours[0] < FORWARD_ERROR, name
    assert max(ours[1:]) < bound, name
    # E5M2 has 5 bits of fraction less than bfloat16: 2**5 times its error, and another operand's.
    assert all(error < 2**6 * of_bf16 for error, of_bf16 in zip(ours, wide, strict=True)), name


def test_a_gradient_through_two_layers_points_where_that_of_float32_does():
  x, w1, w2 = normal(64, 64), normal(64, 128, seed=1, scale=0.125), normal(128, 32, seed=2, scale=0.1)
  loss = lambda dot: lambda w1, w2: jnp.mean(jnp.square(dot(jax.nn.gelu(dot(x, w1)), w2) - 1))
  got, want = compiled(lambda w1, w2: [jax.grad(loss(dot), (0, 1))(w1, w2) for dot in (matmul, jnp.matmul)])(
    w1, w2
  )
  for g, r in zip(got, want, strict=True):
    cosine = np.vdot(g, r) / (np.linalg.norm(g) * np.linalg.norm(r))
    assert cosine > 0.99


def test_hessian_beside_that_of_float32():
  x, w = normal(12, 16), normal(16, 8, seed=1, scale=0.2)
  loss = lambda dot: lambda w: jnp.mean(jnp.tanh(dot(x, w)))
  ours = loss(matmul)
  run = compiled(
    lambda w: (jax.hessian(loss(jnp.matmul))(w), jax.hessian(ours)(w), jax.jacrev(jax.jacrev(ours))(w))
  )
  want, *hessians = run(w)
  assert max(relative(hessian, want) for hessian in hessians) < 0.15


def test_a_product_of_a_tensor_with_itself():
  x = normal(16, 16)
  grad = lambda dot: compiled(jax.grad(lambda x: jnp.sum(dot(x, x) * x)))
  got, want = grad(matmul)(x), grad(jnp.matmul)(x)
  assert relative(got, want) < GRADIENT_ERROR


def test_linear_transposition():
  w, ct = normal(16, 8), normal(4, 8, seed=1)
  (got,) = jax.linear_transpose(lambda x: matmul(x, w), jax.ShapeDtypeStruct((4, 16), jnp.float32))(ct)
  assert relative(got, ct @ w.T) < GRADIENT_ERROR


def test_gradient_operands_are_e5m2():
  x, w = normal(8, 16), normal(16, 4)
  for flags, formats in {
    (True, False): (E5M2, E4M3),
    (False, True): (E4M3, E5M2),
    (True, True): (E5M2, E5M2),
  }.items():
    check_product(matmul(x, w, gradient_operand=flags), "ij,jk->ik", x, w, *formats)


# Errors


def test_errors_say_what_is_wrong():
  x, w = normal(4, 8), normal(8, 4)
  one = np.float32(1)
  for recipe, scales, message in (
    ("mx", (one,) * 3, "a scale for each block"),
    ("current", (one,) * 2, "expected three"),
    ("current", (np.ones(3, np.float32),) * 3, "expected three"),
  ):
    with pytest.raises(ValueError, match=message):
      matmul(x, w, recipe, scales=scales)
  for arguments, message in (
    ((x, w, "delayed"), "scales"),
    ((x, w, "curent"), "auto, current, delayed, per_channel, mx, nvfp4"),
    ((x.astype(np.int32), w), "int32"),
    ((x, w.astype(np.complex64)), "complex64"),
  ):
    with pytest.raises((ValueError, TypeError), match=message):
      matmul(*arguments)
