"""Amax, scales, the saturating cast and MXFP8 blocks against float64 NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.fp8 import _scaling
from tests.fp8._reference import FORMATS, OPTIONS, bits, flushed, held_in_blocks, rounded, scale_for

pytestmark = (
  pytest.mark.optimised
)  # the quick code generators of XLA for CPU do not round to the fnuz formats

# One small program for each shape, rather than one for each operation in it.
compiled = functools.partial(jax.jit, compiler_options=OPTIONS)
amax_of = compiled(_scaling.amax_of, static_argnums=1)
scale_of = compiled(_scaling.scale_of, static_argnums=(1, 2, 3))
quantise = compiled(_scaling.quantise, static_argnums=2)
quantise_blocks = compiled(_scaling.quantise_blocks, static_argnums=(1, 2, 3))

DTYPES = {name: getattr(jnp, name) for name in FORMATS}
format_ = pytest.mark.parametrize("name", FORMATS)
RNG = np.random.default_rng(5)
INF, NAN = np.inf, np.nan


def spread(*shape, low=-30, high=30, seed=0):
  """Normal numbers of many magnitudes, zeros among them."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape) * 10.0 ** rng.uniform(low, high, size=shape) * (rng.uniform(size=shape) > 0.05)
  return flushed(x.astype(np.float32))


@format_
def test_reference_rounds_as_ml_dtypes_does(name):
  x = np.concatenate([spread(4096, low=-9, high=6), np.float32(FORMATS[name][2] * np.array([1, -1]))])
  largest = FORMATS[name][2]
  want = np.clip(x, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float64)
  np.testing.assert_array_equal(rounded(x, name), want)
  assert float(jnp.finfo(DTYPES[name]).max) == largest


# amax


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", *FORMATS])
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 4)])
def test_amax_is_the_largest_magnitude_in_float32(dtype, shape):
  x = jnp.asarray(RNG.normal(size=shape) * 8, jnp.float32).astype(dtype)
  got = amax_of(x)
  assert (got.dtype, got.shape) == (jnp.float32, ())
  assert float(got) == np.max(np.abs(np.asarray(x, np.float64)), initial=0)


def test_amax_by_leading_dimensions():
  x = RNG.normal(size=(2, 3, 5)).astype(np.float32)
  np.testing.assert_array_equal(amax_of(jnp.asarray(x), 1), np.abs(x).max((1, 2)))
  np.testing.assert_array_equal(amax_of(jnp.asarray(x), 2), np.abs(x).max(2))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amax_tells_of_what_is_not_finite(bad, dtype):
  x = jnp.zeros(300).at[123].set(bad).astype(dtype)
  assert not np.isfinite(amax_of(x))


# scales


@format_
@pytest.mark.parametrize("margin", [0, 1, 7])
@pytest.mark.parametrize("pow2", [False, True])
def test_scale_brings_amax_to_the_largest_number_less_the_margin(name, margin, pow2):
  amax = np.concatenate([10.0 ** np.arange(-30, 31), [1, 2, 448, 57344, 240, 3.4e38, 2.0**-126]]).astype(
    np.float32
  )
  scale = np.asarray(scale_of(jnp.asarray(amax), DTYPES[name], margin, pow2))
  assert scale.dtype == np.float32
  want = [scale_for(np.array([a]), name, margin, pow2) for a in amax]
  np.testing.assert_allclose(scale, want, rtol=2.0**-23)
  largest = FORMATS[name][2] * 2.0**-margin
  top = amax.astype(np.float64) * scale
  free = (scale > 2.0**-126) & (scale < 2.0**126)
  assert (top <= largest * (1 + 2.0**-22))[free].all()
  assert (top <= FORMATS[name][2]).all() or margin == 0
  assert (top[free] > largest * (0.5 if pow2 else 1 - 2.0**-22)).all()
  if pow2:
    assert (np.frexp(scale)[0] == 0.5).all()


@format_
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize("margin", [0, 5, 60])
@pytest.mark.parametrize("amax", [0.0, -0.0, INF, NAN])
def test_an_amax_that_says_nothing_gives_one(name, pow2, margin, amax):
  assert float(scale_of(jnp.float32(amax), DTYPES[name], margin, pow2)) == 1.0


@format_
@pytest.mark.parametrize("pow2", [False, True])
@pytest.mark.parametrize(
  "amax", [2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e-37, 3e38, float(np.finfo(np.float32).max)]
)
def test_a_scale_and_its_reciprocal_are_normal_numbers(name, pow2, amax):
  for margin in (0, 30):
    scale = scale_of(jnp.float32(amax), DTYPES[name], margin, pow2)
    assert 2.0**-126 <= float(scale) <= 2.0**126
    assert 2.0**-126 <= float(1 / scale) <= 2.0**126
    q = quantise(jnp.float32(amax), scale, DTYPES[name])
    assert np.isfinite(np.asarray(q, np.float64))


