"""The reference of the corpus: second derivatives of products of rounded operands."""

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.casting.programs._ideal import Products

DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}
half = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def operands(*shapes):
  rng = np.random.default_rng(0)
  return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def rounded(x, dtype):
  return np.asarray(x).astype(dtype).astype(np.float32)


@half
def test_second_derivatives_round_what_they_multiply(dtype):
  """The gradient of a gradient, and a tangent through one."""
  x, w, v = operands((6,), (6, 5), (6,))
  slope = jax.grad(lambda x, w: Products(dtype).dot(x, w).sum())
  got = jax.grad(lambda w: v @ slope(x, w))(w)
  # v is no operand of a product with rounded operands here, but the cotangent of one.
  np.testing.assert_allclose(got, np.outer(rounded(v, dtype), np.ones(5)), rtol=1e-6)
  _, tangent = jax.jvp(lambda x: Products(dtype).dot(x, w), (x,), (v,))
  np.testing.assert_allclose(tangent, rounded(v, dtype) @ rounded(w, dtype), rtol=1e-5, atol=1e-5)
