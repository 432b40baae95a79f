"""`make_train_step`: one jitted training step with a policy applied, on one device or a mesh."""

from mpjax.step._train_state import TrainState
from mpjax.step._train_step import TrainStep, make_train_step

__all__ = [
  "TrainState",
  "TrainStep",
  "make_train_step",
]
