"""Number formats against bit patterns, and which shapes of product are worth a matrix unit."""

import itertools
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax.formats import FORMATS, MATRIX_UNITS, MatrixUnit, eligible, padded, runs_on, utilisation

# Exponent bits, mantissa bits, bias, what the codes at the top of the range mean, and whether there is a sign.
# "ieee": the last exponent is for infinity and NaN; "fn": only its last mantissa is NaN; "fnuz": NaN is minus zero;
# "nan": as "fn", but without zero and subnormals; "finite": every code is a number.
LAYOUTS = {
  "float64": (11, 52, 1023, "ieee", True),
  "float32": (8, 23, 127, "ieee", True),
  "tensorfloat32": (8, 10, 127, "ieee", True),
  "bfloat16": (8, 7, 127, "ieee", True),
  "float16": (5, 10, 15, "ieee", True),
  "float8_e4m3fn": (4, 3, 7, "fn", True),
  "float8_e5m2": (5, 2, 15, "ieee", True),
  "float8_e4m3fnuz": (4, 3, 8, "fnuz", True),
  "float8_e5m2fnuz": (5, 2, 16, "fnuz", True),
  "float8_e4m3b11fnuz": (4, 3, 11, "fnuz", True),
  "float8_e8m0fnu": (8, 0, 127, "nan", False),
  "float8_e4m3": (4, 3, 7, "ieee", True),
  "float8_e3m4": (3, 4, 3, "ieee", True),
  "float6_e3m2fn": (3, 2, 3, "finite", True),
  "float6_e2m3fn": (2, 3, 1, "finite", True),
  "float4_e2m1fn": (2, 1, 1, "finite", True),
}
DTYPES = [name for name in LAYOUTS if name != "tensorfloat32"]
HALF = [name for name in DTYPES if name not in ("float64", "float32")]
REAL = [name for name in MATRIX_UNITS if name != "cpu"]

size = st.integers(1, 5000)
unit_and_dtype = st.sampled_from(
  [(unit, dtype) for unit in MATRIX_UNITS for dtype in (*FORMATS, "float8") if runs_on(unit, dtype)]
)


def largest_by_hand(exponent_bits, mantissa_bits, bias, top):
  last = 2**exponent_bits - 1 - (top == "ieee")
  mantissa = 2**mantissa_bits - 1 - (top == "fn")
  if top == "nan":
    last, mantissa = last - 1, 0
  return math.ldexp(2**mantissa_bits + mantissa, last - bias - mantissa_bits)


@pytest.mark.parametrize("name", LAYOUTS)
def test_row_follows_from_the_layout_of_the_bits(name):
  exponent_bits, mantissa_bits, bias, top, signed = LAYOUTS[name]
  row = FORMATS[name]
  subnormals = top != "nan"
  assert row.name == name
  assert row.bits == signed + exponent_bits + mantissa_bits
  assert (row.exponent_bits, row.mantissa_bits) == (exponent_bits, mantissa_bits)
  assert row.max == largest_by_hand(exponent_bits, mantissa_bits, bias, top)
  assert row.smallest_normal == math.ldexp(1, subnormals - bias)
  assert row.smallest_subnormal == math.ldexp(1, subnormals - bias - mantissa_bits)
  assert row.epsilon == math.ldexp(1, -mantissa_bits)
  assert row.has_inf == (top == "ieee")


def test_there_is_a_row_for_each_layout():
  assert set(FORMATS) == set(LAYOUTS)


@pytest.mark.parametrize("name", DTYPES)
def test_row_agrees_with_finfo(name):
  dtype, row = jnp.dtype(name), FORMATS[name]
  for finfo in (jnp.finfo(dtype), ml_dtypes.finfo(dtype)):
    assert row.bits == finfo.bits
    assert max(row.bits, 8) == 8 * dtype.itemsize
    assert (row.exponent_bits, row.mantissa_bits) == (finfo.nexp, finfo.nmant)
    assert row.max == float(finfo.max)
    assert row.smallest_normal == float(finfo.smallest_normal)
    assert row.smallest_subnormal == float(finfo.smallest_subnormal)
    assert row.epsilon == float(finfo.eps)


