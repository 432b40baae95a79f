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
  check_loss_scaling,
  dynamic_loss_scale,
  export_loss_scale,
  get_loss_scale,
  import_loss_scale,
  keep_if_finite,
  layerwise_loss_scale,
  loss_scale_metrics,
  nonfinite_leaves,
  scale_history,
  scale_loss,
  scaled_region,
  skip_report,
  static_loss_scale,
  track_skips,
  value_and_grad,
  with_loss_scaling,
)
from mpjax.ops import linear_cross_entropy
from mpjax.optim import (
  dequantize_state,
  master_weights,
  merge_master_weights,
  quantize_state,
  quantized_state,
  split_master_weights,
  stochastic_round,
)
from mpjax.policy import Policy, PrecisionWarning, get_policy
from mpjax.products import fp8_dot_general
from mpjax.sharding import batch_axes
from mpjax.step import TrainState, TrainStep, make_train_step

if TYPE_CHECKING:
  from mpjax import formats as formats
  from mpjax import train as train
  from mpjax.numerics import (
    LogprobMismatch,
    NonfiniteReport,
    NumericsReport,
    SignificantDigits,
    compare_fp8_recipes,
    find_nonfinite,
    inspect_numerics,
    logprob_mismatch,
    significant_digits,
  )
  from mpjax.planner import Plan, cheapest, largest_batch, plan
  from mpjax.tuning import TuneResult, tune

__all__ = [
  "Average",
  "LogprobMismatch",
  "LossScaleState",
  "LossScaling",
  "NonfiniteReport",
  "NumericsReport",
  "OpLists",
  "Plan",
  "Policy",
  "PrecisionWarning",
  "SignificantDigits",
  "TrainState",
  "TrainStep",
  "TuneResult",
  "all_finite",
  "apply_updates",
  "autocast",
  "batch_axes",
  "cast_floating",
  "cheapest",
  "check_loss_scaling",
  "compare_fp8_recipes",
  "dequantize_state",
  "dynamic_loss_scale",
  "explain",
  "export_loss_scale",
  "find_nonfinite",
  "fp8_dot_general",
  "full_precision",
  "get_loss_scale",
  "get_policy",
  "half_precision",
  "import_loss_scale",
  "init_fp8_state",
  "inspect_numerics",
  "keep_if_finite",
  "largest_batch",
  "layerwise_loss_scale",
  "linear_cross_entropy",
  "logprob_mismatch",
  "loss_scale_metrics",
  "make_train_step",
  "master_weights",
  "merge_master_weights",
  "nonfinite_leaves",
  "plan",
  "quantize_state",
  "quantized_state",
  "scale_history",
  "scale_loss",
  "scaled_region",
  "significant_digits",
  "skip_report",
  "split_master_weights",
  "static_loss_scale",
  "stochastic_round",
  "track_skips",
  "tune",
  "value_and_grad",
  "with_loss_scaling",
]

# What a program that trains does not need is imported when it is asked for.
_LATER = {
  "train": "mpjax.train",
  "formats": "mpjax.formats",
  "LogprobMismatch": "mpjax.numerics",
  "compare_fp8_recipes": "mpjax.numerics",
  "NonfiniteReport": "mpjax.numerics",
  "find_nonfinite": "mpjax.numerics",
  "inspect_numerics": "mpjax.numerics",
  "logprob_mismatch": "mpjax.numerics",
  "NumericsReport": "mpjax.numerics",
  "SignificantDigits": "mpjax.numerics",
  "significant_digits": "mpjax.numerics",
  "plan": "mpjax.planner",
  "Plan": "mpjax.planner",
  "cheapest": "mpjax.planner",
  "largest_batch": "mpjax.planner",
  "TuneResult": "mpjax.tuning",
  "tune": "mpjax.tuning",
}


def __getattr__(name: str) -> Any:
  if name not in _LATER:
    raise AttributeError(f"module 'mpjax' has no attribute {name!r}")
  module = importlib.import_module(_LATER[name])
  value = module if _LATER[name] == f"mpjax.{name}" else getattr(module, name)
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted({*__all__, *_LATER, "__version__"})
