"""Mixed-precision policies for JAX: loss scaling, casting and training from one policy.

```python
loss = mpjax.autocast(loss_fn, "bf16")  # products in bfloat16, the rest in float32
step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), policy="fp16")  # with loss scaling
```

`mpjax.train` runs configs, as the command `mpjax train` does. Rarer functions are in `mpjax.loss_scale`,
`mpjax.optim`, `mpjax.numerics` and `mpjax.formats`.
"""

import importlib.util
import pkgutil
from typing import TYPE_CHECKING, Any

from mpjax._gone import missing
from mpjax._version import __version__ as __version__

if TYPE_CHECKING:
  from mpjax import (
    formats as formats,
    loss_scale as loss_scale,
    numerics as numerics,
    optim as optim,
    train as train,
  )
  from mpjax._average import Average as Average
  from mpjax.casting import (
    OpLists as OpLists,
    autocast as autocast,
    explain as explain,
    full_precision as full_precision,
    half_precision as half_precision,
    init_fp8_state as init_fp8_state,
  )
  from mpjax.dtypes import cast_floating as cast_floating
  from mpjax.loss_scale import (
    LossScaleState as LossScaleState,
    LossScaling as LossScaling,
    all_finite as all_finite,
    apply_updates as apply_updates,
    dynamic_loss_scale as dynamic_loss_scale,
    get_loss_scale as get_loss_scale,
    keep_if_finite as keep_if_finite,
    scale_loss as scale_loss,
    static_loss_scale as static_loss_scale,
    value_and_grad as value_and_grad,
    with_loss_scaling as with_loss_scaling,
  )
  from mpjax.numerics import (
    NonfiniteReport as NonfiniteReport,
    NumericsReport as NumericsReport,
    find_nonfinite as find_nonfinite,
    inspect_numerics as inspect_numerics,
  )
  from mpjax.ops import linear_cross_entropy as linear_cross_entropy
  from mpjax.optim import (
    master_weights as master_weights,
    quantized_state as quantized_state,
    stochastic_round as stochastic_round,
  )
  from mpjax.planner import Plan as Plan, cheapest as cheapest, largest_batch as largest_batch, plan as plan
  from mpjax.policy import Policy as Policy, PrecisionWarning as PrecisionWarning, get_policy as get_policy
  from mpjax.products import fp8_dot_general as fp8_dot_general, scaled_dot as scaled_dot
  from mpjax.sharding import batch_axes as batch_axes
  from mpjax.step import TrainState as TrainState, TrainStep as TrainStep, make_train_step as make_train_step
  from mpjax.tuning import TuneResult as TuneResult, tune as tune

# The module of each name. `import mpjax` imports none of them: a name is imported when it is first used. So a
# program waits only for what it uses, and `mpjax --help` does not wait for JAX.
_NAMES = {
  "_average": "Average",
  "casting": "OpLists autocast explain full_precision half_precision init_fp8_state",
  "dtypes": "cast_floating",
  "loss_scale": (
    "LossScaleState LossScaling all_finite apply_updates dynamic_loss_scale get_loss_scale "
    "keep_if_finite scale_loss static_loss_scale value_and_grad with_loss_scaling"
  ),
  "ops": "linear_cross_entropy",
  "optim": "master_weights quantized_state stochastic_round",
  "policy": "Policy PrecisionWarning get_policy",
  "products": "fp8_dot_general scaled_dot",
  "sharding": "batch_axes",
  "step": "TrainState TrainStep make_train_step",
  "numerics": "NonfiniteReport NumericsReport find_nonfinite inspect_numerics",
  "planner": "Plan cheapest largest_batch plan",
  "tuning": "TuneResult tune",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
  if name in _MODULE_OF:
    value = getattr(importlib.import_module(f"mpjax.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value
  if not name.startswith("_") and importlib.util.find_spec(f"mpjax.{name}"):
    return importlib.import_module(f"mpjax.{name}")
  raise missing(__name__, name)


def __dir__() -> list[str]:
  packages = {module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_")}
  return sorted({*__all__, *packages, "__version__"})
