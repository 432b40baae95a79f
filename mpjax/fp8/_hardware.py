"""Devices with units for a recipe's products, what other devices lack, and the recipe `auto` on each."""

from __future__ import annotations

import dataclasses
import re

import jax

from mpjax.formats import LOW_PRECISION, fp8_time, runs_on
from mpjax.fp8._recipe import BLOCKS, FP4, Recipe


def lacks(recipe: Recipe, device: jax.Device | None = None) -> str:
  """Returns what a device lacks for a recipe's products, after its name; empty if it has units for them.

  NVIDIA has E4M3FN and E5M2 from compute capability 8.9 (Ada, Hopper), MXFP8 and NVFP4 from 10.0 (Blackwell).
  AMD has the FNUZ formats on gfx94x (MI300) and the others on gfx95x (MI350). TPU v5 and v6 have E4M3B11FNUZ
  and E5M2, TPUs from v7 on E4M3FN and E5M2.

  Args:
    recipe: the recipe; `auto` stands for what it is on the device.
    device: a `jax.Device`; `None`: the first of the default backend.
  """
  device = device or jax.devices()[0]
  kind, units = device.device_kind, matrix_units_of(device)
  recipe = on_units(recipe, units)
  if units not in LOW_PRECISION:
    return f"{kind} {_without(device)}"
  blocks, name = {"mx": ("mxfp8", "MXFP8"), "nvfp4": ("nvfp4", "NVFP4")}.get(recipe.recipe, ("", ""))
  if blocks and not runs_on(units, blocks):
    return (
      f"{kind} multiplies no blocks of {BLOCKS[recipe.recipe]} with a scale each ({name}): that starts with "
      "NVIDIA's compute capability 10.0"
    )
  formats = dict.fromkeys((recipe.forward_dtype, recipe.gradient_dtype))
  if lacking := [x for x in formats if x != FP4 and not runs_on(units, x)]:
    own = LOW_PRECISION[units]
    use = f"{own.forward_dtype} and {own.gradient_dtype}"
    return f"{kind} has no units for {' and '.join(lacking)}: use {use}, or recipe: auto"
  return ""


def _without(device: jax.Device) -> str:
  """Returns what a device without FP8 units lacks, after its name."""
  if device.platform == "tpu":
    return "has no FP8 units: they start with TPU v5"
  if device.platform == "cpu":
    return "has no FP8 units"
  capability = str(getattr(device, "compute_capability", "")) or "unknown"
  if capability.startswith("gfx"):
    return f"({capability}) has no FP8 units"
  return f"(compute capability {capability}) has no FP8 units: they start with 8.9"


def matrix_units_of(device: jax.Device) -> str:
  """Returns the row of `mpjax.formats.MATRIX_UNITS` for a device; empty for an unknown one."""
  if device.platform == "tpu":
    generation = re.search(r"\d+", device.device_kind)
    number = int(generation.group()) if generation else 0
    return "tpu" if number < 5 else {5: "tpu_v5", 6: "tpu_v6"}.get(number, "tpu_v7")
  capability = str(getattr(device, "compute_capability", ""))
  for prefix, units in {"gfx94": "cdna3", "gfx95": "cdna4", "gfx12": "cdna4"}.items():
    if capability.startswith(prefix):
      return units
  version = re.match(r"(\d+)\.(\d+)", capability)
  if device.platform == "cpu" or version is None:
    return "cpu" if device.platform == "cpu" else ""
  found = (int(version[1]), int(version[2]))
  starts = {(10, 0): "blackwell", (9, 0): "hopper", (8, 9): "ada", (8, 0): "ampere", (7, 5): "turing"}
  return next((units for first, units in starts.items() if found >= first), "volta")


def on_units(recipe: Recipe, units: str) -> Recipe:
  """Returns what a recipe is on a kind of matrix units: `auto` becomes theirs, others stay.

  Fields that only recipes with a scale for each tensor have make it `current`. Without low-precision units it
  is `current` in E4M3FN and E5M2.
  """
  if recipe.recipe != "auto":
    return recipe
  own = LOW_PRECISION.get(units)
  if own is None or recipe.forward_dtype:
    return dataclasses.replace(recipe, recipe="current")
  for_tensors = recipe.margin or recipe.saved_activations != "compute"
  kind = "current" if for_tensors else own.recipe
  gradient = recipe.gradient_dtype or (own.gradient_dtype if kind == own.recipe else "")
  return dataclasses.replace(recipe, recipe=kind, forward_dtype=own.forward_dtype, gradient_dtype=gradient)


def in_force(recipe: Recipe, device: jax.Device | None = None) -> str:
  """Returns the recipe and the formats in force on a device (see `lacks`), in words.

  `mx scaling, E4M3FN forward, E4M3FN backward, emulated`; `none, ` and the reason where nothing is quantised.
  """
  lack = lacks(recipe, device)
  if lack and not recipe.emulate:
    return f"none, {lack}"
  return str(on_device(recipe, device)) + (", emulated" if lack else "")


def slowness(recipe: Recipe, device: jax.Device | None = None) -> str:
  """Returns `takes 1.13 times as long as bfloat16` if the device's compiler says so of a recipe, else ""."""
  device = device or jax.devices()[0]
  time = fp8_time(device.device_kind, on_device(recipe, device).recipe)
  return f"takes {time:.2f} times as long as bfloat16" if time > 1 else ""


def on_device(recipe: Recipe, device: jax.Device | None = None) -> Recipe:
  """Returns what a recipe is on a device, as `on_units`; `None`: on the first of the default backend."""
  if recipe.recipe != "auto":
    return recipe
  return on_units(recipe, matrix_units_of(device or jax.devices()[0]))
