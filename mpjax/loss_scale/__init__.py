"""Loss scaling as optax transforms: the scale and the skip live in the optimiser's state."""

from mpjax.loss_scale.access import get_loss_scale, scale_loss
from mpjax.loss_scale.finite import all_finite
from mpjax.loss_scale.transform import LossScaleState, dynamic_loss_scale, static_loss_scale

__all__ = [
  "LossScaleState",
  "all_finite",
  "dynamic_loss_scale",
  "get_loss_scale",
  "scale_loss",
  "static_loss_scale",
]
