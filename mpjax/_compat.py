"""The one place that knows which JAX runs and how mpjax is installed."""

from __future__ import annotations

import importlib.resources
import pathlib
from importlib.resources.abc import Traversable


def preset_dir() -> Traversable:
  """The folder of policy presets: inside an installed wheel, or `configs/policies` in a checkout."""
  inside = importlib.resources.files("mpjax").joinpath("presets")
  return inside if inside.is_dir() else pathlib.Path(__file__).parent.parent / "configs" / "policies"
