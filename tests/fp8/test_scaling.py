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
