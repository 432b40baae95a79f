"""Which devices multiply which recipe in hardware, and what `auto` is there, by what JAX says of them."""

from __future__ import annotations

import re
import types

import jax
import optax
import pytest

import mpjax
from tests.fp8._programs import mlp, products, weights
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


@pytest.fixture
def explained(monkeypatch):
  """What is said of a product under a recipe on a device that is not there: (its dtype, why)."""
  w, x = weights(*[128] * 4), normal(128, 128)

  def said(device, spec):
    monkeypatch.setattr(jax, "devices", lambda *_: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: device.platform)
    recipe = {"recipe": spec} if isinstance(spec, str) else spec
    inner = products(mlp, w, x, policy={"base": "fp8", "fp8": {"keep_last": 0.0, **recipe}})[1]
    return inner.after, inner.why

  return said


@pytest.mark.parametrize("name", DEVICES)
def test_the_units_of_a_device_and_its_own_recipe(name, explained):
  made, has, own = DEVICES[name]
  for recipe, spec in RECIPES.items():
    dtype, why = explained(made, spec)
    if recipe in has.split():
      assert why.startswith("an FP8 product"), recipe
    else:
      assert (dtype, made.device_kind in why) == ("bfloat16", True), recipe
  # Scales of channels need the units that scales of tensors do; a device has those of its own recipe, if any.
  assert (explained(made, "per_channel")[0] != "bfloat16") == ("OCP" in has)
  assert explained(made, {"recipe": "auto", "emulate": True})[1] == f"an FP8 product ({own})"
  assert (explained(made, "auto")[0] != "bfloat16") == bool(has)


def test_what_a_device_lacks(explained):
  for name, recipe, words in LACKS:
    why = explained(DEVICES[name][0], RECIPES[recipe])[1]
    assert re.search(words, why), why


# Fields beside `recipe: auto`, and what it is with them on a B200 and on a TPU v5e.
WITH = [
  ({"gradient_dtype": "e5m2"}, "mx scaling, E4M3FN forward, E5M2 backward",
   B11.replace("E4M3B11FNUZ backward", "E5M2 backward")),
  ({"backward": "compute"}, MX.replace("E4M3FN backward", "the compute dtype backward"),
   B11.replace("E4M3B11FNUZ backward", "the compute dtype backward")),
  ({"margin": 1}, OCP, B11),
  ({"saved_activations": "fp8"}, OCP, B11),
  ({"forward_dtype": "e4m3fn"}, OCP, OCP),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "on_b200", "on_v5e"), WITH, ids=str)
def test_auto_keeps_the_fields_that_are_given(fields, on_b200, on_v5e, explained):
  for name, want in (("B200", on_b200), ("TPU v5e", on_v5e)):
    assert explained(DEVICES[name][0], {"recipe": "auto", "emulate": True, **fields})[1].endswith(f"({want})")


def test_making_a_step_asks_no_device(monkeypatch):
  monkeypatch.setattr(jax, "devices", lambda *_: pytest.fail("a device was asked for"))
  delayed = {"base": "fp8", "fp8": "delayed"}
  for policy, needs in (("bf16", False), ("fp8", False), (delayed, True)):
    step = mpjax.make_train_step(lambda params, batch: (params * batch).sum(), optax.sgd(0.1), policy)
    assert step.needs_batch is needs
