"""Presets: one YAML file each in this folder, read once; and their names in other libraries."""

from __future__ import annotations

import functools
import importlib.resources
from collections.abc import Mapping
from typing import Any

import yaml

# Other libraries' names for a preset, or a dtype for everything.
ALIASES = {
  # keras.mixed_precision.set_global_policy
  "mixed_bfloat16": "bf16",
  "mixed_float16": "fp16",
  # lightning.Trainer(precision=...)
  "bf16-mixed": "bf16",
  "16-mixed": "fp16",
  "bf16-true": "bf16_pure",
  "16-true": "float16",
  "32-true": "fp32",
}


@functools.cache
def presets() -> tuple[str, ...]:
  """Returns the names of the presets, in alphabetical order."""
  names = (path.name for path in importlib.resources.files(__name__).iterdir())
  return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


@functools.cache
def read_preset(name: str) -> Mapping[str, Any]:
  """Returns a preset's file as data, which must not be changed."""
  return yaml.safe_load(importlib.resources.files(__name__).joinpath(f"{name}.yaml").read_text())