def test_scales_of_several_tensors_at_once():
  amax = np.array([[0, 1], [INF, 3e-20]], np.float32)
  want = [[float(scale_of(jnp.float32(a), jnp.float8_e5m2, 2)) for a in row] for row in amax]
  np.testing.assert_array_equal(scale_of(jnp.asarray(amax), jnp.float8_e5m2, 2), want)


@pytest.mark.parametrize("margin", [0, 4])
def test_scales_under_jit_are_the_same(margin):
  amax = jnp.abs(jnp.asarray(spread(200)))
  fun = lambda a: _scaling.scale_of(a, jnp.float8_e4m3fn, margin)
  np.testing.assert_array_equal(bits(jax.jit(fun)(amax)), bits(fun(amax)))


# the cast


@format_
@pytest.mark.parametrize("jitted", [False, True])
def test_every_bfloat16_and_its_neighbours_round_as_by_hand(name, jitted):
  high = np.arange(2**16, dtype=np.uint32) << 16
  x = np.concatenate([high, high + 1, high + 0x8000, high + 0x7FFF, high + 0x8001, high + 0xFFFF])
  x = x.astype(np.uint32).view(np.float32)
  x = flushed(x[np.isfinite(x)])
  fun = lambda x: _scaling.quantise(x, jnp.float32(1), DTYPES[name])
  got = np.asarray((jax.jit(fun) if jitted else fun)(jnp.asarray(x)))
  assert got.dtype == DTYPES[name]
  np.testing.assert_array_equal(got.astype(np.float64), rounded(x, name))


@format_
@pytest.mark.parametrize("scale", [2.0**-126, 1e-20, 0.3, 1.0, 448.0, 1e20, 2.0**126])
def test_a_scaled_cast_is_that_of_the_product(name, scale):
  x = spread(4096, low=-37, high=37)
  with np.errstate(over="ignore"):
    want = rounded(np.clip(x * np.float32(scale), -1e30, 1e30), name)
  got = np.asarray(quantise(jnp.asarray(x), jnp.float32(scale), DTYPES[name]), np.float64)
  np.testing.assert_array_equal(got, want)


@format_
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_overflow_saturates_and_what_is_not_finite_becomes_nan(name, dtype):
  largest = FORMATS[name][2]
  x = jnp.asarray([6e4, -6e4, INF, -INF, NAN, 0.0, -0.0, largest, -largest], dtype)
  for scale in (1.0, 1e30, 2.0**126):
    q = np.asarray(quantise(x, jnp.float32(scale), DTYPES[name]), np.float64)
    np.testing.assert_array_equal(np.isnan(q), [False] * 2 + [True] * 3 + [False] * 4)
    np.testing.assert_array_equal(q[[0, 1]], [largest, -largest])
    np.testing.assert_array_equal(q[[5, 6]], [0, 0])
    np.testing.assert_array_equal(q[[7, 8]], [largest, -largest])


@format_
def test_a_tiny_negative_number_is_zero_and_not_the_nan_of_fnuz(name):
  x = jnp.asarray([-1e-30, -1e-7, -0.0, -(2.0**-126)])
  q = np.asarray(quantise(x, jnp.float32(1), DTYPES[name]), np.float64)
  np.testing.assert_array_equal(q, np.zeros(4))


def test_a_cast_with_a_scale_for_each_leading_index():
  x = spread(3, 2, 40, low=-3, high=3)
  scale = np.array([[1, 2], [0.3, 5], [1e3, 1e-3]], np.float32)
  got = np.asarray(quantise(jnp.asarray(x), jnp.asarray(scale), jnp.float8_e4m3fn), np.float64)
  np.testing.assert_array_equal(got, rounded(x * scale[:, :, None], "float8_e4m3fn"))


@format_
@pytest.mark.parametrize("magnitude", [1e-37, 1e-30, 1e-3, 1.0, 1e30, 3e38])
def test_nothing_saturates_with_the_scale_of_its_own_amax(name, magnitude):
  x = flushed((RNG.uniform(-1, 1, size=500) * magnitude).astype(np.float32))
  scale = scale_of(amax_of(jnp.asarray(x)), DTYPES[name])
  back = np.asarray(quantise(jnp.asarray(x), scale, DTYPES[name]), np.float64) / float(scale)
  fraction, smallest, _ = FORMATS[name]
  bound = np.maximum(2.0 ** -(fraction + 1) * np.abs(x), 2.0 ** (smallest - fraction - 1) / float(scale))
  assert (np.abs(back - x) <= bound + 2.0**-22 * np.abs(x)).all()


