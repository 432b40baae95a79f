"""What is kept of an array: counts that are exact at every edge, and a sketch that distances survive in."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from mpjax.formats import FORMATS
from mpjax.numerics import _summary as under_test
from mpjax.numerics._summary import SKETCH, Summary, look
from mpjax.numerics._tensors import BINS, INTEREST, Magnitudes, full_summary

DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32}
FORMS = {
  "as lowered": under_test._counts,
  "scatter": under_test._counts_by_scatter,
  "comparison": under_test._counts_by_comparison,
}
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


def reference(magnitudes, x):
  """How many magnitudes of `x` are at least so large, NaN with them."""
  values = wide(x)
  return [int(np.sum(~(values < m))) for m in magnitudes]


def counted(summary, x, form="as lowered"):
  return np.asarray(jax.jit(FORMS[form], static_argnums=0)(summary.edges, jnp.asarray(x).reshape(-1)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_counts_are_exact_at_every_edge(dtype, form):
  magnitudes = [2.0**e for e in range(-149, 128)]
  magnitudes += [float(m) for m in PATTERNS.view(np.float32) if 0 < m < np.inf]
  with np.errstate(over="ignore", invalid="ignore"):
    x = PATTERNS.view(np.float32).astype(DTYPES[dtype])
  summary = Summary.of(magnitudes)
  got = dict(zip(summary.edges, counted(summary, x, form).tolist(), strict=True))
  bits = np.asarray(magnitudes, np.float32).view(np.uint32).tolist()
  assert [got[b] for b in bits] == reference(magnitudes, x)
  values = np.asarray(x).astype(np.float32)
  magnitudes = Magnitudes.of(summary, np.asarray(summary(jnp.asarray(x))))
  assert (magnitudes.nan, magnitudes.inf) == (np.isnan(values).sum(), np.isinf(values).sum())
  assert (magnitudes.zero, magnitudes.count) == (np.sum(values.view(np.uint32) << 1 == 0), x.size)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(of_numpy.arrays(np.uint32, st.just(64), elements=st.integers(0, 2**32 - 1)))
def test_any_bits_are_counted_in_their_binades(bits):
  summary = full_summary(2.0**16)
  x = bits.view(np.float32)
  both = [counted(summary, x, form) for form in FORMS]
  assert all(np.array_equal(both[0], other) for other in both[1:])
  edges = np.asarray(summary.edges, np.uint64)
  np.testing.assert_array_equal(both[0], ((bits & 0x7FFFFFFF)[:, None] >= edges).sum(0))
  kept = np.concatenate([both[0], [x.size]])
  below, counts = Magnitudes.of(summary, kept).histogram
  with np.errstate(all="ignore"):
    exponents = np.frexp(wide(x))[1] - 1
  finite = np.isfinite(x) & (bits << 1 != 0)
  assert below == np.sum(finite & (exponents < BINS[0]))
  assert counts[:-1] == [np.sum(finite & (exponents == e)) for e in BINS[:-1]]
  assert counts[-1] == np.sum(finite & (exponents >= BINS[-1]))


def test_an_edge_between_two_float32_numbers_is_rounded_up():
  above_one = np.nextafter(np.float32(1), np.float32(2))
  summary = Summary.of([1 + 2.0**-30])
  got = dict(zip(summary.edges, counted(summary, np.asarray([1, above_one], np.float32)), strict=True))
  assert got[int(above_one.view(np.uint32))] == 1
  assert int(np.float32(1).view(np.uint32)) not in got


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 200, 640])
def test_long_arrays_are_counted_in_blocks(size, monkeypatch):
  summary = full_summary(1.0)
  x = np.random.default_rng(size).integers(0, 2**32, size, dtype=np.uint32).view(np.float32)
  whole = under_test._counts_by_comparison(summary.edges, jnp.asarray(x))
  monkeypatch.setattr(under_test, "_BLOCK", 64)
  np.testing.assert_array_equal(under_test._counts_by_scatter(summary.edges, jnp.asarray(x)), whole)


SCALES = (1.0, 2.0**16, 2.0**24, 1000.0, 65504.0)


@pytest.mark.parametrize("name", INTEREST)
@pytest.mark.parametrize("scale", SCALES)
def test_shares_are_those_of_rounding_every_value(name, scale):
  rng = np.random.default_rng(0)
  x = (rng.choice([-1, 1], 20000) * 2.0 ** rng.uniform(-60, 40, 20000)).astype(np.float32)
  if np.log2(scale).is_integer():
    # Numbers at the edges themselves: elsewhere their product with the scale is between two float32 numbers.
    x = np.concatenate([x, PATTERNS.view(np.float32), edge_patterns((scale,)).view(np.float32)])
  summary = full_summary(scale)
  magnitudes = Magnitudes.of(summary, np.asarray(jax.jit(summary)(x)))
  for factor in {1.0, scale}:
    with np.errstate(all="ignore"):
      exact = x.astype(np.float64) * factor
      rounded = exact.astype(np.float32).astype(ml_dtypes.finfo(name).dtype).astype(np.float64)
    there = ~(exact == 0)
    over, gone = ~np.isfinite(rounded), there & (rounded == 0)
    small = there & ~gone & ~over & (np.abs(rounded) < FORMATS[name].smallest_normal)
    assert magnitudes.shares(name, factor) == (gone.mean(), small.mean(), over.mean())
    assert magnitudes.kept(name, factor) == pytest.approx(1 - (gone | over).sum() / there.sum(), abs=1e-12)


@pytest.mark.parametrize("size", [1, 7, SKETCH - 1, SKETCH])
def test_the_sketch_of_a_short_array_keeps_every_value(size):
  x = np.random.default_rng(1).standard_normal(size).astype(np.float32)
  sketch = np.asarray(Summary.of([], SKETCH)(jnp.asarray(x)))[-SKETCH:]
  np.testing.assert_array_equal(np.abs(sketch), np.pad(np.abs(x), (0, SKETCH - size)))


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


@pytest.mark.parametrize(("kind", "x"), [*arrays()])
def test_distances_and_products_survive_in_the_sketch(kind, x):
  rng = np.random.default_rng(3)
  first = x.astype(np.float32)
  second = (x + 0.1 * rng.standard_normal(x.shape) * np.abs(x)).astype(np.float32)
  summary = Summary.of([], SKETCH)
  a, b = (np.asarray(summary(jnp.asarray(v)), np.float64)[-SKETCH:] for v in (first, second))
  near = lambda got, want, size: abs(got - want) < 6 * np.sqrt(2 / SKETCH) * size
  exact = second.astype(np.float64) - first
  assert near(np.sum((b - a) ** 2), np.sum(exact**2), np.sum(exact**2))
  norms = np.sum(first.astype(np.float64) ** 2), np.sum(second.astype(np.float64) ** 2)
  assert near(np.sum(a * a), norms[0], norms[0])
  assert near(np.sum(a * b), np.sum(first.astype(np.float64) * second), np.sqrt(norms[0] * norms[1]))


def test_the_sketch_is_linear_and_leaves_out_what_is_not_finite():
  rng = np.random.default_rng(4)
  a, b = rng.integers(-1000, 1000, (2, 5 * SKETCH + 17)).astype(np.float32)
  summary = Summary.of([1.0], SKETCH)
  sketch = lambda x: np.asarray(summary(jnp.asarray(x)))[-SKETCH:]
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
  np.testing.assert_array_equal(quick(jnp.asarray(x)), summary(jnp.asarray(x)))
  for broken in (np.nan, np.inf, -np.inf):
    x[7] = broken
    assert not np.isfinite(quick(jnp.asarray(x))[len(summary.edges) + 1])


@pytest.mark.parametrize("sketch", [0, SKETCH])
def test_size_is_the_length_of_what_is_kept(sketch):
  summary = Summary.of([1.0, 2.0], sketch)
  kept = jax.jit(summary)(jnp.ones((3, 4), jnp.bfloat16))
  assert kept.shape == (summary.size,)
  assert kept.dtype == jnp.float32


LOOK = Summary.of([0.5, 1.0, 2.0])
X = np.asarray([0.25, -0.5, 1.0, -1.5, 2.0, 1e30], np.float32)


def through(kind, probe):
  """A function of `X` in which `look` sees `X` in each way of running it, and how often."""
  at = lambda x: look(x, probe, LOOK, 1.0)

  def looped(x):
    return jax.lax.scan(lambda c, _: (at(c), None), x, None, length=3)[0]

  return {
    "plain": (at, 1),
    "jit": (jax.jit(at), 1),
    "scan": (looped, 3),
    "remat": (jax.checkpoint(at), 1),
    "remat of a scan": (jax.checkpoint(looped), 3),
    "cond": (lambda x: jax.lax.cond(x[0] < 1, at, jnp.negative, x), 1),
    "cond not taken": (lambda x: jax.lax.cond(x[0] > 1, at, lambda x: x, x), 0),
    "twice": (lambda x: at(at(x)), 2),
  }[kind]


@pytest.mark.parametrize(
  "kind", ["plain", "jit", "scan", "remat", "remat of a scan", "cond", "cond not taken", "twice"]
)
def test_looking_leaves_the_value_and_its_gradient_alone_and_counts_both(kind):
  def f(x, probe):
    run, _ = through(kind, probe)
    return jnp.sum(run(x) * 3)

  times = through(kind, None)[1]
  probe = jnp.zeros((2, LOOK.size))
  value, (grad, kept) = jax.jit(jax.value_and_grad(f, (0, 1)))(X, probe)
  assert value == jnp.sum(X * 3)
  np.testing.assert_array_equal(grad, np.full(6, 3, np.float32))
  want = times * np.asarray([reference_of(X), reference_of(np.full(6, 3.0))])
  np.testing.assert_array_equal(kept, want)


def reference_of(x):
  smallest = float(np.asarray([1], np.uint32).view(np.float32)[0])
  return [*reference([smallest, 0.5, 1.0, 2.0, np.inf], x), int(np.isnan(x).sum()), len(x)]


def test_the_cotangent_is_seen_without_the_scale_and_passed_on_with_it():
  x, ct = jnp.ones(4, jnp.float16), jnp.asarray([2.0**-20, 1.0, np.inf, 1000.0], jnp.float16)
  summary = Summary.of([2.0**-30, 1.0], 8)
  _, pull = jax.vjp(lambda x, probe: look(x, probe, summary, 1000.0), x, jnp.zeros((2, summary.size)))
  passed, kept = pull(ct)
  assert passed.dtype == jnp.float16
  np.testing.assert_array_equal(passed, ct)
  values = np.asarray(ct, np.float32) / np.float32(1000)
  np.testing.assert_array_equal(kept[1], summary(jnp.asarray(values)))
  assert Magnitudes.of(summary, kept[1]).inf == 1


@pytest.mark.parametrize(
  ("values", "lost"), [([1e-30, 1e-30], 1.0), ([2.0**-70, 1.0], 0.0), ([1.0, 2.0], 0.0)]
)
def test_what_is_lost_is_weighed_by_its_size(values, lost):
  summary = full_summary(1.0)
  magnitudes = Magnitudes.of(summary, np.asarray(summary(jnp.asarray(values, jnp.float32))))
  assert magnitudes.lost_norm("float16") == pytest.approx(lost, abs=1e-6)
