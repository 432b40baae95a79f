"""Which shapes of product are worth a matrix unit, and which devices have which."""

import json
import pathlib

import pytest
import yaml
from hypothesis import given, strategies as st

import mpjax
from mpjax.formats import (
  FORMATS,
  LOW_PRECISION,
  MATRIX_UNITS,
  describe,
  eligible,
  fp8_time,
  narrow_bits,
  padded,
  runs_on,
)
from mpjax.fp8 import RECIPES

TARGETS = pathlib.Path(mpjax.__file__).parent / "formats" / "devices"

size = st.integers(1, 5000)
unit_and_dtype = st.sampled_from(
  [(unit, dtype) for unit in MATRIX_UNITS for dtype in (*FORMATS, "float8") if runs_on(unit, dtype)]
)


def test_multiples_are_what_the_vendors_guides_say():
  for units, dtype, multiples in (
    ("volta", "float16", (8, 8, 8)),
    ("ampere", "bfloat16", (8, 8, 8)),
    ("ampere", "tensorfloat32", (4, 4, 4)),
    ("hopper", "float8_e4m3fn", (16, 16, 16)),
    ("blackwell", "mxfp8", (32, 32, 32)),
    ("blackwell", "nvfp4", (16, 16, 16)),
    ("cdna3", "float8_e4m3fnuz", (16, 16, 16)),
    ("tpu_v5", "bfloat16", (8, 128, 128)),
    ("tpu_v6", "float8_e5m2", (8, 256, 256)),
  ):
    assert padded(units, dtype, 1, 1, 1) == multiples, (units, dtype)
  for units, dtype in (("turing", "bfloat16"), ("ampere", "float8"), ("tpu_v5", "float8_e4m3fn")):
    assert not runs_on(units, dtype)
    assert padded(units, dtype, 1, 7, 13) == (1, 7, 13)


def test_the_recipe_of_each_kind_of_units_is_one_that_they_multiply():
  for unit, (recipe, *dtypes) in LOW_PRECISION.items():
    assert runs_on(unit, "mxfp8") if recipe == "mx" else all(runs_on(unit, dtype) for dtype in dtypes), unit
  for unit in MATRIX_UNITS.keys() - LOW_PRECISION.keys() - {"cpu"}:
    assert not any(runs_on(unit, dtype) for dtype in (*FORMATS, "float8") if narrow_bits(dtype)), unit


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


def test_errors_list_the_units_and_refuse_changes():
  with pytest.raises(
    ValueError,
    match=r"unknown matrix units 'hoper': expected one of volta, .*ampere, .*did you mean 'hopper'",
  ):
    padded("hoper", "bfloat16", 8, 8, 8)
  with pytest.raises(TypeError):
    MATRIX_UNITS["tpu"]["float8"] = (1, 1, 1)


def test_units_are_those_of_the_described_devices():
  for file in TARGETS.glob("*.yaml"):
    device = yaml.safe_load(file.read_text())
    for row in describe():
      key = "float8" if row["name"] in ("float8_e4m3fn", "float8_e5m2") else row["name"]
      has_units = key in device["flops"]
      if device["kind"] == "gpu":
        has_units &= key != "float32"  # the rate is not that of units
      elif narrow_bits(row["name"]):
        own = {*LOW_PRECISION[device["matrix_units"]], "float8_e5m2"}  # which `auto` is not on TPU v5 and v6
        has_units = row["name"] in own
      assert (file.stem in row["units"].get(device["matrix_units"], ())) == has_units, (file.stem, row)


def test_the_time_of_fp8_is_that_of_the_compilers():
  report = json.loads((TARGETS.parents[2] / "benchmarks" / "results" / "fp8_devices.json").read_text())
  cycles = {(row["target"], row["policy"]): row["cycles"] for row in report["rows"] if row["cycles"]}
  for (target, recipe), found in cycles.items():
    if recipe in RECIPES[1:]:
      time = found / cycles[target, "bf16"]
      assert fp8_time(target, recipe) == pytest.approx(time, abs=0.005), (target, recipe)
  assert fp8_time("TPU v6 lite", "current") > 1
  assert fp8_time("h200", "current") == fp8_time("cpu", "current") == 0