@pytest.mark.parametrize("name", HALF)
def test_row_agrees_with_every_bit_pattern(name):
  dtype, row = jnp.dtype(name), FORMATS[name]
  codes = np.arange(2**row.bits, dtype=f"uint{8 * dtype.itemsize}")
  with np.errstate(invalid="ignore"):  # signalling NaN
    numbers = codes.view(dtype).astype(np.float64)
  finite = np.unique(np.abs(numbers[np.isfinite(numbers)]))
  positive = finite[finite > 0]
  assert positive[-1] == row.max
  assert positive[0] == row.smallest_subnormal
  assert np.isinf(numbers).any() == row.has_inf
  above_one = positive[positive > 1][0]
  assert above_one - 1 == row.epsilon
  # From the smallest normal number on, each power of two has its full number of steps.
  in_octave = lambda low: np.sum((positive >= low) & (positive < 2 * low))
  assert in_octave(row.smallest_normal) == 2**row.mantissa_bits
  assert in_octave(row.smallest_normal / 2) < max(2**row.mantissa_bits, 1)


def test_tensorfloat32_is_float32_cut_to_the_mantissa_of_float16():
  row = FORMATS["tensorfloat32"]
  kept = np.uint32(0xFFFFFFFF) << np.uint32(23 - 10)
  cut = (np.array([np.finfo(np.float32).max]).view(np.uint32) & kept).view(np.float32)
  assert row.max == float(cut[0])
  assert row.exponent_bits == FORMATS["float32"].exponent_bits
  assert row.epsilon == FORMATS["float16"].epsilon
  assert row.smallest_normal == FORMATS["float32"].smallest_normal


# What the vendors' guides say, by hand.
MULTIPLES = [
  (("volta", "turing"), ("float16",), (8, 8, 8)),
  (("ampere", "ada", "hopper", "blackwell"), ("bfloat16", "float16"), (8, 8, 8)),
  (("ampere", "ada", "hopper", "blackwell"), ("tensorfloat32",), (4, 4, 4)),
  (("ada", "hopper", "blackwell"), ("float8", "float8_e4m3fn", "float8_e5m2"), (16, 16, 16)),
  (("tpu",), ("bfloat16", "float16", "float32"), (8, 128, 128)),
  (("tpu_v6",), ("bfloat16", "float16", "float32"), (8, 256, 256)),
]
RUNS = {
  (unit, dtype): multiples
  for units, dtypes, multiples in MULTIPLES
  for unit, dtype in itertools.product(units, dtypes)
}


@pytest.mark.parametrize("unit", REAL)
@pytest.mark.parametrize("dtype", [*FORMATS, "float8", "int32"])
def test_smallest_product_of_a_unit(unit, dtype):
  if (unit, dtype) not in RUNS:
    assert not runs_on(unit, dtype)
    assert not eligible(unit, dtype, 1024, 1024, 1024)
    assert padded(unit, dtype, 3, 5, 7) == (3, 5, 7)
    assert utilisation(unit, dtype, 1024, 1024, 1024) == 0
    return
  m, n, k = RUNS[unit, dtype]
  assert runs_on(unit, dtype)
  assert padded(unit, dtype, 1, 1, 1) == (m, n, k)
  assert eligible(unit, dtype, m, n, k)
  assert not any(eligible(unit, dtype, *sizes) for sizes in ((m - 1, n, k), (m, n - 1, k), (m, n, k - 1)))
  assert not any(eligible(unit, dtype, *sizes) for sizes in ((1, n, k), (m, 1, k), (m, n, 1)))


@pytest.mark.parametrize("dtype", [*FORMATS, "int8"])
def test_anything_is_eligible_where_there_are_no_units(dtype):
  assert runs_on("cpu", dtype)
  assert eligible("cpu", dtype, 1, 7, 13)
  assert padded("cpu", dtype, 1, 7, 13) == (1, 7, 13)
  assert utilisation("cpu", dtype, 1, 7, 13) == 1


