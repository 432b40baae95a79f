"""Devices that multiply FP8 in hardware, and what other devices lack."""

from __future__ import annotations

import re

import jax

from mpjax.fp8._recipe import Recipe

_NO_BLOCKS = "multiplies no blocks of 32 with a scale each (MXFP8): that starts with compute capability 10.0"


def fp8_units(recipe: Recipe, device: jax.Device | None = None) -> tuple[bool, str]:
  """Returns whether a device has units for a recipe's products, and if not, what it lacks.

  NVIDIA has E4M3FN and E5M2 from compute capability 8.9 (Ada, Hopper) and MXFP8 from 10.0 (Blackwell). AMD
  has the FNUZ formats on gfx94x (MI300) and the others on gfx95x (MI350). TPUs have
  E4M3FN and E5M2 from v7. TPU v5 and v6 have units for E4M3B11FNUZ and E5M2, which no recipe uses.

  Args:
    recipe: the recipe.
    device: a `jax.Device`; `None`: the first of the default backend.

  Returns:
    (whether, why not); the reason starts with the device's name.
  """
  device = jax.devices()[0] if device is None else device
  kind, block = device.device_kind, recipe.recipe == "block"
  fnuz = recipe.forward_dtype.endswith("fnuz")
  if device.platform == "cpu":
    return False, "cpu has no FP8 units"
  if device.platform == "tpu":
    generation = re.search(r"\d+", kind)
    if generation is None or int(generation.group()) < 7:
      return False, f"{kind} has no FP8 units for the recipe's formats: they start with TPU v7"
    if block or fnuz:
      return False, f"{kind} " + (_NO_BLOCKS if block else "has no FNUZ formats: use e4m3fn and e5m2")
    return True, ""
  capability = str(getattr(device, "compute_capability", ""))
  if capability.startswith("gfx"):
    return _amd(kind, capability, fnuz, block)
  version = re.match(r"(\d+)\.(\d+)", capability)
  major, minor = map(int, version.groups()) if version else (0, 0)
  if (major, minor) < (8, 9):
    return (
      False,
      f"{kind} (compute capability {capability or 'unknown'}) has no FP8 units: they start with 8.9",
    )
  if fnuz:
    return False, f"{kind} has no FNUZ formats: use e4m3fn and e5m2"
  if block and major < 10:
    return False, f"{kind} (compute capability {capability}) {_NO_BLOCKS}"
  return True, ""


def _amd(kind: str, capability: str, fnuz: bool, block: bool) -> tuple[bool, str]:
  if not capability.startswith(("gfx94", "gfx95", "gfx12")):
    return False, f"{kind} ({capability}) has no FP8 units"
  if fnuz != capability.startswith("gfx94"):
    right = "e4m3fnuz and e5m2fnuz" if capability.startswith("gfx94") else "e4m3fn and e5m2"
    return False, f"{kind} ({capability}) has other FP8 formats: use {right}"
  if block:
    return False, f"{kind} {_NO_BLOCKS}"
  return True, ""
