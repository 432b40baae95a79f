"""The scaling of FP8 products: recipes, scales, delayed state, and devices. Independent of the products."""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.fp8._delayed import (
  check_state as check_state,
  empty_state as empty_state,
  grow_gradients as grow_gradients,
  open_state as open_state,
)
from mpjax.fp8._hardware import (
  in_force as in_force,
  lacks as lacks,
  matrix_units_of as matrix_units_of,
  on_device as on_device,
  on_units as on_units,
  slowness as slowness,
)
from mpjax.fp8._recipe import (
  BLOCKS as BLOCKS,
  FP4 as FP4,
  RECIPES as RECIPES,
  Recipe,
  RecipeLike as RecipeLike,
  parse_recipe as parse_recipe,
)
from mpjax.fp8._scaling import (
  amax_of as amax_of,
  as_stored as as_stored,
  keep_in_fp8 as keep_in_fp8,
  not_differentiable as not_differentiable,
  quantise as quantise,
  scale_of as scale_of,
)

__all__ = ["Recipe"]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
