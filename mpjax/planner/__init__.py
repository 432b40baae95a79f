"""`plan`: what a policy costs on a device, from the traced program and from the device's compiler."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpjax._gone import missing as _missing
from mpjax.planner._arguments import tiled_bytes
from mpjax.planner._fits import Fit, cheapest, largest_batch
from mpjax.planner._plan import plan
from mpjax.planner._report import Plan
from mpjax.planner._results import (
  ARGUMENT_PARTS,
  TIME_PARTS,
  TRANSIENT_PARTS,
  Collective,
  Compiled,
  Floor,
  Memory,
  Note,
  ProductGroup,
  Saved,
  Time,
)
from mpjax.planner._targets import (
  Target,
  device_memory,
  get_target,
  missing,
  policy_on_target,
  presets_of,
  target_names,
)
from mpjax.planner.compiled._compile import CompileError

__all__ = [
  "ARGUMENT_PARTS",
  "TIME_PARTS",
  "TRANSIENT_PARTS",
  "Collective",
  "CompileError",
  "Compiled",
  "Fit",
  "Floor",
  "Memory",
  "Note",
  "Plan",
  "ProductGroup",
  "Saved",
  "Target",
  "Time",
  "cheapest",
  "device_memory",
  "get_target",
  "largest_batch",
  "missing",
  "plan",
  "policy_on_target",
  "presets_of",
  "target_names",
  "tiled_bytes",
]


if not TYPE_CHECKING:

  def __getattr__(name):
    raise _missing(__name__, name)
