"""Device meshes, and the sharding of parameters over them. Independent of training steps."""

from mpjax.sharding._host_memory import (
  in_host_memory,
  in_host_shardings,
  lacks_host_memory,
  on_device,
  to_host,
)
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
  "in_host_memory",
  "in_host_shardings",
  "is_spec",
  "keep_axes",
  "lacks_host_memory",
  "on_device",
  "specs_like",
  "to_host",
  "with_axis_types",
]
