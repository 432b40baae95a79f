"""Mixed-precision policies for JAX: loss scaling, casting and training from one policy."""

import importlib
from typing import TYPE_CHECKING, Any

from mpjax.casting.autocast import autocast, full_precision, init_fp8_state
from mpjax.casting.explain import explain
from mpjax.casting.op_lists import OpLists
from mpjax.fp8.product import fp8_dot_general
from mpjax.loss_scale import (
  LossScaleState,
  LossScaling,
  all_finite,
  apply_updates,
  check_loss_scaling,
  dynamic_loss_scale,
  export_loss_scale,
  get_loss_scale,
  import_loss_scale,
  layerwise_loss_scale,
  loss_scale_metrics,
  nonfinite_leaves,
  scale_history,
  scale_loss,
  scaled_region,
  skip_report,
  static_loss_scale,
  track_skips,
  with_loss_scaling,
)
from mpjax.policy import Policy, cast_floating, get_policy
from mpjax.sharding.mesh import batch_axes
from mpjax.step import TrainState, TrainStep, make_train_step

if TYPE_CHECKING:
  from mpjax.numerics.hunt import NonfiniteReport, find_nonfinite
  from mpjax.numerics.inspection import inspect_numerics
  from mpjax.numerics.report import NumericsReport
  from mpjax.planner.plan import plan
  from mpjax.planner.results import Plan
  from mpjax.planner.search import cheapest, largest_batch

__version__ = "0.1.0"

__all__ = [
  "LossScaleState",
  "LossScaling",
  "NonfiniteReport",
  "NumericsReport",
  "OpLists",
  "Plan",
  "Policy",
  "TrainState",
  "TrainStep",
  "all_finite",
  "apply_updates",
  "autocast",
  "batch_axes",
  "cast_floating",
  "cheapest",
  "check_loss_scaling",
  "dynamic_loss_scale",
  "explain",
  "export_loss_scale",
  "find_nonfinite",
  "fp8_dot_general",
  "full_precision",
  "get_loss_scale",
  "get_policy",
  "import_loss_scale",
  "init_fp8_state",
  "inspect_numerics",
  "largest_batch",
  "layerwise_loss_scale",
  "loss_scale_metrics",
  "make_train_step",
  "nonfinite_leaves",
  "plan",
  "scale_history",
  "scale_loss",
  "scaled_region",
  "skip_report",
  "static_loss_scale",
  "track_skips",
  "with_loss_scaling",
]

# What a program that trains does not need is imported when it is asked for.
_LATER = {
  "formats": "mpjax.formats",
  "NonfiniteReport": "mpjax.numerics.hunt",
  "find_nonfinite": "mpjax.numerics.hunt",
  "inspect_numerics": "mpjax.numerics.inspection",
  "NumericsReport": "mpjax.numerics.report",
  "plan": "mpjax.planner.plan",
  "Plan": "mpjax.planner.results",
  "cheapest": "mpjax.planner.search",
  "largest_batch": "mpjax.planner.search",
}


def __getattr__(name: str) -> Any:
  if name not in _LATER:
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}")
  module = importlib.import_module(_LATER[name])
  value = getattr(module, name, module)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*globals(), *__all__})
