"""Amax, scales and the saturating cast against float64 NumPy."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.fp8 import _scaling  # a product shows its scales and casts only together
from tests.fp8._reference import FORMATS, OPTIONS, bits, flushed, rounded, scale_for

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

DTYPES = {name: getattr(jnp, name) for name in FORMATS}
WIDE = ("float32", "bfloat16", "float16")
RNG = np.random.default_rng(5)
BAD = (np.inf, -np.inf, np.nan)


def compiled(fun):
  """A function of arrays, for every FP8 format in one program: {format: its results}, in NumPy."""
  run = jax.jit(
    lambda *args: {name: fun(dtype, *args) for name, dtype in DTYPES.items()}, compiler_options=OPTIONS
  )
  return lambda *args: jax.tree.map(np.asarray, run(*args))


quantise = compiled(lambda dtype, x, scale: _scaling.quantise(x, scale, dtype))


def wide(x):
  return np.asarray(x, np.float64)


def spread(*shape, low=-30, high=30, seed=0):
  """Normal numbers of many magnitudes, zeros among them."""
  rng = np.random.default_rng(seed)
  x = rng.normal(size=shape) * 10.0 ** rng.uniform(low, high, size=shape) * (rng.uniform(size=shape) > 0.05)
  return flushed(x.astype(np.float32))


def test_the_reference_rounds_as_ml_dtypes_does():
  for name, (_, _, largest) in FORMATS.items():
    x = np.concatenate([spread(4096, low=-9, high=6), np.float32(largest * np.array([1, -1]))])
    want = np.clip(x, -largest, largest).astype(getattr(ml_dtypes, name)).astype(np.float64)
    np.testing.assert_array_equal(rounded(x, name), want)
    assert float(jnp.finfo(DTYPES[name]).max) == largest


# amax


def test_amax_is_the_largest_magnitude_in_float32():
  arrays = [
    (RNG.normal(size=shape) * 8).astype(getattr(ml_dtypes, dtype, dtype))
    for dtype in (*WIDE, *FORMATS)
    for shape in [(), (7,), (3, 0), (2, 3, 4)]
  ]
  amaxes = jax.jit(lambda xs: list(map(_scaling.amax_of, xs)))(arrays)
  for x, got in zip(arrays, amaxes, strict=True):
    assert (got.dtype, got.shape) == (np.float32, ())
    assert float(got) == np.max(np.abs(wide(x)), initial=0), (x.dtype, x.shape)
  x = RNG.normal(size=(2, 3, 5)).astype(np.float32)
  by_one, by_two = jax.jit(lambda x: (_scaling.amax_of(x, 1), _scaling.amax_of(x, 2)))(x)
  np.testing.assert_array_equal(by_one, np.abs(x).max((1, 2)))
  np.testing.assert_array_equal(by_two, np.abs(x).max(2))


def test_amax_tells_of_what_is_not_finite():
  amaxes = jax.jit(lambda x: [_scaling.amax_of(x.astype(dtype)) for dtype in WIDE])
  for bad in BAD:
    x = np.zeros(300, np.float32)
    x[123] = bad
    assert not np.isfinite(amaxes(x)).any()


# scales

KINDS = list(itertools.product((0, 1, 7), (False, True)))  # margin, powers of two
scales = compiled(lambda dtype, amax: [_scaling.scale_of(amax, dtype, *kind) for kind in KINDS])


def test_a_scale_brings_amax_to_the_largest_number_less_the_margin():
  amax = np.concatenate([10.0 ** np.arange(-30, 31), [1, 2, 448, 57344, 240, 3.4e38, 2.0**-126]]).astype(
    np.float32
  )
  rows = (
    (name, *kind, scale)
    for name, found in scales(amax).items()
    for kind, scale in zip(KINDS, found, strict=True)
  )
  for *row, scale in rows:
    name, margin, pow2 = row
    assert scale.dtype == np.float32
    want = [scale_for(np.array([a]), name, margin, pow2) for a in amax]
    np.testing.assert_allclose(scale, want, rtol=2.0**-23, err_msg=str(row))
    largest = FORMATS[name][2] * 2.0**-margin
    top = amax.astype(np.float64) * scale
    free = (scale > 2.0**-126) & (scale < 2.0**126)
    assert (top <= largest * (1 + 2.0**-22))[free].all(), row
    assert (top <= FORMATS[name][2]).all() or margin == 0, row
    assert (top[free] > largest * (0.5 if pow2 else 1 - 2.0**-22)).all(), row
    assert not pow2 or (np.frexp(scale)[0] == 0.5).all(), row


def test_an_amax_that_says_nothing_gives_one():
  found = scales(np.array([[0.0, -0.0], [np.inf, np.nan]], np.float32))
  for scale in jax.tree.leaves(found):
    np.testing.assert_array_equal(scale, np.ones((2, 2)))


def test_a_scale_and_its_reciprocal_are_normal_numbers():
  amax = np.float32(
    [2.0**-149, 2.0**-140, 2.0**-127, 2.0**-126, 1e-37, 3e38, float(np.finfo(np.float32).max)]
  )

  def run(dtype, amax):
    every = [_scaling.scale_of(amax, dtype, margin, pow2) for margin in (0, 30) for pow2 in (False, True)]
    return [(scale, 1 / scale, _scaling.quantise(amax, scale, dtype)) for scale in every]

  for scale, reciprocal, q in itertools.chain(*compiled(run)(amax).values()):
    for number in (scale, reciprocal):
      assert (number >= 2.0**-126).all()
      assert (number <= 2.0**126).all()
    assert np.isfinite(wide(q)).all()


# the cast


def test_every_bfloat16_and_its_neighbours_round_as_by_hand():
  high = np.arange(2**16, dtype=np.uint32) << 16
  x = np.concatenate([high, high + 1, high + 0x8000, high + 0x7FFF, high + 0x8001, high + 0xFFFF])
  x = x.astype(np.uint32).view(np.float32)
  x = flushed(x[np.isfinite(x)])
  for name, got in quantise(x, np.float32(1)).items():
    assert got.dtype == DTYPES[name]
    np.testing.assert_array_equal(wide(got), rounded(x, name))
    eager = _scaling.quantise(x[::97], jnp.float32(1), DTYPES[name])
    np.testing.assert_array_equal(bits(eager), bits(got[::97]))


def test_a_scaled_cast_is_that_of_the_product():
  x = spread(4096, low=-37, high=37)
  for scale in np.float32([2.0**-126, 1e-20, 0.3, 1.0, 448.0, 1e20, 2.0**126]):
    with np.errstate(over="ignore"):
      scaled = x * scale  # beyond float32 it is not finite, as what is not finite itself
    for name, got in quantise(x, scale).items():
      np.testing.assert_array_equal(wide(got), rounded(scaled, name), err_msg=f"{name} {scale}")
  x, scale = spread(3, 2, 40, low=-3, high=3), np.float32([[1, 2], [0.3, 5], [1e3, 1e-3]])
  for name, got in quantise(x, scale).items():  # a scale for each leading index
    np.testing.assert_array_equal(wide(got), rounded(x * scale[:, :, None], name))


def test_overflow_saturates_and_what_is_not_finite_becomes_nan():
  x = np.array([6e4, -6e4, *BAD, 0.0, -0.0], np.float32)
  for dtype, scale in itertools.product(WIDE, np.float32([1, 1e30])):
    for name, q in quantise(x.astype(getattr(ml_dtypes, dtype, dtype)), scale).items():
      largest = FORMATS[name][2]
      np.testing.assert_array_equal(wide(q), [largest, -largest, np.nan, np.nan, np.nan, 0, 0])
  # No largest number saturates, and a tiny negative one is zero, not the NaN of the fnuz formats.
  for name, q in quantise(np.float32([-1e-30, -1e-7, -0.0, -(2.0**-126), 240, -240]), np.float32(1)).items():
    np.testing.assert_array_equal(wide(q)[:4], np.zeros(4))
    np.testing.assert_array_equal(wide(q)[4:], rounded(np.array([240, -240]), name))


def test_nothing_saturates_with_the_scale_of_its_own_amax():
  def run(dtype, x):
    scale = _scaling.scale_of(_scaling.amax_of(x), dtype)
    return _scaling.quantise(x, scale, dtype), scale

  run = compiled(run)
  for magnitude in (1e-37, 1e-30, 1e-3, 1.0, 1e30, 3e38):
    x = flushed((RNG.uniform(-1, 1, size=500) * magnitude).astype(np.float32))
    for name, (q, scale) in run(x).items():
      fraction, smallest, _ = FORMATS[name]
      back = wide(q) / float(scale)
      bound = np.maximum(2.0 ** -(fraction + 1) * np.abs(x), 2.0 ** (smallest - fraction - 1) / float(scale))
      assert (np.abs(back - x) <= bound + 2.0**-22 * np.abs(x)).all(), (name, magnitude)
