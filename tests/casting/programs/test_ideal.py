"""The reference of the corpus: second derivatives of products of rounded operands, and what fails it."""

import jax
import ml_dtypes
import numpy as np
import pytest

from tests.casting.programs._ideal import ORDERS, Comparison, Products

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


@pytest.mark.parametrize(
  ("changed", "said"),
  [
    ({"errors": {"value": (4e-3, 1e-3)}}, "value is off by 0.004, 4.0 times the ideal 0.001"),
    ({"errors": {"gradient": (float("nan"), 1e-3)}}, "gradient is off by nan"),
    ({"errors": {"value": (2e-5, 0.0)}}, "value is off by 2e-05"),
    ({"changed": ["discrete['ids']"]}, "discrete['ids'] is not float32's"),
    ({"nonfinite": ["gradient"]}, "gradient is not finite"),
  ],
)
def test_comparison_names_what_is_not_as_it_should_be(changed, said):
  good = Comparison(f"bf16 {ORDERS[0]}", {"value": (3e-3, 1e-3), "gradient": (9e-6, 0.0)}, [], [])
  assert not list(good.failures(3.0))
  (line,) = good._replace(**changed).failures(3.0)
  assert said in line
