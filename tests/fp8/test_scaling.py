"""Scales and the saturating cast of a tensor, against float64 NumPy and ml_dtypes: a product with 1 shows them."""

import functools
import itertools

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.fp8._reference import FORMATS, compiled, flushed, held, matmul, rounded, scale_for

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

BAD = (np.inf, -np.inf, np.nan)


def recipe(dtype, **options):
  """A recipe whose forward products are of a format: that of gradients has to be another."""
  other = {"gradient_dtype": dtype.replace("e5m2", "e4m3" if "fnuz" in dtype else "e4m3fn")}
  return {"recipe": "current", "forward_dtype": dtype, **(other if "e5m2" in dtype else {}), **options}


def column(x):
  return np.asarray(x)[:, None]


@compiled
def cast(x, scale):
  """What a column is in every format under a scale that is given."""
  one = jnp.float32(1)
  return {
    name: matmul(x, one[None, None], recipe(name, recipe="delayed"), scales=(scale, one, one))[:, 0]
    for name in FORMATS
  }


def test_the_reference_rounds_as_ml_dtypes_does():
  x = np.random.default_rng(0).normal(size=4096) * 10.0 ** np.linspace(-9, 6, 4096)
  for name, (_, _, largest) in FORMATS.items():
    numbers = np.append(x, [largest, -largest]).astype(np.float32)
    want = np.clip(numbers, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(rounded(numbers, name), want)
    assert float(jnp.finfo(name).max) == largest


def test_every_bfloat16_and_its_neighbours_round_as_by_hand():
  high = np.arange(2**16, dtype=np.uint32) << 16
  x = np.concatenate([high, high + 1, high + 0x8000, high + 0x7FFF, high + 0x8001, high + 0xFFFF])
  x = x.astype(np.uint32).view(np.float32)
  x = flushed(x[np.isfinite(x)])
  for name, got in cast(column(x), np.float32(1)).items():
    np.testing.assert_array_equal(got, rounded(x, name), err_msg=name)


def test_overflow_saturates_and_what_is_not_finite_becomes_nan():
  x = np.array([6e4, -6e4, *BAD, 0.0, -0.0], np.float32)
  for dtype, scale in itertools.product(("float32", "bfloat16", "float16"), np.float32([1, 1e30])):
    for name, got in cast(column(x).astype(getattr(ml_dtypes, dtype, dtype)), scale).items():
      largest = np.float32(np.float32(FORMATS[name][2] / scale).astype(got.dtype))
      np.testing.assert_array_equal(np.float32(got), [largest, -largest, *[np.nan] * 3, 0, 0])


@functools.cache
def by_own_scale(margin):
  """What a column is in every format under its own scale."""
  one = np.ones((1, 1), np.float32)
  return compiled(lambda x: {name: matmul(x, one, recipe(name, margin=margin))[:, 0] for name in FORMATS})


@pytest.mark.parametrize("margin", [0, 1, 7])
def test_a_scale_brings_the_largest_number_to_that_of_the_format_less_the_margin(margin):
  numbers = np.random.default_rng(0).uniform(-1, 1, 64)
  for amax in np.float32([1e-20, 1e-3, 1, 2, 448, 57344, 240, 1e20]):
    x = (np.append(numbers, 1) * amax).astype(np.float32)
    for name, got in by_own_scale(margin)(column(x)).items():
      want = held(x, scale_for(x, name, margin), name)
      np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=f"{name} {amax}")


def test_the_scale_of_what_is_not_finite_is_one():
  for bad in BAD:
    for name, got in by_own_scale(0)(column(np.float32([bad, 0.3]))).items():
      np.testing.assert_array_equal(got, [np.nan, rounded(np.float32(0.3), name)], err_msg=f"{name} {bad}")
