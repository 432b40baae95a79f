"""`plan`: what a policy costs on a device, from the traced program and from the device's own compiler."""

from mpjax.planner._plan import plan
from mpjax.planner._results import Plan
from mpjax.planner._search import cheapest, largest_batch
from mpjax.planner._targets import Target, get_target, target_names

__all__ = [
  "Plan",
  "Target",
  "cheapest",
  "get_target",
  "largest_batch",
  "plan",
  "target_names",
]
