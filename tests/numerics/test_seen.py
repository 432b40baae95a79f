"""What is kept of an array: counts by exponent, and shares of formats at their edges."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.formats import FORMATS

# Every figure of a report is made of these numbers; one way of counting is for accelerators alone.
from mpjax.numerics import _seen as under_test
from mpjax.numerics._seen import BINS, INTEREST, see

FORMS = (under_test.by_scatter, under_test.by_comparison)


def seen(x, **options):
  return jax.device_get(see(jnp.asarray(x), **options))


def test_any_bits_are_counted_in_their_binades():
  special = np.uint32([0, 1, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 0x800000])
  bits = np.concatenate([special, np.random.default_rng(0).integers(0, 2**32, 4096, np.uint32)])
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


def test_an_overflow_is_seen_if_one_value_overflows_and_else_not():
  for name, factor in itertools.product(INTEREST, (1.0, 2.0**8, 3.0)):
    edge = np.float32(min(FORMATS[name].overflow_edge / factor, np.finfo(np.float32).max))
    for value, over in ((np.nextafter(edge, np.float32(0)), 0), (np.nextafter(edge, np.float32(np.inf)), 1)):
      if np.isfinite(value):
        found = seen(np.asarray([1e-3, value], np.float32))
        assert (found.shares(name, factor).overflow > 0) == over, (name, factor, value)


def test_what_is_lost_is_weighed_by_its_size():
  for values, lost in (([1e-30, 1e-30], 1.0), ([2.0**-70, 1.0], 0.0), ([1.0, 2.0], 0.0)):
    found = seen(np.asarray(values, np.float32))
    assert found.lost_norm("float16") == pytest.approx(lost, abs=1e-6), values
