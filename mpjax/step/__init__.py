"""`make_train_step`: one jitted training step with a policy applied, on one device or a mesh."""

from mpjax.step._checks import (
  require_honoured as require_honoured,
  require_state_and_batch as require_state_and_batch,
)
from mpjax.step._collectives import to_reduce as to_reduce
from mpjax.step._layers import (
  can_adopt as can_adopt,
  state_of as state_of,
  unrounded as unrounded,
  with_masters as with_masters,
  with_policy as with_policy,
)
from mpjax.step._layout import GATHERS, Layout
from mpjax.step._loss import (
  KEYWORDS as KEYWORDS,
  Pass,
  StepLoss,
  StepOptions,
  Transform,
  first_of_batch as first_of_batch,
  row_count as row_count,
  row_keys as row_keys,
  split_batch as split_batch,
)
from mpjax.step._make_train_step import make_train_step
from mpjax.step._mesh_step import gathers as gathers
from mpjax.step._optimizer_arguments import with_step_arguments as with_step_arguments
from mpjax.step._train_state import TrainState
from mpjax.step._train_step import TrainStep
from mpjax.step._trained import merged as merged, only as only

# What is imported as itself is for other folders of mpjax, not for users.
__all__ = [
  "GATHERS",
  "Layout",
  "Pass",
  "StepLoss",
  "StepOptions",
  "TrainState",
  "TrainStep",
  "Transform",
  "make_train_step",
]
