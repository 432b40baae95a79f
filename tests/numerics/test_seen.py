"""What is kept of an array: counts by exponent, shares of formats, and a sketch that distances survive in."""

import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as of_numpy

from mpjax.formats import FORMATS

# Every figure of a report is made of these numbers; one way of counting is for accelerators alone.
from mpjax.numerics import _seen as under_test
from mpjax.numerics._seen import BINS, INTEREST, SKETCH, see

FORMS = (under_test.by_scatter, under_test.by_comparison)
SPECIAL = np.asarray([0, -0.0, 2.0**-126, -(2.0**127), np.inf, -np.inf, np.nan], np.float32)


def seen(x, **options):
  return jax.device_get(see(jnp.asarray(x), **options))


def spread(n=20000):
  """Numbers over a hundred binades."""
  rng = np.random.default_rng(0)
  return (rng.choice([-1, 1], n) * 2.0 ** rng.uniform(-60, 40, n)).astype(np.float32)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(of_numpy.arrays(np.uint32, st.just(64), elements=st.integers(0, 2**32 - 1)))
def test_any_bits_are_counted_in_their_binades(bits):
  exponents = (bits >> 23) & 0xFF
  x = np.where(exponents == 0, 0, bits.view(np.float32))  # what arithmetic makes of subnormal numbers
  for form in FORMS:
    np.testing.assert_array_equal(jax.jit(form)(exponents), np.bincount(exponents, minlength=256))
  found = seen(x)
  assert (found.nan, found.inf, found.zero) == (np.isnan(x).sum(), np.isinf(x).sum(), (x == 0).sum())
  assert found.count == x.size
  with np.errstate(all="ignore"):
    exact = np.abs(x.astype(np.float64))
    binades = np.frexp(exact)[1] - 1
  finite = np.isfinite(x) & (exact > 0)
  assert found.top == exact[np.isfinite(x)].max(initial=0)
  below, counts = found.histogram
  assert below == np.sum(finite & (binades < BINS[0]))
  assert counts[:-1] == [np.sum(finite & (binades == e)) for e in BINS[:-1]]
  assert counts[-1] == np.sum(finite & (binades >= BINS[-1]))


@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 65504.0])
def test_shares_are_those_of_rounding_every_value(scale):
  x = np.concatenate([spread(), SPECIAL])
  found = seen(x)
  for name, factor in itertools.product(INTEREST, (1.0, scale)):
    with np.errstate(all="ignore"):
      exact = x.astype(np.float64) * factor
      rounded = exact.astype(np.float32).astype(ml_dtypes.finfo(name).dtype).astype(np.float64)
    there = ~(exact == 0)
    over, gone = ~np.isfinite(rounded), there & (rounded == 0)
    small = there & ~gone & ~over & (np.abs(rounded) < FORMATS[name].smallest_normal)
    # One binade has a hundredth of the values; the edges of an overflow are inside one.
    want = pytest.approx((gone.mean(), small.mean(), over.mean()), abs=1e-3)
    assert found.shares(name, factor) == want, (name, factor)
    share = 1 - (gone | over).sum() / there.sum()
    assert found.kept(name, factor) == pytest.approx(share, abs=2e-3), (name, factor)


def test_an_overflow_is_seen_if_one_value_overflows_and_else_not():
  for name, factor in itertools.product(INTEREST, (1.0, 2.0**8, 3.0)):
    edge = np.float32(min(FORMATS[name].overflow_edge / factor, np.finfo(np.float32).max))
    for value, over in ((np.nextafter(edge, np.float32(0)), 0), (np.nextafter(edge, np.float32(np.inf)), 1)):
      if np.isfinite(value):
        found = seen(np.asarray([1e-3, value], np.float32))
        assert (found.shares(name, factor).overflow > 0) == over, (name, factor, value)


def arrays():
  rng = np.random.default_rng(2)
  sparse = np.zeros((300, 256))
  sparse[:, 5] = rng.standard_normal(300)
  yield "normal", rng.standard_normal(50000)
  yield "constant", np.ones(50000)
  yield "heavy tails", rng.standard_t(2.5, 50000)
  yield "one column", sparse
  yield "one row", sparse.T
  yield "alternating", np.resize([1.0, -1.0], 4 * SKETCH + 3)


def test_distances_and_products_survive_in_the_sketch():
  rng = np.random.default_rng(3)
  for kind, x in arrays():
    first = x.astype(np.float32)
    second = (x + 0.1 * rng.standard_normal(x.shape) * np.abs(x)).astype(np.float32)
    a, b = (seen(v).sketch.astype(np.float64) for v in (first, second))
    near = lambda got, want, size: abs(got - want) < 6 * np.sqrt(2 / SKETCH) * size
    exact = second.astype(np.float64) - first
    assert near(np.sum((b - a) ** 2), np.sum(exact**2), np.sum(exact**2)), kind
    norms = np.sum(first.astype(np.float64) ** 2), np.sum(second.astype(np.float64) ** 2)
    assert near(np.sum(a * a), norms[0], norms[0]), kind
    product = np.sum(first.astype(np.float64) * second)
    assert near(np.sum(a * b), product, np.sqrt(norms[0] * norms[1])), kind


def test_the_sketch_is_linear_and_leaves_out_what_is_not_finite():
  rng = np.random.default_rng(4)
  a, b = rng.integers(-1000, 1000, (2, 5 * SKETCH + 17)).astype(np.float32)
  sketch = lambda x: seen(x).sketch
  np.testing.assert_array_equal(sketch(a) + 3 * sketch(b), sketch(a + 3 * b))
  broken = a.copy()
  broken[::97] = np.nan
  broken[1::97] = np.inf
  np.testing.assert_array_equal(sketch(broken), sketch(np.where(np.isfinite(broken), a, 0)))


def test_steps_are_summarised_apart_without_those_that_did_not_run_and_scales_are_divided_out():
  x = spread(3 * 2 * 50).reshape(3, 2, 50)
  x[1, 1] = 0
  absent = np.asarray([0, 50, 0], np.uint32)
  both = seen(x, apart=1, scale=1000.0, absent=jnp.asarray(absent))
  for i in range(3):
    alone = seen(x[i, : 2 - absent[i] // 50] / np.float32(1000))
    one = both[(i,)]
    np.testing.assert_array_equal(one.exponents, alone.exponents)
    assert (one.zero, one.count, one.top) == (alone.zero, alone.count, alone.top)
  total = both[(0,)] + both[(2,)]
  assert (total.count, total.top) == (200, np.abs(x[[0, 2]] / np.float32(1000)).max())


def test_what_is_lost_is_weighed_by_its_size():
  for values, lost in (([1e-30, 1e-30], 1.0), ([2.0**-70, 1.0], 0.0), ([1.0, 2.0], 0.0)):
    found = seen(np.asarray(values, np.float32))
    assert found.lost_norm("float16") == pytest.approx(lost, abs=1e-6), values
