"""Where rounding to a format begins to lose numbers, against every bit pattern; and the table of formats."""

import dataclasses
import io
import math
import pathlib
import re
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import yaml
from hypothesis import given
from hypothesis import strategies as st

import mpjax
from mpjax.formats import FORMATS, MATRIX_UNITS, describe, format_table, print_formats

pytestmark = pytest.mark.optimised
TARGETS = pathlib.Path(mpjax.__file__).parent / "formats" / "devices"
WIDE = ("float64", "float32")
ENUMERABLE = [name for name in FORMATS if name not in (*WIDE, "tensorfloat32")]
INFINITY = int(np.float32(np.inf).view(np.uint32))
EDGES = ("underflow_edge", "normal_edge", "overflow_edge")

patterns = st.integers(0, INFINITY) | st.builds(
  # Near the edge of a format.
  lambda name, edge, off: min(max(pattern_of(getattr(FORMATS[name], edge)) + off, 0), INFINITY),
  st.sampled_from(list(FORMATS)),
  st.sampled_from(EDGES),
  st.integers(-3, 3),
)


def pattern_of(number):
  return int(np.float32(number).view(np.uint32))


def number_of(pattern):
  return np.array(pattern, np.uint32).view(np.float32)


def cast(numbers, name):
  """float32 numbers as a format rounds them, in float64."""
  with np.errstate(over="ignore", invalid="ignore"):
    if name == "tensorfloat32":
      bits = np.asarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
      kept = (bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13
      return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(numbers, np.float32).astype(jnp.dtype(name)).astype(np.float64)


def positive_numbers(name):
  """Each positive finite number of a format, in order."""
  dtype = jnp.dtype(name)
  codes = np.arange(2 ** FORMATS[name].bits, dtype=f"uint{8 * dtype.itemsize}")
  with np.errstate(invalid="ignore"):  # signalling NaN
    numbers = codes.view(dtype).astype(np.float64)
  return np.unique(numbers[np.isfinite(numbers) & (numbers > 0)])


def binades(numbers):
  return np.unique(np.frexp(numbers)[1] - 1, return_counts=True)


@pytest.mark.parametrize("name", ENUMERABLE)
def test_row_agrees_with_every_bit_pattern(name):
  (row,) = describe(name)
  numbers = positive_numbers(name)
  exponents, counts = binades(numbers)
  full = exponents[counts == 2 ** row["mantissa_bits"]]
  assert row["name"] == name
  assert row["max"] == numbers[-1]
  assert row["smallest_subnormal"] == numbers[0]
  assert row["smallest_normal"] == 2.0 ** full[0]
  assert row["has_subnormals"] == (full[0] > exponents[0])
  assert row["epsilon"] == numbers[numbers > 1][0] - 1
  assert row["log2_max"] == math.log2(numbers[-1])
  assert row["log2_smallest"] == exponents[0] == math.log2(numbers[0])
  assert row["binades"] == len(exponents)
  assert row["sign_bits"] == np.signbit(cast([-1.0], name)).item()
  assert row["bits"] == row["sign_bits"] + row["exponent_bits"] + row["mantissa_bits"]
  overflown = cast([np.finfo(np.float32).max], name).item()
  assert row["on_overflow"] == {math.inf: "infinity", row["max"]: "max"}.get(overflown, "NaN")


@pytest.mark.parametrize("name", ENUMERABLE)
def test_edges_lie_half_way_between_neighbours(name):
  row, numbers = FORMATS[name], positive_numbers(name)
  step = numbers[-1] - numbers[-2] if name != "float8_e8m0fnu" else numbers[-1]
  tie = numbers[-1] + step / 2
  if row.on_overflow == "max":
    assert row.overflow_edge == math.inf
  elif name == "float8_e4m3fn":  # 448 is the even one of 448 and 480
    assert row.overflow_edge == np.nextafter(np.float32(tie), np.float32(np.inf))
  else:
    assert row.overflow_edge == tie
  if name == "float8_e8m0fnu":
    assert np.isnan(cast([0.0], name)).all()
    assert cast([row.normal_edge], name) == numbers[0]
    assert (row.underflow_edge, row.normal_edge) == (0.0, 2.0**-149)
    return
  below = numbers[numbers < row.smallest_normal][-1]
  assert row.underflow_edge == numbers[0] / 2
  assert row.normal_edge == (below + row.smallest_normal) / 2


@given(st.sampled_from(list(FORMATS)), patterns)
def test_edges_say_what_becomes_of_any_float32(name, pattern):
  row, number = FORMATS[name], float(number_of(pattern))
  rounded = cast([number], name).item()
  if name == "float8_e8m0fnu" and not number:
    assert math.isnan(rounded)
    return
  assert (rounded == 0) == (number <= row.underflow_edge)
  assert (not rounded < row.smallest_normal) == (number >= row.normal_edge)
  if math.isfinite(number):
    assert (not math.isfinite(rounded)) == (number >= row.overflow_edge)


@pytest.mark.parametrize("name", FORMATS)
def test_edges_are_the_last_to_round_so(name):
  row = FORMATS[name]
  for edge, holds in (
    (row.normal_edge, lambda x: not x < row.smallest_normal),
    (row.overflow_edge, lambda x: not math.isfinite(x)),
  ):
    if math.isfinite(edge):
      at, before = cast(number_of(pattern_of(edge) + np.array([0, -1])), name)
      assert holds(at)
      # Before 2**-149 there is only zero, which is no number of float8_e8m0fnu.
      assert not holds(before) or (name == "float8_e8m0fnu" and edge == 2.0**-149)
  if row.underflow_edge:
    at, after = cast(number_of(pattern_of(row.underflow_edge) + np.array([0, 1])), name)
    assert at == 0
    assert after == row.smallest_subnormal


def test_xla_rounds_alike_at_the_edges():
  # XLA's CPU backend has no casts to the formats of 6 bits.
  names = [name for name in FORMATS if not name.startswith(("float6", "tensor", "float64"))]
  edges = [pattern_of(getattr(FORMATS[name], edge)) for name in names for edge in EDGES]
  numbers = number_of(np.unique(np.clip(np.add.outer(edges, (-1, 0, 1)), 0, INFINITY)))
  got = jax.jit(lambda x: [x.astype(name) for name in names])(numbers)
  for name, result in zip(names, got, strict=True):
    np.testing.assert_array_equal(np.asarray(result).astype(np.float64), cast(numbers, name), name)


def test_edges_are_the_same_in_a_thread_that_flushes_subnormals():
  again = {}

  def compute(x):
    assert np.array(1, np.uint32).view(np.float32) * np.float32(2) == 0
    for name, row in FORMATS.items():
      fresh = dataclasses.replace(row)
      again[name] = [getattr(fresh, edge) for edge in EDGES]
    again["rows"] = describe()
    return x

  jax.block_until_ready(jax.jit(lambda x: jax.pure_callback(compute, x, x))(jnp.float32(1)))
  rows = again.pop("rows")
  assert again == {name: [getattr(row, edge) for edge in EDGES] for name, row in FORMATS.items()}
  assert rows == describe()


@pytest.mark.parametrize("name", ["float16", "float32", "float64"])
def test_decimal_digits_are_those_of_numpy(name):
  assert FORMATS[name].decimal_digits == np.finfo(name).precision


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WIDE])
def test_decimal_numbers_of_so_many_digits_survive(name):
  row = FORMATS[name]

  def survive(digits):
    low, high = math.ceil(math.log10(row.smallest_normal)), math.floor(math.log10(row.max)) - digits
    tens = range(max(low, -10), min(high, 10))
    texts = [f"{m}e{ten}" for ten in tens for m in range(10 ** (digits - 1), 10**digits)]
    numbers = np.array(texts, np.float64)
    # As text of so many digits the rounded number is the same again.
    again = np.array([f"{x:.{digits - 1}e}" for x in cast(numbers, name)], np.float64)
    return bool((again == numbers).all())

  if row.decimal_digits:
    assert survive(row.decimal_digits)
  if name in ("bfloat16", "float16", "tensorfloat32"):
    assert not survive(row.decimal_digits + 1)


