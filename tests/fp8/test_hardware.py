"""Which devices multiply FP8 in hardware, by what JAX says of them."""

from __future__ import annotations

import re
import types

import jax

# No public function takes a device that is not there.
from mpjax.fp8._hardware import fp8_units
from mpjax.fp8._recipe import parse_recipe

FNUZ = {"forward_dtype": "e4m3fnuz", "gradient_dtype": "e5m2fnuz"}


def device(platform, kind, capability=None):
  made = types.SimpleNamespace(platform=platform, device_kind=kind)
  if capability is not None:
    made.compute_capability = capability
  return made


# Device, and for OCP's formats, AMD's and MXFP8: whether it has units.
DEVICES = {
  "cpu": (device("cpu", "cpu"), "no no no"),
  "V100": (device("gpu", "Tesla V100-SXM2-16GB", "7.0"), "no no no"),
  "A100": (device("gpu", "NVIDIA A100-SXM4-40GB", "8.0"), "no no no"),
  "RTX 3090": (device("gpu", "NVIDIA GeForce RTX 3090", "8.6"), "no no no"),
  "Orin": (device("gpu", "Orin", "8.7"), "no no no"),
  "L4": (device("gpu", "NVIDIA L4", "8.9"), "yes no no"),
  "RTX 4090": (device("cuda", "NVIDIA GeForce RTX 4090", "8.9"), "yes no no"),
  "H100": (device("gpu", "NVIDIA H100 80GB HBM3", "9.0"), "yes no no"),
  "H200": (device("gpu", "NVIDIA H200", "9.0"), "yes no no"),
  "B200": (device("gpu", "NVIDIA B200", "10.0"), "yes no yes"),
  "B300": (device("gpu", "NVIDIA B300", "10.3"), "yes no yes"),
  "RTX 5090": (device("gpu", "NVIDIA GeForce RTX 5090", "12.0"), "yes no yes"),
  "MI250": (device("gpu", "AMD Instinct MI250X", "gfx90a"), "no no no"),
  "MI300": (device("gpu", "AMD Instinct MI300X", "gfx942"), "no yes no"),
  "MI300 with features": (device("rocm", "AMD Instinct MI300X", "gfx942:sramecc+:xnack-"), "no yes no"),
  "MI350": (device("gpu", "AMD Instinct MI355X", "gfx950"), "yes no no"),
  "RX 7900": (device("gpu", "AMD Radeon RX 7900 XTX", "gfx1100"), "no no no"),
  "RX 9070": (device("gpu", "AMD Radeon RX 9070", "gfx1201"), "yes no no"),
  "TPU v2": (device("tpu", "TPU v2"), "no no no"),
  "TPU v4": (device("tpu", "TPU v4"), "no no no"),
  "TPU v5e": (device("tpu", "TPU v5 lite"), "no no no"),
  "TPU v5p": (device("tpu", "TPU v5p"), "no no no"),
  "TPU v6e": (device("tpu", "TPU v6 lite"), "no no no"),
  "TPU v7": (device("tpu", "TPU7x"), "yes no no"),
  "Metal": (device("METAL", "Apple M3"), "no no no"),
  "unknown": (device("neuron", "trn2"), "no no no"),
}
RECIPES = {"current": "current", "FNUZ": {"recipe": "current", **FNUZ}, "mx": "mx"}


# Device, recipe, and what is said of a device without.
LACKS = [
  ("cpu", "current", "cpu has no FP8 units"),
  ("A100", "current", "8.0.*no FP8 units: they start with 8.9"),
  ("H100", "mx", r"MXFP8.*starts with compute capability 10\.0"),
  ("H100", "FNUZ", "no FNUZ formats: use e4m3fn and e5m2"),
  ("MI300", "current", "gfx942.*use e4m3fnuz and e5m2fnuz"),
  ("MI350", "FNUZ", "gfx950.*use e4m3fn and e5m2"),
  ("MI250", "current", "gfx90a.*no FP8 units"),
  ("TPU v6e", "current", "TPU v6 lite has no FP8 units"),
  ("TPU v7", "FNUZ", "TPU7x has no FNUZ formats"),
  ("unknown", "current", "trn2.*unknown"),
]


def test_devices():
  for name, (made, answers) in DEVICES.items():
    for recipe, answer in zip(RECIPES, answers.split(), strict=True):
      has_units, lack = fp8_units(parse_recipe(RECIPES[recipe]), made)
      assert has_units is (answer == "yes"), (name, recipe)
      assert lack == "" if has_units else lack.startswith(made.device_kind), (name, recipe)
    # Scaling by tensor needs the same units.
    assert fp8_units(parse_recipe("delayed"), made) == fp8_units(parse_recipe("current"), made)
  for name, recipe, words in LACKS:
    assert re.search(words, fp8_units(parse_recipe(RECIPES[recipe]), DEVICES[name][0])[1]), name


def test_the_first_device_is_asked_of_if_none_is_named():
  assert fp8_units(parse_recipe("current")) == fp8_units(parse_recipe("current"), jax.devices()[0])
