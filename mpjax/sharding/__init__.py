"""Device meshes, and the sharding of parameters over them. Independent of training steps."""

from mpjax.sharding._host_memory import (
  in_host_memory as in_host_memory,
  in_host_shardings as in_host_shardings,
  lacks_host_memory as lacks_host_memory,
  on_device as on_device,
  to_host as to_host,
)
from mpjax.sharding._mesh import (
  AXES as AXES,
  BATCH_AXES as BATCH_AXES,
  Rows as Rows,
  axes_of_batch as axes_of_batch,
  axis_sizes as axis_sizes,
  batch_axes as batch_axes,
  batch_shards as batch_shards,
  batch_spec as batch_spec,
  check_mesh as check_mesh,
  has_explicit_axes as has_explicit_axes,
  make_mesh as make_mesh,
  place_rows as place_rows,
  rows_of_process as rows_of_process,
  with_axis_types as with_axis_types,
)
from mpjax.sharding._sharding_rules import (
  Dims as Dims,
  RuleDims as RuleDims,
  ShardingRule as ShardingRule,
  ShardingRules as ShardingRules,
  dimension_over as dimension_over,
  is_spec as is_spec,
  keep_axes as keep_axes,
  specs_like as specs_like,
)
