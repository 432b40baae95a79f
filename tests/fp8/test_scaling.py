"""Scales, the saturating cast, MX and NVFP4 blocks, rotations, against float64 NumPy and ml_dtypes."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from mpjax.fp8 import _blocks, _scaling  # a product shows scales and codes only together
from tests.fp8 import _blocks_by_hand as by_hand
from tests.fp8._reference import FORMATS, OPTIONS, bits, flushed, normal, relative, rounded, scale_for

# The quick code generators of XLA for CPU do not round to the fnuz formats.
pytestmark = pytest.mark.optimised

DTYPES = {name: getattr(jnp, name) for name in FORMATS}
WIDE = ("float32", "bfloat16", "float16")
BAD = (np.inf, -np.inf, np.nan)


def jitted(fun):
  run = jax.jit(fun, compiler_options=OPTIONS)
  return lambda *args: jax.tree.map(np.asarray, run(*args))


def compiled(fun):
  """A function of arrays, for every FP8 format in one program: {format: its results}, in NumPy."""
  return jitted(lambda *args: {name: fun(dtype, *args) for name, dtype in DTYPES.items()})


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


# Blocks

FP4 = "float4_e2m1fn"
LARGEST = {**{name: largest for name, (*_, largest) in FORMATS.items()}, FP4: 6.0}
FRACTION = {**{name: fraction for name, (fraction, *_) in FORMATS.items()}, FP4: 1}
MAGNITUDES = np.float32([1e-37, 1e-30, 1e-3, 1.0, 1e3, 1e30])


# Every format in one program: {format: (codes, scales)}.
quantise_mx = jitted(lambda x: {name: _blocks.quantise_mx(x, getattr(jnp, name)) for name in LARGEST})
nearest, squares, at_random = (
  jitted(lambda x, options=options: _blocks.quantise_nvfp4(x, **options))
  for options in ({}, {"squares": True}, {"stochastic": True})
)


def assert_same(got, want):
  for ours, theirs in zip(got, want, strict=True):
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(bits(ours), bits(theirs))


# MX


def test_mx_has_the_codes_and_scales_by_hand():
  for magnitude, dtype in itertools.product(MAGNITUDES, WIDE):
    if dtype == "float16" and not 1e-4 < magnitude < 10:
      continue
    x = flushed(spread(2, 3, 128, low=-6, high=2) * magnitude).astype(getattr(ml_dtypes, dtype, dtype))
    x[0, 0, 32:64] = 0
    for name, got in quantise_mx(x).items():
      assert_same(got, by_hand.mx(x, getattr(ml_dtypes, name)))
  x = np.full((5, 32), 1e-3, np.float32)
  x[:, 7] = [448, np.nextafter(np.float32(448), np.float32(449)), -896, 57344, 6]
  for name, got in quantise_mx(x).items():  # a largest number times a power of two keeps its scale
    assert_same(got, by_hand.mx(x, getattr(ml_dtypes, name)))
  for shape in [(0, 32), (2, 0), (0, 0)]:
    q, scales = jax.eval_shape(lambda x: _blocks.quantise_mx(x, jnp.float8_e5m2), jnp.zeros(shape))
    assert (q.shape, scales.shape) == (shape, (shape[0], shape[1] // 32))


def test_no_mx_block_saturates_anywhere_in_the_range():
  magnitudes = np.float32([2.0**-149, 2.0**-130, 2.0**-126, 2.0**-118, 1e-30, 1.0, 1e30, 3.4028235e38])
  x = np.zeros((32, 32), np.float32)
  x[:, 3] = np.outer(magnitudes, np.float32([1, -1, 0.75, 0.5])).ravel()
  for name, (q, scales) in quantise_mx(x).items():
    q, scales = wide(q), wide(scales)
    assert np.isfinite(q).all()
    assert (scales >= 2.0**-126).all()
    assert (scales <= 2.0**127).all()
    assert (np.frexp(scales)[0] == 0.5).all()
    bound = 2.0 ** -(FRACTION[name] + 1) * np.abs(x[:, 3]) + 2.0**-126
    assert (np.abs(q[:, 3] * scales[:, 0] - x[:, 3]) <= bound).all(), name


def test_a_block_that_is_not_finite_is_nan_and_leaves_the_others_alone():
  x = spread(2, 64, low=-2, high=2)
  keep = np.ones((2, 64), bool)
  keep[0, 32:] = False
  clean = quantise_mx(x)
  for bad in BAD:
    x[0, 40] = bad
    for name, (q, scales) in quantise_mx(x).items():
      want_q, want_scales = clean[name]
      np.testing.assert_array_equal(np.isnan(wide(scales)), ~keep[:, ::32])
      np.testing.assert_array_equal(bits(q)[keep], bits(want_q)[keep])
      np.testing.assert_array_equal(bits(scales)[keep[:, ::32]], bits(want_scales)[keep[:, ::32]])
    _, scales, tensor = nearest(x)
    np.testing.assert_array_equal(np.isnan(wide(scales)), [[False, False, True, False], [False] * 4])
    assert tensor == 1


# NVFP4


@pytest.mark.parametrize("in_squares", [False, True], ids=["rows", "squares"])
def test_nvfp4_has_the_codes_and_scales_by_hand(in_squares):
  for magnitude in MAGNITUDES:
    x = flushed(spread(3, 32, 64, low=-4, high=2) * magnitude)
    x[0, 0, 16:48] = 0
    x[1, :16, :16] = 0
    got = (squares if in_squares else nearest)(x)
    assert_same(got, by_hand.nvfp4(x, in_squares))
    assert (wide(got[1]) > 0).all()
    assert wide(got[1]).max() <= 448
  assert nearest(np.zeros((16, 32), np.float32))[2] == 1


def test_stochastic_rounding_is_right_on_average_and_otherwise_to_a_neighbour():
  numbers = np.sort(np.r_[np.linspace(-6, 6, 33), 0.01, -0.01, 5.99, 1.999])
  x = np.zeros((len(numbers), 4096, 16), np.float32)
  x[..., 0] = 6  # so that what is rounded is x itself
  x[..., 1:] = numbers[:, None, None]
  q, scales, tensor = at_random(x)
  assert (wide(scales) == float(tensor)).all()
  y = wide(q)[..., 1:].reshape(len(numbers), -1)
  grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  grid = np.r_[-grid[:0:-1], grid]
  below = grid[np.searchsorted(grid, numbers, "right") - 1]
  above = grid[np.searchsorted(grid, numbers, "left")]
  for number, low, high, found in zip(numbers, below, above, y, strict=True):
    assert set(np.unique(found)) == {low, high}
    error = np.sqrt((number - low) * (high - number) / found.size)
    assert abs(found.mean() - number) <= 4 * error, number
  # Neighbours in a row, in a column and in depth are rounded independently of each other.
  x[..., 1:] = 1.25
  middle = wide(at_random(x)[0])[..., 1:] - 1.25
  for axis in range(3):
    a, b = (np.take(middle, range(i, middle.shape[axis] - 1 + i), axis) for i in (0, 1))
    assert abs((a * b).mean() / 0.0625) < 4 / np.sqrt(a.size), axis


def test_the_largest_of_a_block_is_right_on_average_whatever_its_scale_is_rounded_to():
  x = normal(1 << 14, 16)
  q, scales, tensor = at_random(x)
  back = wide(q) * wide(scales) / float(tensor)
  np.testing.assert_allclose((back * x).sum() / (x * x).sum(), 1, atol=1e-3)


def test_random_bits_are_those_of_value_and_position():
  x = normal(32, 64)
  first, again = at_random(x), at_random(x)
  assert_same(first, again)
  assert (wide(at_random(x[:, ::-1])[0])[:, ::-1] != wide(first[0])).any()
  uniform = np.asarray(_blocks.uniform_of(jnp.asarray(normal(256, 64, 16))))
  assert uniform.min() >= 0
  assert uniform.max() < 1
  counts = np.histogram(uniform, 64, (0, 1))[0]
  assert ((counts - uniform.size / 64) ** 2 / (uniform.size / 64)).sum() < 120  # chi-squared, 63 degrees


def test_a_rotation_is_a_hadamard_matrix_that_leaves_products_as_they_are():
  x, y = normal(24, 64, scale=1e3), normal(40, 64, seed=1)
  turned, other = (np.asarray(_blocks.rotate(a)) for a in (x, y))
  by_blocks = lambda a: (a.reshape(-1, 16).astype(np.float64) @ by_hand.ROTATION).reshape(a.shape)
  for got, a in ((turned, x), (other, y)):
    np.testing.assert_allclose(got, by_blocks(a), rtol=0, atol=1e-6 * np.abs(a).max())
  np.testing.assert_allclose(by_hand.ROTATION @ by_hand.ROTATION.T, np.eye(16), atol=1e-15)
  assert relative(turned @ other.T, x.astype(np.float64) @ y.T) < 1e-6
  outlier = np.zeros((1, 16), np.float32)
  outlier[0, 5] = 1
  np.testing.assert_array_equal(np.abs(_blocks.rotate(outlier)), np.full((1, 16), 0.25))
