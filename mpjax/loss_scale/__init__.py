"""Loss scaling as optax transforms: the scale and the skip are in the optimiser's state.

```python
tx = mpjax.dynamic_loss_scale(optax.adamw(1e-3))
loss, grads = mpjax.value_and_grad(loss_fn, tx.init(params))(params, batch)
mpjax.loss_scale.check_loss_scaling(tx, params)  # rarer functions are public here
```
"""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.loss_scale._check import check_loss_scaling
from mpjax.loss_scale._guard import (
  StructureError as StructureError,
  alike as alike,
  all_finite,
  is_inexact as is_inexact,
  keep_dtypes as keep_dtypes,
  keep_if as keep_if,
  unscale as unscale,
  updated as updated,
)
from mpjax.loss_scale._layerwise import LayerwiseLossScale, Scaled, layerwise_loss_scale
from mpjax.loss_scale._monitor import NonFinite as NonFinite, loss_scale_metrics, nonfinite_leaves
from mpjax.loss_scale._overwritten import (
  apart as apart,
  apply_updates,
  hide as hide,
  is_overwritten as is_overwritten,
  map_parts as map_parts,
  show as show,
)
from mpjax.loss_scale._own_loops import (
  gradient_norm,
  keep_if_finite,
  unscaled_norm as unscaled_norm,
  value_and_grad,
)
from mpjax.loss_scale._state_access import (
  find_loss_scales as find_loss_scales,
  find_scaler as find_scaler,
  find_states as find_states,
  get_loss_scale,
  refuse_multi_steps_outside as refuse_multi_steps_outside,
  scale_loss,
)
from mpjax.loss_scale._transform import (
  LossScaleState,
  dynamic_loss_scale,
  make_loss_scale as make_loss_scale,
  static_loss_scale,
  with_loss_scaling,
)
from mpjax.policy import LossScaling

# What is imported as itself is for other folders of mpjax, not for users.
__all__ = [
  "LayerwiseLossScale",
  "LossScaleState",
  "LossScaling",
  "Scaled",
  "all_finite",
  "apply_updates",
  "check_loss_scaling",
  "dynamic_loss_scale",
  "get_loss_scale",
  "gradient_norm",
  "keep_if_finite",
  "layerwise_loss_scale",
  "loss_scale_metrics",
  "nonfinite_leaves",
  "scale_loss",
  "static_loss_scale",
  "value_and_grad",
  "with_loss_scaling",
]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
