"""Mixed-precision policies for JAX: loss scaling, casting and training from one policy.

```python
loss = mpjax.autocast(loss_fn, "bf16")  # products in bfloat16, the rest in float32
step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy="fp16")  # with loss scaling
result = mpjax.train.run("gpt_stdlib", ["policy=bf16", "train.steps=20"])  # what `mpjax train` does
```
"""

import importlib
from typing import TYPE_CHECKING, Any

from mpjax._average import Average
from mpjax._version import __version__ as __version__
from mpjax.casting import OpLists, autocast, explain, full_precision, half_precision, init_fp8_state
from mpjax.dtypes import cast_floating
from mpjax.loss_scale import (
  LossScaleState,
  LossScaling,
  all_finite,
  apply_updates,
  dynamic_loss_scale,
  get_loss_scale,
  keep_if_finite,
  scale_loss,
  static_loss_scale,
  value_and_grad,
  with_loss_scaling,
)
from mpjax.ops import linear_cross_entropy
from mpjax.optim import (
  master_weights,
  quantized_state,
  stochastic_round,
)
from mpjax.policy import Policy, PrecisionWarning, get_policy
from mpjax.products import fp8_dot_general
from mpjax.sharding import batch_axes
from mpjax.step import TrainState, TrainStep, make_train_step

if TYPE_CHECKING:
  from mpjax import formats as formats
  from mpjax import numerics as numerics
  from mpjax import train as train
  from mpjax.numerics import (
    NonfiniteReport,
    NumericsReport,
    find_nonfinite,
    inspect_numerics,
  )
  from mpjax.planner import Plan, cheapest, largest_batch, plan
  from mpjax.tuning import TuneResult, tune

__all__ = [
  "Average",
  "LossScaleState",
  "LossScaling",
  "NonfiniteReport",
  "NumericsReport",
  "OpLists",
  "Plan",
  "Policy",
  "PrecisionWarning",
  "TrainState",
  "TrainStep",
  "TuneResult",
  "all_finite",
  "apply_updates",
  "autocast",
  "batch_axes",
  "cast_floating",
  "cheapest",
  "dynamic_loss_scale",
  "explain",
  "find_nonfinite",
  "fp8_dot_general",
  "full_precision",
  "get_loss_scale",
  "get_policy",
  "half_precision",
  "init_fp8_state",
  "inspect_numerics",
  "keep_if_finite",
  "largest_batch",
  "linear_cross_entropy",
  "make_train_step",
  "master_weights",
  "plan",
  "quantized_state",
  "scale_loss",
  "static_loss_scale",
  "stochastic_round",
  "tune",
  "value_and_grad",
  "with_loss_scaling",
]

# What a program that trains does not need is imported when it is asked for.
_LATER = {
  "train": "mpjax.train",
  "numerics": "mpjax.numerics",
  "formats": "mpjax.formats",
  "NonfiniteReport": "mpjax.numerics",
  "find_nonfinite": "mpjax.numerics",
  "inspect_numerics": "mpjax.numerics",
  "NumericsReport": "mpjax.numerics",
  "plan": "mpjax.planner",
  "Plan": "mpjax.planner",
  "cheapest": "mpjax.planner",
  "largest_batch": "mpjax.planner",
  "TuneResult": "mpjax.tuning",
  "tune": "mpjax.tuning",
}

# Names that are public in a package alone, and what to write for the names of other libraries.
_BELOW = {
  "loss_scale": "layerwise_loss_scale scaled_region track_skips skip_report scale_history loss_scale_metrics "
  "gradient_norm nonfinite_leaves check_loss_scaling import_loss_scale export_loss_scale",
  "optim": "quantize_state dequantize_state split_master_weights merge_master_weights",
  "numerics": "compare_fp8_recipes significant_digits logprob_mismatch SignificantDigits LogprobMismatch",
}
_ELSEWHERE = {
  **dict.fromkeys(
    ("GradScaler", "DynamicLossScale", "LossScaleOptimizer", "DynamicScale"),
    "the loss scale is part of the optimizer: tx = mpjax.dynamic_loss_scale(tx), and "
    "loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)",
  ),
  "StaticLossScale": "tx = mpjax.static_loss_scale(tx, 1024.0)",
  "NoOpLossScale": "leave it out: mpjax.value_and_grad serves an optimizer without a loss scale, too",
  **dict.fromkeys(
    ("cast_to_compute", "cast_to_param", "cast_to_output"), "mpjax.get_policy('bf16').cast_to_compute(tree)"
  ),
  **dict.fromkeys(
    ("mixed_precision", "set_global_policy", "set_policy", "initialize", "amp"),
    "no policy is global: wrap the function, loss = mpjax.autocast(loss_fn, 'bf16'), or the whole step, "
    "step = mpjax.make_train_step(loss_fn, tx, policy='bf16')",
  ),
  **dict.fromkeys(
    ("filter_grad", "filter_value_and_grad"),
    "mpjax.value_and_grad(loss_fn, opt_state), or mpjax.make_train_step, which takes Equinox modules",
  ),
  "quantize_state": "an optimizer whose state is kept in 8 bits is mpjax.quantized_state(tx, 'int8')",
  "half": "mpjax.half_precision(f), a region that runs in half precision, or mpjax.get_policy('half')",
  "select_tree": "mpjax.keep_if_finite(opt_state, new, old)",
  "is_finite": "mpjax.all_finite(tree)",
}


def __getattr__(name: str) -> Any:
  if name not in _LATER:
    package = next((package for package, names in _BELOW.items() if name in names.split()), None)
    place = f": it is mpjax.{package}.{name}" if package else ""
    instead = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else ""
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}{place}{instead}")
  module = importlib.import_module(_LATER[name])
  value = module if _LATER[name] == f"mpjax.{name}" else getattr(module, name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*__all__, *_LATER, "__version__"})
