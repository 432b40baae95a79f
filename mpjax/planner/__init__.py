"""`plan`: what a policy costs on a device, from the traced program and from the device's compiler."""

from mpjax.planner._array_bytes import tiled_bytes
from mpjax.planner._fits import Fit, cheapest, largest_batch
from mpjax.planner._plan import Plan, plan
from mpjax.planner._results import (
  ARGUMENT_PARTS,
  TIME_PARTS,
  TRANSIENT_PARTS,
  Collective,
  Compiled,
  Floor,
  KernelGroup,
  Memory,
  PlanFigures,
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
from mpjax.planner.compiled import CompileError

__all__ = [
  "ARGUMENT_PARTS",
  "TIME_PARTS",
  "TRANSIENT_PARTS",
  "Collective",
  "CompileError",
  "Compiled",
  "Fit",
  "Floor",
  "KernelGroup",
  "Memory",
  "Plan",
  "PlanFigures",
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