# blocks


@format_
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_blocks_are_as_by_hand(name, magnitude):
  x = spread(3, 128, low=-6, high=6) * np.float32(magnitude)
  x[0, 32:64] = 0
  q, scales = quantise_blocks(jnp.asarray(x), 1, 32, DTYPES[name])
  assert (q.dtype, scales.dtype) == (DTYPES[name], jnp.float8_e8m0fnu)
  assert (q.shape, scales.shape) == ((3, 128), (3, 4))
  want, unit = held_in_blocks(x, name)
  got_unit = np.asarray(scales, np.float64)
  np.testing.assert_array_equal(got_unit, unit)
  np.testing.assert_array_equal(np.asarray(q, np.float64) * np.repeat(got_unit, 32, 1), want)


@format_
def test_a_block_at_a_power_of_two_of_the_largest_number_keeps_its_scale(name):
  largest = FORMATS[name][2]
  above = np.nextafter(np.float32(largest), np.float32(INF))
  for amax, want in [(largest, 1), (above, 2), (largest * 2, 2), (largest / 2, 0.5), (-above, 2)]:
    x = np.full((1, 32), 1e-3, np.float32)
    x[0, 7] = amax
    q, scales = quantise_blocks(jnp.asarray(x), 1, 32, DTYPES[name])
    assert float(scales[0, 0]) == want
    assert float(q[0, 7]) == pytest.approx(float(amax) / want, rel=2.0 ** -(FORMATS[name][0] + 1))


@format_
@pytest.mark.parametrize(
  "magnitude", [2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 1e-30, 1.0, 1e30, 3.4028235e38]
)
def test_no_block_saturates_anywhere_in_the_range(name, magnitude):
  x = np.zeros((4, 32), np.float32)
  x[:, 3] = np.float32(magnitude) * np.array([1, -1, 0.75, 0.5], np.float32)
  q, scales = quantise_blocks(jnp.asarray(x), 1, 32, DTYPES[name])
  q, scales = np.asarray(q, np.float64), np.asarray(scales, np.float64)
  assert np.isfinite(q).all()
  assert (scales >= 2.0**-126).all()
  assert (scales <= 2.0**127).all()
  assert (np.frexp(scales)[0] == 0.5).all()
  assert (
    np.abs(q[:, 3] * scales[:, 0] - x[:, 3]) <= 2.0 ** -(FORMATS[name][0] + 1) * np.abs(x[:, 3]) + 2.0**-126
  ).all()


@format_
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_block_that_is_not_finite_leaves_the_others_alone(name, bad):
  x = spread(2, 64, low=-2, high=2)
  want_q, want_scales = quantise_blocks(jnp.asarray(x), 1, 32, DTYPES[name])
  x[0, 40] = bad
  q, scales = quantise_blocks(jnp.asarray(x), 1, 32, DTYPES[name])
  assert np.isnan(np.asarray(q, np.float64)[0, 40])
  assert np.isfinite(np.asarray(scales, np.float64)).all()
  keep = np.ones((2, 64), bool)
  keep[0, 32:] = False
  np.testing.assert_array_equal(bits(q)[keep], bits(want_q)[keep])
  np.testing.assert_array_equal(bits(scales)[keep[:, ::32]], bits(want_scales)[keep[:, ::32]])


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_blocks_lie_along_the_axis_asked_for(axis, dtype):
  x = np.moveaxis(spread(2, 5, 96, low=-4, high=4, seed=axis), 2, axis)
  x = np.asarray(jnp.asarray(x, dtype), np.float32)
  q, scales = quantise_blocks(jnp.asarray(x, dtype), axis, 32, jnp.float8_e4m3fn)
  want, unit = held_in_blocks(np.moveaxis(x, axis, 2), "float8_e4m3fn")
  np.testing.assert_array_equal(np.moveaxis(np.asarray(scales, np.float64), axis, 2), unit)
  got = np.moveaxis(np.asarray(q, np.float64), axis, 2) * np.repeat(unit, 32, 2)
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("shape", [(0, 32), (2, 0), (0, 0)])
def test_blocks_of_nothing(shape):
  q, scales = quantise_blocks(jnp.zeros(shape), 1, 32, jnp.float8_e5m2)
  assert (q.shape, scales.shape) == (shape, (shape[0], shape[1] // 32))
