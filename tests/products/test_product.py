"""The FP8 product and its derivatives are products of rounded operands, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.products import fp8_dot_general
from tests.fp8._reference import (
  AMD,
  E4M3,
  E4M3_AMD,
  E5M2,
  E5M2_AMD,
  SAVED,
  Product,
  check_product,
  compiled,
  flushed,
  matmul,
  normal,
  relative,
  with_gradients,
)

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

RECIPES = {
  "current": "current",
  "mx": "mx",
  "saved": SAVED,
  "amd": AMD,
  "margin": {"margin": 3},
  "delayed": "delayed",
}
GIVEN = (2.0**-9, float(np.float32(0.37)), 300.0)  # what a product is given under `delayed`


def options_of(name):
  return {"recipe": RECIPES[name], "scales": tuple(map(np.float32, GIVEN)) if name == "delayed" else None}


@functools.cache
def with_gradients_of(name):
  return with_gradients(functools.partial(matmul, **options_of(name)))


# Dimensions of every kind, in any order, dimensions of one, and several contracted ones.
CASES = [
  Product("ik", "kj", "", "k", {"i": 4, "k": 6, "j": 5}),
  Product("bik", "kjb", "b", "k", {"b": 2, "i": 4, "k": 6, "j": 1}),
  Product("kilm", "lckb", "", "lk", {"k": 3, "i": 2, "l": 4, "m": 5, "c": 1, "b": 2}),
  Product("ab", "ba", "ab", "", {"a": 3, "b": 4}),
]


@pytest.mark.parametrize("name", ["current", "margin", "amd", "saved", "delayed"])
def test_derivatives_of_any_dimensions_are_products_of_rounded_operands(name):
  forward, gradient = (E4M3_AMD, E5M2_AMD) if name == "amd" else (E4M3, E5M2)
  margin = 3 if name == "margin" else 0
  x, w, g = GIVEN if name == "delayed" else (None,) * 3
  for case in CASES:
    lhs, rhs, ct, d_lhs = (
      normal(*case.shape(letters), seed=i, scale=10.0 ** (3 * i))
      for i, letters in enumerate((case.lhs, case.rhs, case.out, case.lhs))
    )

    @compiled
    def run(lhs, rhs, ct, d_lhs, case=case):
      fun = lambda lhs, rhs: fp8_dot_general(lhs, rhs, case.dims, **options_of(name))
      out, back = jax.vjp(fun, lhs, rhs)
      return out, *back(ct), jax.jvp(lambda lhs: fun(lhs, rhs), (lhs,), (d_lhs,))[1]

    out, of_lhs, of_rhs, tangent = run(lhs, rhs, ct, d_lhs)
    of = lambda a, b, c: f"{a},{b}->{c}"
    check_product(out, of(case.lhs, case.rhs, case.out), lhs, rhs, forward, forward, (x, w), margin)
    check_product(of_lhs, of(case.out, case.rhs, case.lhs), ct, rhs, gradient, forward, (g, w), margin)
    check_product(of_rhs, of(case.lhs, case.out, case.rhs), lhs, ct, forward, gradient, (x, g), margin)
    if name != "saved":  # whose rhs is rounded once more
      spec = of(case.lhs, case.rhs, case.out)
      check_product(tangent, spec, d_lhs, rhs, gradient, forward, (None, w), margin)


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
    assert not np.asarray(out)[2].any(), row
    assert not np.asarray(out)[:, 3].any(), row
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


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_give_zeros_and_what_is_not_finite_reaches_every_result_that_depends_on_it(name):
  square = [normal(32, 32, seed=i) for i in range(3)]
  for zero in ((0,), (1,), (2,), (0, 1, 2)):
    results = with_gradients_of(name)(*(x * (i not in zero) for i, x in enumerate(square)))
    for result, factors in zip(results, ((0, 1), (2, 1), (0, 2)), strict=True):
      assert np.isfinite(result).all()
      assert np.asarray(result).any() == (not set(factors) & set(zero)), (zero, factors)
  row, column = np.arange(32)[:, None], np.arange(32)
  reached = (row == 3, False, row == 5), (column == 5, column == 3, False), (False, row == 3, column == 5)
  for dtype in (np.float32, jnp.bfloat16, np.float16) if name == "current" else (np.float32,):
    for bad, where in itertools.product((np.inf, -np.inf, np.nan), range(3)):
      operands = [x.astype(dtype) for x in square]
      operands[where][3, 5] = bad
      for got, expected in zip(with_gradients_of(name)(*operands), reached[where], strict=True):
        found = ~np.isfinite(np.asarray(got, np.float32))
        np.testing.assert_array_equal(found, np.broadcast_to(expected, (32, 32)), err_msg=f"{bad} {where}")


# Derivatives


def test_hessian_beside_that_of_float32():
  x, w = normal(12, 16), normal(16, 8, seed=1, scale=0.2)
  loss = lambda dot: lambda w: jnp.mean(jnp.tanh(dot(x, w)))
  ours = loss(matmul)
  run = compiled(
    lambda w: (jax.hessian(loss(jnp.matmul))(w), jax.hessian(ours)(w), jax.jacrev(jax.jacrev(ours))(w))
  )
  want, *hessians = run(w)
  assert max(relative(hessian, want) for hessian in hessians) < 0.15


# Errors


SQUARE, ONE = (normal(4, 8), normal(8, 4)), np.float32(1)
WRONG = [
  ((*SQUARE, "mx"), (ONE,) * 3, "a scale for each block"),
  ((*SQUARE, "current"), (ONE,) * 2, "expected three"),
  ((*SQUARE, "current"), (np.ones(3, np.float32),) * 3, "expected three"),
  ((*SQUARE, "delayed"), None, "scales"),
  ((*SQUARE, "curent"), None, "auto, current, delayed, per_channel, mx, nvfp4"),
  ((SQUARE[0].astype(np.int32), SQUARE[1]), None, "int32"),
  ((SQUARE[0], SQUARE[1].astype(np.complex64)), None, "complex64"),
  ((np.ones((32, 33)), np.ones((33, 32)), "mx"), None, "contracts 33 elements, expected a multiple of 32"),
  ((np.ones((16, 32)), np.ones((32, 40)), "nvfp4"), None, "40 rows, expected a multiple of 16"),
]


@pytest.mark.parametrize(("arguments", "scales", "message"), WRONG)
def test_errors_say_what_is_wrong(arguments, scales, message):
  with pytest.raises(ValueError, match=message):
    matmul(*arguments, scales=scales)
