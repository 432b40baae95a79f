"""The FP8 product and its derivatives against float64, within what rounding to FP8 explains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.fp8 import fp8_dot_general
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

pytestmark = (
  pytest.mark.optimised
)  # the quick code generators of XLA for CPU do not round to the fnuz formats

POW2 = {"pow2_scales": True, "margin": 3}


# The product


@pytest.mark.slow
@examples(15)
@given(products(), tensors(), tensors(), st.booleans(), st.sampled_from(["float32", "bfloat16", "float16"]))
def test_product_of_any_shape_and_magnitude_is_within_the_rounding_of_fp8(case, lhs, rhs, pow2, out_dtype):
  lhs, rhs = lhs(case.shape(case.lhs)), rhs(case.shape(case.rhs))
  recipe = {"recipe": "current", "pow2_scales": pow2}
  out = compiled(lambda x, w: fp8_dot_general(x, w, case.dims, recipe, out_dtype=out_dtype))(lhs, rhs)
  assert (out.dtype, out.shape) == (out_dtype, case.shape(case.out))
  check_product(out, f"{case.lhs},{case.rhs}->{case.out}", lhs, rhs, E4M3, E4M3, pow2=pow2)


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


@functools.cache
def with_gradients_of(recipe):
  return with_gradients(
    lambda x, w: matmul(x, w, {"saved": SAVED, "amd": AMD, "pow2": POW2}.get(recipe, recipe))
  )


@pytest.mark.parametrize("lhs_exponent", [-38, -30, -20, 0, 20, 30, 38])
@pytest.mark.parametrize("rhs_exponent", [-38, -30, -20, 0, 20, 30, 38])
def test_no_magnitudes_make_nan_of_finite_operands(lhs_exponent, rhs_exponent):
  lhs, rhs = normal(6, 16), normal(16, 5, seed=1)
  lhs[2] = 0
  rhs[:, 3] = 0
  # What is large never meets what is large.
  lhs[:, 8:] = 0
  rhs[8:] *= np.float32(1e4)
  lhs, rhs = (
    flushed(np.clip(x.astype(np.float64) * 10.0**exponent, -3e38, 3e38))
    for x, exponent in ((lhs, lhs_exponent), (rhs, rhs_exponent))
  )
  out, *grads = with_gradients_of("current")(lhs, rhs, np.ones((6, 5), np.float32))
  check_product(out, "ij,jk->ik", lhs, rhs, E4M3, E4M3)
  assert (np.asarray(out)[2] == 0).all()
  assert (np.asarray(out)[:, 3] == 0).all()
  assert not any(np.isnan(g).any() for g in grads)


@pytest.mark.parametrize(
  ("in_dtype", "out_dtype"),
  [
    ("float32", "bfloat16"),
    ("float32", None),
    ("bfloat16", "float32"),
    ("bfloat16", None),
    ("float16", "bfloat16"),
    ("float16", None),
  ],
)
def test_dtypes_of_results_and_gradients(in_dtype, out_dtype):
  x, w = jnp.asarray(normal(8, 16), in_dtype), jnp.asarray(normal(16, 4), "float32")
  run = with_gradients(lambda x, w: matmul(x, w, out_dtype=out_dtype))
  out, d_x, d_w = run(x, w, jnp.ones((8, 4)))
  assert out.dtype == (out_dtype or in_dtype)
  assert (d_x.dtype, d_w.dtype) == (in_dtype, "float32")
  check_product(out, "ij,jk->ik", np.asarray(x, np.float32), np.asarray(w, np.float32), E4M3, E4M3)


def test_sums_are_of_float32():
  # bfloat16 would stop at 256, float16 at 2048 with ones.
  out = matmul(np.ones((1, 20_000), np.float32), np.ones((20_000, 1), np.float32))
  assert float(out[0, 0]) == 20_000


@pytest.mark.parametrize("recipe", ["current", "block", "saved"])
@pytest.mark.parametrize("shapes", [((0, 32), (32, 32)), ((32, 0), (0, 32)), ((32, 32), (32, 0))], ids=str)
def test_products_of_nothing(recipe, shapes):
  x, w = jnp.ones(shapes[0]), jnp.ones(shapes[1])
  out, *grads = with_gradients_of(recipe)(x, w, jnp.ones((shapes[0][0], shapes[1][1])))
  assert not np.asarray(out).any()
  assert [g.shape for g in grads] == list(shapes)


# Zeros, infinities, not numbers


@pytest.mark.parametrize("recipe", ["current", "block", "amd", "saved", "pow2"])
@pytest.mark.parametrize("zero", [(0,), (1,), (2,), (0, 1, 2)], ids=str)
def test_zero_tensors_give_zeros(recipe, zero):
  operands = [normal(32, 64), normal(64, 32, seed=1), normal(32, 32, seed=2)]
  operands = [x * (i not in zero) for i, x in enumerate(operands)]
  out, d_x, d_w = with_gradients_of(recipe)(*operands)
  for result, factors in ((out, (0, 1)), (d_x, (2, 1)), (d_w, (0, 2))):
    if any(i in zero for i in factors):
      np.testing.assert_array_equal(result, np.zeros_like(result))
    assert np.isfinite(result).all()


@functools.cache
def with_given_scales():
  scales = tuple(map(jnp.float32, (2.0, 3.0, 4.0)))
  return with_gradients(lambda x, w: matmul(x, w, "delayed", scales=scales))


@pytest.mark.parametrize(
  ("recipe", "dtype"),
  [
    *[(recipe, "float32") for recipe in ("block", "amd", "saved", "pow2", "delayed")],
    *[("current", dtype) for dtype in ("float32", "bfloat16", "float16")],
  ],
)
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("where", ["lhs", "rhs", "gradient"])
def test_what_is_not_finite_reaches_every_result_that_depends_on_it(recipe, bad, where, dtype):
  lhs, rhs, ct = (normal(32, 32, seed=i) for i in range(3))
  {"lhs": lhs, "rhs": rhs, "gradient": ct}[where][3, 5] = bad
  run = with_given_scales() if recipe == "delayed" else with_gradients_of(recipe)
  results = run(*(jnp.asarray(x, dtype) for x in (lhs, rhs, ct)))
  row, column = np.arange(32)[:, None], np.arange(32)
  # of the result, of lhs's gradient, of rhs's
  reached = {
    "lhs": (row == 3, False, row == 5),
    "rhs": (column == 5, column == 3, False),
    "gradient": (False, row == 3, column == 5),
  }
  for got, expected in zip(results, reached[where], strict=True):
    np.testing.assert_array_equal(
      ~np.isfinite(np.asarray(got, np.float32)), np.broadcast_to(expected, (32, 32))
    )


# Gradients beside bfloat16's


@pytest.mark.parametrize(
  ("recipe", "bound", "scale"),
  [
    ("current", GRADIENT_ERROR, 1e-15),
    ("current", GRADIENT_ERROR, 1e15),
    ({"pow2_scales": True}, GRADIENT_ERROR, 1e-15),
    (AMD, GRADIENT_ERROR, 1e15),
    ("block", FORWARD_ERROR, 1e15),
  ],
  ids=str,
)
def test_gradients_beside_those_of_bfloat16(recipe, bound, scale):
  x, w, ct = normal(64, 256, scale=scale), normal(256, 96, seed=1), normal(64, 96, seed=2, scale=1e-6)
  half = jnp.bfloat16
  bf16 = lambda x, w: (x.astype(half) @ w.astype(half)).astype(jnp.float32)
  want = [x.astype(np.float64) @ w, ct.astype(np.float64) @ w.T, x.T.astype(np.float64) @ ct]

  def errors(fun):
    return [relative(got, r) for got, r in zip(with_gradients(fun)(x, w, ct), want, strict=True)]

  fp8, wide = errors(lambda x, w: matmul(x, w, recipe)), errors(bf16)
  assert fp8[0] < FORWARD_ERROR
  assert max(fp8[1:]) < bound
  # E5M2 has 5 bits of fraction less than bfloat16: 2**5 times its error, and another operand's.
  for error, of_bf16 in zip(fp8, wide, strict=True):
    assert error < 2**6 * of_bf16


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


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ((normal(4, 8), normal(8, 4), "delayed"), "scales"),
    ((normal(4, 8), normal(8, 4), "curent"), "current, delayed, block"),
    ((normal(4, 8).astype(np.int32), normal(8, 4)), "int32"),
    ((normal(4, 8), normal(8, 4).astype(np.complex64)), "complex64"),
  ],
  ids=["delayed without scales", "recipe", "integers", "complex"],
)
def test_errors_say_what_is_wrong(arguments, message):
  with pytest.raises((ValueError, TypeError), match=message):
    matmul(*arguments)
