"""Memory, matrix products and the shortest possible time of a program, from its jaxpr alone."""

from mpjax.planner.analytic._graph import Graph, make_graph
from mpjax.planner.analytic._memory import analytic_memory, host_memory, table_bytes
from mpjax.planner.analytic._products import (
  list_kernels,
  list_products,
  model_flops,
  padding_advice,
  serving_dtype,
)
from mpjax.planner.analytic._stated_collectives import stated_collectives
from mpjax.planner.analytic._time_floor import time_floor

__all__ = [
  "Graph",
  "analytic_memory",
  "host_memory",
  "list_kernels",
  "list_products",
  "make_graph",
  "model_flops",
  "padding_advice",
  "serving_dtype",
  "stated_collectives",
  "table_bytes",
  "time_floor",
]
