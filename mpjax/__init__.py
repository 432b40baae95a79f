"""Mixed-precision policies for JAX: loss scaling, casting and training from one policy."""

from mpjax.loss_scale import (
  LossScaleState,
  all_finite,
  dynamic_loss_scale,
  get_loss_scale,
  scale_loss,
  static_loss_scale,
)
from mpjax.policy import LossScaling, Policy, cast_floating, get_policy
from mpjax.step import TrainState, TrainStep, make_train_step

__version__ = "0.1.0"

__all__ = [
  "LossScaleState",
  "LossScaling",
  "Policy",
  "TrainState",
  "TrainStep",
  "all_finite",
  "cast_floating",
  "dynamic_loss_scale",
  "get_loss_scale",
  "get_policy",
  "make_train_step",
  "scale_loss",
  "static_loss_scale",
]