@pytest.mark.parametrize(
  ("unit", "dtype", "shape", "want", "share"),
  [
    ("hopper", "bfloat16", (8192, 50257, 768), (8192, 50264, 768), 50257 / 50264),
    ("hopper", "float8_e4m3fn", (8192, 50257, 768), (8192, 50272, 768), 50257 / 50272),
    ("ampere", "tensorfloat32", (6, 10, 30), (8, 12, 32), 6 * 10 * 30 / (8 * 12 * 32)),
    ("tpu", "bfloat16", (8192, 50257, 768), (8192, 50304, 768), 50257 / 50304),
    ("tpu", "bfloat16", (12, 64, 64), (16, 128, 128), 12 * 64 * 64 / (16 * 128 * 128)),
    ("tpu_v6", "float32", (12, 64, 300), (16, 256, 512), 12 * 64 * 300 / (16 * 256 * 512)),
    ("hopper", "bfloat16", (1, 4096, 4096), (8, 4096, 4096), 1 / 8),
    ("hopper", "bfloat16", (0, 4096, 4096), (0, 4096, 4096), 1),
  ],
)
def test_padded_shape_and_its_useful_share(unit, dtype, shape, want, share):
  assert padded(unit, dtype, *shape) == want
  assert utilisation(unit, dtype, *shape) == pytest.approx(share)


@given(unit_and_dtype, size, size, size)
def test_padding_is_the_least_that_makes_a_product_eligible(unit_and_dtype, m, n, k):
  unit, dtype = unit_and_dtype
  shape = (m, n, k)
  wide = padded(unit, dtype, *shape)
  assert padded(unit, dtype, *wide) == wide
  assert all(after >= before for before, after in zip(shape, wide, strict=True))
  assert eligible(unit, dtype, *wide)
  assert eligible(unit, dtype, *shape) == (wide == shape and (unit == "cpu" or 1 not in shape))
  for axis, (before, after) in enumerate(zip(shape, wide, strict=True)):
    steps = padded(unit, dtype, 1, 1, 1)
    assert not any(smaller % steps[axis] == 0 for smaller in range(before, after))
  assert utilisation(unit, dtype, *wide) == 1
  assert utilisation(unit, dtype, *shape) * math.prod(wide) == pytest.approx(math.prod(shape))


@pytest.mark.parametrize(
  "dtype", [jnp.bfloat16, np.dtype(jnp.bfloat16), jnp.zeros(1, "bfloat16").dtype, "bfloat16"]
)
def test_a_dtype_may_be_given_in_any_form(dtype):
  assert runs_on(MATRIX_UNITS["hopper"], dtype)
  assert padded("hopper", dtype, 3, 3, 3) == (8, 8, 8)


def test_a_unit_may_be_ones_own():
  mine = MatrixUnit("mine", {"bfloat16": (2, 3, 5)})
  assert padded(mine, "bfloat16", 3, 4, 6) == (4, 6, 10)
  assert not runs_on(mine, "float16")


def test_unknown_unit_lists_the_rows():
  with pytest.raises(
    ValueError,
    match=r"unknown matrix units 'hoper': expected one of volta, .*ampere, .*did you mean 'hopper'",
  ):
    padded("hoper", "bfloat16", 8, 8, 8)


@pytest.mark.parametrize("ask", [padded, eligible, utilisation])
def test_negative_size_is_refused(ask):
  with pytest.raises(ValueError, match=r"\(8, -1, 8\).*negative"):
    ask("hopper", "bfloat16", 8, -1, 8)


def test_rows_cannot_be_changed():
  with pytest.raises(TypeError):
    FORMATS["float32"] = FORMATS["float16"]
  with pytest.raises(TypeError):
    MATRIX_UNITS["tpu"].multiples["float8"] = (1, 1, 1)
