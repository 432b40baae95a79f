"""Number formats against bit patterns, where rounding to one begins to lose numbers, and their table."""

import dataclasses
import functools
import io
import math
import re
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from hypothesis import given, strategies as st

import mpjax
from mpjax.formats import FORMATS, describe, format_table, print_formats

pytestmark = pytest.mark.optimised

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
WIDE = ("float64", "float32")
ENUMERABLE = [name for name in FORMATS if name not in (*WIDE, "tensorfloat32")]
INFINITY = int(np.float32(np.inf).view(np.uint32))
EDGES = ("underflow_edge", "normal_edge", "overflow_edge")


pattern_of = lambda number: int(np.float32(number).view(np.uint32))
number_of = lambda pattern: np.array(pattern, np.uint32).view(np.float32)


def cast(numbers, name):
  """float32 numbers as a format rounds them, in float64."""
  with np.errstate(over="ignore", invalid="ignore"):
    if name == "tensorfloat32":
      bits = np.asarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
      kept = (bits + 0xFFF + (bits >> 13 & 1)) >> 13 << 13
      return kept.astype(np.uint32).view(np.float32).astype(np.float64)
    return np.asarray(numbers, np.float32).astype(jnp.dtype(name)).astype(np.float64)


@functools.cache
def positive_numbers(name):
  """Each positive finite number of a format, in order."""
  dtype = jnp.dtype(name)
  codes = np.arange(2 ** FORMATS[name].bits, dtype=f"uint{8 * dtype.itemsize}")
  with np.errstate(invalid="ignore"):  # signalling NaN
    numbers = codes.view(dtype).astype(np.float64)
  return np.unique(numbers[np.isfinite(numbers) & (numbers > 0)])


def largest_by_hand(exponent_bits, mantissa_bits, bias, top):
  last = 2**exponent_bits - 1 - (top == "ieee")
  mantissa = 2**mantissa_bits - 1 - (top == "fn")
  if top == "nan":
    last, mantissa = last - 1, 0
  return math.ldexp(2**mantissa_bits + mantissa, last - bias - mantissa_bits)


def test_rows_follow_from_the_layout_of_the_bits():
  assert set(FORMATS) == set(LAYOUTS)
  for name, (exponent_bits, mantissa_bits, bias, top, signed) in LAYOUTS.items():
    row = FORMATS[name]
    subnormals = top != "nan"
    want = {
      "name": name,
      "bits": signed + exponent_bits + mantissa_bits,
      "exponent_bits": exponent_bits,
      "mantissa_bits": mantissa_bits,
      "max": largest_by_hand(exponent_bits, mantissa_bits, bias, top),
      "smallest_normal": math.ldexp(1, subnormals - bias),
      "smallest_subnormal": math.ldexp(1, subnormals - bias - mantissa_bits),
      "epsilon": math.ldexp(1, -mantissa_bits),
      "has_inf": top == "ieee",
    }
    assert {key: getattr(row, key) for key in want} == want


def test_rows_agree_with_every_bit_pattern():
  for name in ENUMERABLE:
    (row,) = describe(name)
    numbers = positive_numbers(name)
    exponents, counts = np.unique(np.frexp(numbers)[1] - 1, return_counts=True)
    # From the smallest normal number on, each power of two has its full number of steps.
    full = exponents[counts == 2 ** row["mantissa_bits"]]
    overflown = cast([np.finfo(np.float32).max], name).item()
    sign_bits = np.signbit(cast([-1.0], name)).item()
    want = {
      "name": name,
      "max": numbers[-1],
      "smallest_subnormal": numbers[0],
      "smallest_normal": 2.0 ** full[0],
      "has_subnormals": full[0] > exponents[0],
      "epsilon": numbers[numbers > 1][0] - 1,
      "log2_max": math.log2(numbers[-1]),
      "log2_smallest": exponents[0],
      "binades": len(exponents),
      "sign_bits": sign_bits,
      "bits": sign_bits + row["exponent_bits"] + row["mantissa_bits"],
      "on_overflow": {math.inf: "infinity", row["max"]: "max"}.get(overflown, "NaN"),
    }
    assert {key: row[key] for key in want} == want
    assert exponents[0] == math.log2(numbers[0]), name


def check_edges(name, pattern):
  row, number = FORMATS[name], float(number_of(pattern))
  rounded = cast([number], name).item()
  if name == "float8_e8m0fnu" and not number:
    assert math.isnan(rounded)
    return
  assert (rounded == 0) == (number <= row.underflow_edge), (name, pattern)
  assert (not rounded < row.smallest_normal) == (number >= row.normal_edge), (name, pattern)
  if math.isfinite(number):
    assert (not math.isfinite(rounded)) == (number >= row.overflow_edge), (name, pattern)


def test_edges_are_the_last_to_round_so():
  for name, row in FORMATS.items():
    for edge in EDGES:
      for step in range(-3, 4):
        check_edges(name, min(max(pattern_of(getattr(row, edge)) + step, 0), INFINITY))


@given(st.sampled_from(list(FORMATS)), st.integers(0, INFINITY))
def test_edges_say_what_becomes_of_any_float32(name, pattern):
  check_edges(name, pattern)


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


def survive(name, digits):
  """Whether decimal numbers of so many digits are the same again when a format has rounded them."""
  row = FORMATS[name]
  low, high = math.ceil(math.log10(row.smallest_normal)), math.floor(math.log10(row.max)) - digits
  tens = range(max(low, -10), min(high, 10))
  texts = [f"{m}e{ten}" for ten in tens for m in range(10 ** (digits - 1), 10**digits)]
  again = [f"{x:.{digits - 1}e}" for x in cast(np.array(texts, np.float64), name)]
  return bool((np.array(again, np.float64) == np.array(texts, np.float64)).all())


def test_decimal_numbers_of_so_many_digits_survive():
  for name in ("float16", "float32", "float64"):
    assert FORMATS[name].decimal_digits == np.finfo(name).precision, name
  for name, row in FORMATS.items():
    assert name in WIDE or not row.decimal_digits or survive(name, row.decimal_digits), name
  for name in ("bfloat16", "float16", "tensorfloat32"):
    assert not survive(name, FORMATS[name].decimal_digits + 1), name


def test_formats_are_described_in_the_order_asked_for():
  assert [row["name"] for row in describe()] == list(FORMATS)
  assert [row["name"] for row in mpjax.formats.describe(["float16", "bfloat16"])] == ["float16", "bfloat16"]
  assert describe("float16") == describe(["float16"])
  with pytest.raises(
    ValueError, match=r"unknown number format 'bfloat61': .*float4_e2m1fn; did you mean 'bfloat16'"
  ):
    describe(["bfloat61"])
  with pytest.raises(TypeError):
    FORMATS["float32"] = FORMATS["float16"]


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
    of_units = [f"{unit}: {', '.join(on)}" if on else unit for unit, on in row["units"].items()]
    assert all(found in units[name] for found in of_units)
    assert row["units"] or units[name].split() == [name, "none"]
  assert units["nvfp4"].split() == ["nvfp4", "blackwell:", "b200"]
  (own,) = [line for line in lines if line.startswith("current, float8_e4m3b11fnuz ")]
  assert own.endswith("tpu_v5: v5e, v5p; tpu_v6: v6e")
  console = rich.console.Console(width=120, file=io.StringIO())
  print_formats(console, ["float16", "float8_e5m2"])
  assert console.file.getvalue() == format_table(["float16", "float8_e5m2"]) + "\n"
