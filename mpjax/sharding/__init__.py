"""Device meshes, and the sharding of parameters over them. Independent of training steps."""

from mpjax.sharding._mesh import (
  AXES,
  BATCH_AXES,
  axes_of_batch,
  batch_axes,
  batch_shards,
  batch_spec,
  check_mesh,
  has_explicit_axes,
  with_axis_types,
)
from mpjax.sharding._sharding_rules import (
  Dims,
  RuleDims,
  ShardingRule,
  ShardingRules,
  dimension_over,
  is_spec,
  keep_axes,
  specs_like,
)

__all__ = [
  "AXES",
  "BATCH_AXES",
  "Dims",
  "RuleDims",
  "ShardingRule",
  "ShardingRules",
  "axes_of_batch",
  "batch_axes",
  "batch_shards",
  "batch_spec",
  "check_mesh",
  "dimension_over",
  "has_explicit_axes",
  "is_spec",
  "keep_axes",
  "specs_like",
  "with_axis_types",
]