def test_units_are_those_of_the_described_devices():
  for file in TARGETS.glob("*.yaml"):
    device = yaml.safe_load(file.read_text())
    for row in describe():
      key = "float8" if row["name"] in ("float8_e4m3fn", "float8_e5m2") else row["name"]
      # Rates of float32 on GPUs and of FP8 on TPUs are not those of units for it.
      has_units = key in device["flops"] and key != {"gpu": "float32", "tpu": "float8"}[device["kind"]]
      assert (file.stem in row["units"].get(device["matrix_units"], ())) == has_units, (file.stem, row)


def test_units_name_every_row_of_the_matrix_units_but_the_cpu():
  assert {unit for row in describe() for unit in row["units"]} == set(MATRIX_UNITS) - {"cpu"}


def test_formats_are_described_in_the_order_asked_for():
  assert [row["name"] for row in describe()] == list(FORMATS)
  assert [row["name"] for row in mpjax.formats.describe(["float16", "bfloat16"])] == ["float16", "bfloat16"]
  assert describe("float16") == describe(["float16"])


def test_unknown_format_lists_the_formats():
  with pytest.raises(
    ValueError, match=r"unknown number format 'bfloat61': .*float4_e2m1fn; did you mean 'bfloat16'"
  ):
    describe(["bfloat61"])


def test_table_has_every_format_with_its_numbers_in_120_columns():
  text = format_table()
  lines = text.splitlines()
  assert max(map(len, lines)) <= 120
  cells = {line.split()[0]: line.split() for line in lines[2 : 2 + len(FORMATS)]}
  listed = "\n".join(lines[5 + len(FORMATS) :]).partition("\n\n")[0]
  # A line that was broken goes on under the units of the one before.
  units = {line.split()[0]: line for line in re.sub(r"\n +", " ", listed).splitlines()}
  for row in describe():
    name = row["name"]
    _, bits, widths, largest, normal, subnormal, epsilon, digits, overflow, powers, count = cells[name]
    assert (int(bits), int(digits), overflow) == (row["bits"], row["decimal_digits"], row["on_overflow"])
    assert [*map(int, widths.split("+"))] == [row["sign_bits"], row["exponent_bits"], row["mantissa_bits"]]
    # Rounded up to two digits, the largest float64 is none.
    assert Decimal(largest) / Decimal(row["max"]) == pytest.approx(1, rel=Decimal("0.01"))
    assert float(normal) == pytest.approx(row["smallest_normal"], rel=0.01)
    assert float(epsilon) == pytest.approx(row["epsilon"], rel=0.01)
    if row["has_subnormals"]:
      assert float(subnormal) == pytest.approx(row["smallest_subnormal"], rel=0.01)
    else:
      assert subnormal == "none"
    low, high = map(float, powers.split(".."))
    assert (low, int(count)) == (row["log2_smallest"], row["binades"])
    assert high == pytest.approx(row["log2_max"], abs=0.051)
    assert all(f"{unit}: {', '.join(devices)}" in units[name] for unit, devices in row["units"].items())
    assert row["units"] or units[name].split() == [name, "none"]


def test_printed_table_is_the_plain_one():
  console = rich.console.Console(width=120, file=io.StringIO())
  print_formats(console, ["float16", "float8_e5m2"])
  assert console.file.getvalue() == format_table(["float16", "float8_e5m2"]) + "\n"
