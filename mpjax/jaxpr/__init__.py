"""Facts about jaxprs, for all other packages: primitives, scopes, bodies, flow, derivative rules."""

from mpjax._compat import custom_jvp_rule, custom_vjp_rules
from mpjax.jaxpr import _primitive_table as _primitive_table
from mpjax.jaxpr._bodies import (
  CallLayout,
  as_function,
  bodies_of,
  call_layout,
  constants_of,
  default_branch,
  dtype_of,
  equations_in,
  is_variable,
  joined_branches,
  once_for_each,
  open_jaxpr,
  scan_parts,
  shape_of,
  times_run,
  values_read,
  variables_of,
)
from mpjax.jaxpr._flops import flops, taps
from mpjax.jaxpr._flow import Backward, Calls, Facts, Forward, live, live_equations, needed, outputs_of
from mpjax.jaxpr._interpret import (
  Rule,
  bind_again,
  closure_as_argument,
  interpret,
  last_reads,
  where_rows,
  while_loop,
)
from mpjax.jaxpr._primitives import (
  UNKNOWN,
  CallKind,
  PrimitiveFacts,
  Trait,
  call_kind,
  facts,
  has,
  register,
  register_as,
  rows,
)
from mpjax.jaxpr._scopes import (
  BACKWARD,
  FORWARD,
  FULL_PRECISION,
  HALF_PRECISION,
  MARKS,
  OTHER,
  OUTPUT,
  REGION_EDGE,
  as_traced,
  at_region_edge,
  autocast_label,
  autocast_scope,
  backward_depth,
  has_region,
  in_region,
  inside,
  is_library,
  is_recomputation,
  marked_path,
  module_path,
  operation_name,
  parse_scopes,
  phase_of,
  region_mark,
  scopes_inside,
  scopes_of,
  source_line,
  split_scopes,
  transform_place,
  without_marks,
)
from mpjax.patterns import layer_pattern, merged_path
