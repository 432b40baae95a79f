"""`stochastic_round`: right on average, and exact where the format is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

KEY = jax.random.key(0)
TARGETS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DRAWS = 100_000


def draws(value, dtype, key=KEY):
  x = jnp.full(DRAWS, value, jnp.float32)
  return np.asarray(jax.jit(mpjax.stochastic_round, static_argnums=2)(x, key, dtype).astype(jnp.float32))


@pytest.mark.parametrize("dtype", TARGETS)
def test_the_mean_of_many_draws_is_the_value(dtype):
  info = jnp.finfo(dtype)
  bound = 3e-5 * 2.0 ** (7 - info.nmant)  # a step of bfloat16 has 7 bits
  for value in (1.001, -0.3, 3.14159, 200.7, 0.0331):
    found = draws(value, dtype)
    assert len(np.unique(found)) == 2
    assert abs(found.mean(dtype=np.float64) / value - 1) <= bound, value


@pytest.mark.parametrize("dtype", TARGETS)
def test_subnormal_numbers_are_rounded_to_their_neighbours(dtype):
  step = float(jnp.finfo(dtype).smallest_subnormal)
  for whole, part in ((0, 0.25), (1, 0.5), (3, 0.75)):
    x = jnp.full(DRAWS, np.float32((whole + part) * step))
    found = mpjax.stochastic_round(x, KEY, dtype)
    bits = np.asarray(found).view(np.uint8 if found.dtype.itemsize == 1 else np.uint16)
    assert set(np.unique(bits)) == {whole, whole + 1}  # subnormal numbers are counted by their bits
    assert abs(bits.mean() - whole - part) < 0.01


@pytest.mark.parametrize("dtype", TARGETS)
def test_what_the_format_has_stays(dtype):
  bits = np.arange(2**8, dtype=np.uint8) if "8_" in dtype else np.arange(2**16, dtype=np.uint16)
  exact = bits.view(jnp.dtype(dtype))
  found = mpjax.stochastic_round(jnp.asarray(exact.astype(np.float32)), KEY, dtype)
  nan = np.isnan(exact.astype(np.float32))
  np.testing.assert_array_equal(np.asarray(found).view(bits.dtype)[~nan], bits[~nan])
  assert np.isnan(np.asarray(found)[nan].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", TARGETS)
def test_infinities_nan_zeros_and_what_is_too_large(dtype):
  largest = float(jnp.finfo(dtype).max)
  beyond = np.float32(min(largest * 1.01, float(np.finfo(np.float32).max)))
  x = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, 0.0, -0.0, beyond, -beyond], jnp.float32)
  found = np.asarray(mpjax.stochastic_round(x, KEY, dtype).astype(jnp.float32))
  infinite = np.isnan if dtype == "float8_e4m3fn" else np.isinf  # which has no infinities
  assert infinite(found[:2]).all()
  assert np.isnan(found[2])
  assert (found[3:5] == 0).all()
  assert list(np.signbit(found[3:5])) == [False, True]
  np.testing.assert_array_equal(found[5:], [largest, -largest])
  for i in range(20):  # no draw carries the largest float32 to infinity
    key = jax.random.fold_in(KEY, i)
    assert jnp.isfinite(mpjax.stochastic_round(jnp.full(1000, beyond), key, dtype).astype(jnp.float32)).all()


def test_a_key_says_the_bits_and_another_says_others():
  x = jax.random.normal(KEY, (1000,))
  first = mpjax.stochastic_round(x, KEY)
  np.testing.assert_array_equal(first, mpjax.stochastic_round(x, KEY))
  assert (first != mpjax.stochastic_round(x, jax.random.key(1))).any()


@pytest.mark.parametrize("dtype", TARGETS)
def test_under_strict_promotion(dtype):
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
    assert mpjax.stochastic_round(jnp.ones((2, 3)), KEY, dtype).dtype == dtype


def test_other_dtypes_are_refused():
  with pytest.raises(ValueError, match="dtype='float32'"):
    mpjax.stochastic_round(jnp.ones(3), KEY, jnp.float32)
  with pytest.raises(TypeError, match="x is int32"):
    mpjax.stochastic_round(jnp.ones(3, jnp.int32), KEY)
