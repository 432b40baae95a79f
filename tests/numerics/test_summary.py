"""What is kept of an array: counts that are exact at every edge, and a sketch that distances survive in."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as of_numpy

from mpjax.formats import FORMATS

# Every figure of a report is made of these numbers, whose edges it does not show; one way of counting is for
# accelerators alone.
from mpjax.numerics import _summary as under_test
from mpjax.numerics._summary import SKETCH, Summary, look
from mpjax.numerics._tensors import BINS, INTEREST, Magnitudes, full_summary

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMS = {"on a CPU": under_test._counts_by_scatter, "elsewhere": under_test._counts_by_comparison}
# Every binade from the smallest subnormal number to the last, neighbours of the formats' edges, and no number.
SPECIAL = np.asarray(
  [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF),
    *(0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x7FFFFFFF),
  ],
  np.uint32,
)


def edge_patterns(scales=(1.0, 2.0**16)):
  """Bits of the float32 numbers at and beside every edge of the formats of interest."""
  edges = [
    edge / scale
    for name, scale in itertools.product(INTEREST, scales)
    for edge in (FORMATS[name].underflow_edge, FORMATS[name].normal_edge, FORMATS[name].overflow_edge)
  ]
  fitting = [edge for edge in edges if edge < float(np.finfo(np.float32).max)]
  bits = np.asarray([*fitting, *(2.0**e for e in BINS)], np.float32).view(np.uint32)
  return np.unique(np.concatenate([bits - 1, bits, bits + 1]))


PATTERNS = np.concatenate([SPECIAL, edge_patterns(), edge_patterns() | 0x80000000])


def wide(x):
  """Magnitudes as float64, which holds all of them; NaN as they are."""
  with np.errstate(invalid="ignore"):  # of signalling NaN
    return np.abs(np.asarray(x).astype(np.float32).astype(np.float64))


def at_least(magnitudes, x):
  """How many magnitudes of `x` are at least so large, NaN with them."""
  values = wide(x)
  return [int(np.sum(~(values < m))) for m in magnitudes]


@functools.partial(jax.jit, static_argnums=0)
def counted(edges, *arrays):
  """For each array what each way of counting gives."""
  return [[form(edges, x) for form in FORMS.values()] for x in arrays]


def kept(summary, x):
  return np.asarray(summary(jnp.asarray(x)))


def test_counts_are_exact_at_every_edge():
  magnitudes = [2.0**e for e in range(-149, 128)]
  magnitudes += [float(m) for m in PATTERNS.view(np.float32) if 0 < m < np.inf]
  with np.errstate(over="ignore", invalid="ignore"):
    arrays = [PATTERNS.view(np.float32).astype(dtype) for dtype in DTYPES.values()]
  above_one = np.nextafter(np.float32(1), np.float32(2))
  summary = Summary.of([*magnitudes, 1 + 2.0**-30])  # between two float32 numbers: it is rounded up
  assert int(above_one.view(np.uint32)) in summary.edges
  bits = np.asarray(magnitudes, np.float32).view(np.uint32).tolist()
  for dtype, x, results in zip(DTYPES, arrays, counted(summary.edges, *arrays), strict=True):
    for form, counts in zip(FORMS, results, strict=True):
      got = dict(zip(summary.edges, counts.tolist(), strict=True))
      assert [got[b] for b in bits] == at_least(magnitudes, x), (dtype, form)
      assert got[int(above_one.view(np.uint32))] == np.sum(~(wide(x) < above_one)), (dtype, form)
    values = np.asarray(x).astype(np.float32)
    magnitudes_of = Magnitudes.of(summary, kept(summary, x))
    assert (magnitudes_of.nan, magnitudes_of.inf) == (np.isnan(values).sum(), np.isinf(values).sum())
    zeros = np.sum(values.view(np.uint32) << 1 == 0)
    assert (magnitudes_of.zero, magnitudes_of.count) == (zeros, x.size)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(of_numpy.arrays(np.uint32, st.just(64), elements=st.integers(0, 2**32 - 1)))
def test_any_bits_are_counted_in_their_binades(bits):
  summary, x = full_summary(2.0**16), bits.view(np.float32)
  [both] = counted(summary.edges, x)
  edges = np.asarray(summary.edges, np.uint64)
  for counts in both:
    np.testing.assert_array_equal(counts, ((bits & 0x7FFFFFFF)[:, None] >= edges).sum(0))
  below, counts = Magnitudes.of(summary, np.concatenate([both[0], [x.size]])).histogram
  with np.errstate(all="ignore"):
    exponents = np.frexp(wide(x))[1] - 1
  finite = np.isfinite(x) & (bits << 1 != 0)
  assert below == np.sum(finite & (exponents < BINS[0]))
  assert counts[:-1] == [np.sum(finite & (exponents == e)) for e in BINS[:-1]]
  assert counts[-1] == np.sum(finite & (exponents >= BINS[-1]))


def test_long_arrays_are_looked_at_in_blocks(monkeypatch):
  summary = Summary.of([2.0**-10, 1.0], sketch=True)
  shapes = [(65,), (7, 30), (5, 100)]
  rng = np.random.default_rng(0)
  arrays = [rng.integers(-9, 9, shape).astype(np.float32) for shape in shapes]
  look_at_all = lambda arrays: [type(summary)._of.__wrapped__(summary, x) for x in arrays]
  whole = jax.jit(look_at_all)(arrays)
  monkeypatch.setattr(under_test, "_BLOCK", 64)
  blocks = jax.jit(lambda arrays: look_at_all(arrays))(arrays)
  places = len(summary.edges) + 2  # counts, size and sum; the sketch adds up otherwise
  for shape, one, other in zip(shapes, whole, blocks, strict=True):
    np.testing.assert_array_equal(one[:places], other[:places], err_msg=str(shape))
    assert one[places - 2] == math.prod(shape)


@pytest.mark.parametrize("scale", [2.0**16, 1000.0, 65504.0])
def test_shares_are_those_of_rounding_every_value(scale):
  rng = np.random.default_rng(0)
  x = (rng.choice([-1, 1], 20000) * 2.0 ** rng.uniform(-60, 40, 20000)).astype(np.float32)
  if np.log2(scale).is_integer():
    # Numbers at the edges themselves: elsewhere their product with the scale is between two float32 numbers.
    x = np.concatenate([x, PATTERNS.view(np.float32), edge_patterns((scale,)).view(np.float32)])
  summary = full_summary(scale)
  magnitudes = Magnitudes.of(summary, kept(summary, x))
  for name, factor in itertools.product(INTEREST, (1.0, scale)):
    with np.errstate(all="ignore"):
      exact = x.astype(np.float64) * factor
      rounded = exact.astype(np.float32).astype(ml_dtypes.finfo(name).dtype).astype(np.float64)
    there = ~(exact == 0)
    over, gone = ~np.isfinite(rounded), there & (rounded == 0)
    small = there & ~gone & ~over & (np.abs(rounded) < FORMATS[name].smallest_normal)
    key = (name, factor)
    assert magnitudes.shares(name, factor) == (gone.mean(), small.mean(), over.mean()), key
    share = 1 - (gone | over).sum() / there.sum()
    assert magnitudes.kept(name, factor) == pytest.approx(share, abs=1e-12), key


@pytest.mark.parametrize("size", [1, 7, SKETCH - 1, SKETCH, 5000])
def test_the_sketch_of_a_short_array_keeps_every_value_and_the_sum_is_of_the_finite_ones(size):
  x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
  summary = Summary.of([1.0], sketch=True)
  place = len(summary.edges) + 1
  if size <= SKETCH:
    np.testing.assert_array_equal(np.abs(kept(summary, x)[-SKETCH:]), np.pad(np.abs(x), (0, SKETCH - size)))
  assert kept(summary, x)[place] == pytest.approx(x.sum(dtype=np.float64), abs=1e-3)
  x[0] = np.inf
  assert kept(summary, x)[place] == pytest.approx(x[1:].sum(dtype=np.float64), abs=1e-3)
  assert kept(summary, x).shape == (summary.size,)


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
  summary = Summary.of([], SKETCH)
  for kind, x in arrays():
    first = x.astype(np.float32)
    second = (x + 0.1 * rng.standard_normal(x.shape) * np.abs(x)).astype(np.float32)
    a, b = (kept(summary, v).astype(np.float64)[-SKETCH:] for v in (first, second))
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
  sketch = lambda x: kept(Summary.of([1.0], SKETCH), x)[-SKETCH:]
  np.testing.assert_array_equal(sketch(a) + 3 * sketch(b), sketch(a + 3 * b))
  broken = a.copy()
  broken[::97] = np.nan
  broken[1::97] = np.inf
  np.testing.assert_array_equal(sketch(broken), sketch(np.where(np.isfinite(broken), a, 0)))


@pytest.mark.parametrize("summary", [Summary.of([], sketch=True), full_summary(2.0**16)])
@pytest.mark.parametrize("size", [SKETCH, 5 * SKETCH + 17])
def test_finite_values_may_be_taken_to_be_finite_and_others_show_in_the_sum(summary, size):
  x = np.random.default_rng(6).standard_normal(size).astype(np.float32)
  x[::5] = 0
  quick = dataclasses.replace(summary, finite=True)
  np.testing.assert_array_equal(kept(quick, x), kept(summary, x))
  for broken in (np.nan, np.inf, -np.inf):
    x[7] = broken
    assert not np.isfinite(kept(quick, x)[len(summary.edges) + 1])


LOOK = Summary.of([0.5, 1.0, 2.0])
X = np.asarray([0.25, -0.5, 1.0, -1.5, 2.0, 1e30], np.float32)


def looked_at(probe):
  """Functions of `X` in which `look` sees `X` in each way of running it, and how often."""
  at = lambda x: look(x, probe, LOOK, 1.0)
  looped = lambda x: jax.lax.scan(lambda c, _: (at(c), None), x, None, length=3)[0]
  return {
    "plain": (at, 1),
    "jit": (jax.jit(at), 1),
    "scan": (looped, 3),
    "remat": (jax.checkpoint(at), 1),
    "remat of a scan": (jax.checkpoint(looped), 3),
    "cond": (lambda x: jax.lax.cond(x[0] < 1, at, jnp.negative, x), 1),
    "cond not taken": (lambda x: jax.lax.cond(x[0] > 1, at, lambda x: x, x), 0),
    "twice": (lambda x: at(at(x)), 2),
  }


def test_looking_leaves_the_value_and_its_gradient_alone_and_counts_both():
  def of(kind):
    f = lambda x, probe: jnp.sum(looked_at(probe)[kind][0](x) * 3)
    return jax.value_and_grad(f, (0, 1))

  times = {kind: often for kind, (_, often) in looked_at(None).items()}
  run = jax.jit(lambda x, probe: {kind: of(kind)(x, probe) for kind in times})
  smallest = float(np.asarray([1], np.uint32).view(np.float32)[0])
  summed = lambda x: [*at_least([smallest, 0.5, 1.0, 2.0, np.inf], x), 0, len(x)]
  for kind, (value, (grad, seen)) in run(X, np.zeros((2, LOOK.size), np.float32)).items():
    assert value == pytest.approx(np.sum(X * 3), rel=1e-6), kind
    np.testing.assert_array_equal(grad, np.full(6, 3, np.float32), err_msg=kind)
    want = times[kind] * np.asarray([summed(X), summed(np.full(6, 3.0))])
    np.testing.assert_array_equal(seen, want, err_msg=kind)


def test_the_cotangent_is_seen_without_the_scale_and_passed_on_with_it():
  ct = np.asarray([2.0**-20, 1.0, np.inf, 1000.0], np.float16)
  summary = Summary.of([2.0**-30, 1.0], 8)

  @jax.jit
  def pull(x, ct):
    return jax.vjp(lambda x, probe: look(x, probe, summary, 1000.0), x, jnp.zeros((2, summary.size)))[1](ct)

  passed, seen = pull(np.ones(4, np.float16), ct)
  assert passed.dtype == np.float16
  np.testing.assert_array_equal(passed, ct)
  np.testing.assert_array_equal(seen[1], kept(summary, ct.astype(np.float32) / np.float32(1000)))
  assert Magnitudes.of(summary, seen[1]).inf == 1


def test_what_is_lost_is_weighed_by_its_size():
  summary = full_summary(1.0)
  for values, lost in (([1e-30, 1e-30], 1.0), ([2.0**-70, 1.0], 0.0), ([1.0, 2.0], 0.0)):
    magnitudes = Magnitudes.of(summary, kept(summary, np.asarray(values, np.float32)))
    assert magnitudes.lost_norm("float16") == pytest.approx(lost, abs=1e-6), values
