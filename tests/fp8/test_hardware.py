"""Which devices multiply which recipe in hardware, and what `auto` is there, by what JAX says of them."""

from __future__ import annotations

import re
import types

import jax
import optax
import pytest

import mpjax

# No public function takes a device that is not there.
from mpjax.fp8._hardware import fp8_units, on_device
from mpjax.fp8._recipe import parse_recipe
from tests.fp8._programs import mlp, weights
from tests.fp8._reference import normal


def device(platform, kind, capability=None):
  made = types.SimpleNamespace(platform=platform, device_kind=kind)
  if capability is not None:
    made.compute_capability = capability
  return made


OCP = "current scaling, E4M3FN forward, E5M2 backward"
AMD = "current scaling, E4M3FNUZ forward, E5M2FNUZ backward"
B11 = "current scaling, E4M3B11FNUZ forward, E4M3B11FNUZ backward"
MX = "mx scaling, E4M3FN forward, E4M3FN backward"
# Device, the recipes that it has units for, and what `auto` is there.
DEVICES = {
  "cpu": (device("cpu", "cpu"), "", OCP),
  "A100": (device("gpu", "NVIDIA A100-SXM4-40GB", "8.0"), "", OCP),
  "Orin": (device("gpu", "Orin", "8.7"), "", OCP),
  "L4": (device("gpu", "NVIDIA L4", "8.9"), "OCP", OCP),
  "H200": (device("gpu", "NVIDIA H200", "9.0"), "OCP", OCP),
  "B200": (device("gpu", "NVIDIA B200", "10.0"), "OCP mx nvfp4", MX),
  "RTX 5090": (device("gpu", "NVIDIA GeForce RTX 5090", "12.0"), "OCP mx nvfp4", MX),
  "MI300": (device("rocm", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"), "FNUZ", AMD),
  "MI350": (device("gpu", "AMD Instinct MI355X", "gfx950"), "OCP", OCP),
  "RX 9070": (device("gpu", "AMD Radeon RX 9070", "gfx1201"), "OCP", OCP),
  "TPU v4": (device("tpu", "TPU v4"), "", OCP),
  "TPU v5e": (device("tpu", "TPU v5 lite"), "B11", B11),
  "TPU v6e": (device("tpu", "TPU v6 lite"), "B11", B11),
  "TPU v7": (device("tpu", "TPU7x"), "OCP", OCP),
  "unknown": (device("neuron", "trn2"), "", OCP),
}
RECIPES = {
  "OCP": "current",
  "FNUZ": {"recipe": "current", "forward_dtype": "e4m3fnuz"},
  "B11": {"recipe": "current", "forward_dtype": "e4m3b11fnuz"},
  "mx": "mx",
  "nvfp4": "nvfp4",
  "mx FNUZ": {"recipe": "mx", "forward_dtype": "e4m3fnuz"},
}


# Device, recipe, and what is said of a device without.
LACKS = [
  ("cpu", "OCP", "cpu has no FP8 units"),
  ("A100", "OCP", "8.0.*no FP8 units: they start with 8.9"),
  ("H200", "mx", r"blocks of 32.*MXFP8.*starts with NVIDIA's compute capability 10\.0"),
  ("H200", "nvfp4", r"blocks of 16.*NVFP4.*starts with NVIDIA's compute capability 10\.0"),
  ("H200", "FNUZ", "no units for float8_e4m3fnuz and float8_e5m2fnuz: use float8_e4m3fn and float8_e5m2"),
  ("B200", "mx FNUZ", "no units for float8_e4m3fnuz: use float8_e4m3fn and float8_e4m3fn"),
  ("MI300", "OCP", "MI300X.*use float8_e4m3fnuz and float8_e5m2fnuz, or recipe: auto"),
  ("TPU v4", "OCP", "TPU v4 has no FP8 units: they start with TPU v5"),
  ("TPU v6e", "OCP", "TPU v6 lite has no units for float8_e4m3fn: use float8_e4m3b11fnuz"),
  ("unknown", "OCP", "trn2.*unknown"),
]


@pytest.mark.parametrize("name", DEVICES)
def test_the_units_of_a_device_and_its_own_recipe(name):
  made, has, own = DEVICES[name]
  for recipe, spec in RECIPES.items():
    has_units, lack = fp8_units(parse_recipe(spec), made)
    assert has_units is (recipe in has.split()), recipe
    assert lack == "" if has_units else lack.startswith(made.device_kind), recipe
  # Scales of tensors and of channels need the same units; a device has those of its own recipe, if any.
  assert fp8_units(parse_recipe("delayed"), made) == fp8_units(parse_recipe("current"), made)
  assert fp8_units(parse_recipe("per_channel"), made)[0] is ("OCP" in has)
  assert fp8_units(parse_recipe("auto"), made)[0] is bool(has)
  assert str(on_device(parse_recipe("auto"), made)) == own
  assert on_device(parse_recipe("nvfp4"), made) == parse_recipe("nvfp4")


def test_what_a_device_lacks():
  for name, recipe, words in LACKS:
    said = fp8_units(parse_recipe(RECIPES[recipe]), DEVICES[name][0])[1]
    assert re.search(words, said), said


# Fields beside `recipe: auto`, and what it is with them on a B200 and on a TPU v5e.
WITH = [
  ({"min_dim": 16, "keep_last": 0.1}, MX, B11),
  ({"gradient_dtype": "e5m2"}, "mx scaling, E4M3FN forward, E5M2 backward",
   B11.replace("E4M3B11FNUZ backward", "E5M2 backward")),
  ({"backward": "compute"}, MX.replace("E4M3FN backward", "the compute dtype backward"),
   B11.replace("E4M3B11FNUZ backward", "the compute dtype backward")),
  ({"margin": 1}, OCP, B11),
  ({"saved_activations": "fp8"}, OCP, B11),
  ({"forward_dtype": "e4m3fn"}, OCP, OCP),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "on_b200", "on_v5e"), WITH, ids=str)
def test_auto_keeps_the_fields_that_are_given(fields, on_b200, on_v5e):
  recipe = parse_recipe({"recipe": "auto", **fields})
  for name, want in (("B200", on_b200), ("TPU v5e", on_v5e)):
    found = on_device(recipe, DEVICES[name][0])
    assert str(found) == want
    given = parse_recipe(fields)
    assert all(getattr(found, key) == getattr(given, key) for key in fields)


@pytest.mark.parametrize("name", ["cpu", "H200", "B200", "MI300", "TPU v6e", "TPU v7"])
def test_the_preset_is_the_devices_own_recipe_where_products_are_decided(name, monkeypatch):
  made, has, own = DEVICES[name]
  monkeypatch.setattr(jax, "devices", lambda *_: [made])
  monkeypatch.setattr(jax, "default_backend", lambda: made.platform)
  w, x = weights(*[128] * 4), normal(128, 128)
  rows = [row for row in mpjax.explain(mlp, w, x, policy="fp8").rows if row.flops]
  inner, forward = rows[1], f"float8_{own.split()[2].lower()}"
  if not has:
    assert "has no FP8 units" in inner.why
    rows = mpjax.explain(mlp, w, x, policy={"base": "fp8", "fp8": {"emulate": True}}).rows
    inner = [row for row in rows if row.flops][1]
  assert inner.why == f"an FP8 product ({own})"
  assert inner.after == forward
  if has:
    there = mpjax.explain(
      jax.named_scope("mlp")(mlp), w, x, policy={"base": "bf16", "overrides": {"mlp": "fp8"}}
    )
    assert there.fp8 == own


def test_making_a_step_asks_no_device(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a device was asked for"))
  delayed = {"base": "fp8", "fp8": "delayed"}
  for policy, needs in (("bf16", False), ("fp8", False), (delayed, True)):
    step = mpjax.make_train_step(lambda params, batch: (params * batch).sum(), optax.sgd(0.1), policy)
    assert step.needs_batch is needs
