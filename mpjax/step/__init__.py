"""`make_train_step`: one jitted training step with a policy applied, on one device or a mesh."""

from mpjax.step._layout import GATHERS, Layout
from mpjax.step._loss import GradientPass, LossOutput, StepLoss, Transform
from mpjax.step._make_train_step import make_train_step
from mpjax.step._options import StepOptions
from mpjax.step._train_state import TrainState
from mpjax.step._train_step import TrainStep

__all__ = [
  "GATHERS",
  "GradientPass",
  "Layout",
  "LossOutput",
  "StepLoss",
  "StepOptions",
  "TrainState",
  "TrainStep",
  "Transform",
  "make_train_step",
]
