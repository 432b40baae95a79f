"""Number formats against bit patterns, where rounding to one begins to lose numbers, and their table."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.formats import FORMATS, describe, format_table

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
INFINITY = int(np.float32(np.inf).view(np.uint32))
WIDTHS = ("exponent_bits", "mantissa_bits")
NUMBERS = ("max", "smallest_normal", "smallest_subnormal", "epsilon", "overflow_edge")
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


def test_table_has_every_format_with_its_numbers_and_devices():
  for names in (None, ["float16", "float8_e5m2"]):
    lines = format_table(names).splitlines()
    assert max(map(len, lines)) <= 116
    cells = {line.split()[0]: line.split() for line in lines if not line.startswith(" ")}
    for row in describe(names):
      name, bits, exponent, mantissa, *numbers = cells[row["name"]][:9]
      assert [*map(int, (bits, exponent, mantissa))] == [row[k] for k in ("bits", *WIDTHS)], name
      assert [*map(float, numbers)] == pytest.approx([row[k] for k in NUMBERS], rel=0.01), name
      devices = [device for found in row["units"].values() for device in found]
      assert all(device in format_table([name]) for device in devices or ["none"])
  assert describe("float8_e4m3b11fnuz")[0]["units"] == {"tpu_v5": ["v5e", "v5p"], "tpu_v6": ["v6e"]}
