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
from mpjax.loss_scale._finite import all_finite
from mpjax.loss_scale._layerwise import LayerwiseLossScale, Scaled, layerwise_loss_scale
from mpjax.loss_scale._monitor import loss_scale_metrics, nonfinite_leaves
from mpjax.loss_scale._overwritten import apply_updates
from mpjax.loss_scale._own_loops import gradient_norm, keep_if_finite, value_and_grad
from mpjax.loss_scale._state_access import get_loss_scale, scale_loss
from mpjax.loss_scale._transform import (
  LossScaleState,
  dynamic_loss_scale,
  static_loss_scale,
  with_loss_scaling,
)
from mpjax.policy import LossScaling

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
