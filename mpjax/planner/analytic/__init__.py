"""Memory, matrix products and the shortest possible time of a program, from its jaxpr alone."""

from mpjax.planner.analytic._divided_weights import DividedWeights
from mpjax.planner.analytic._graph import Graph, make_graph
from mpjax.planner.analytic._memory import analytic_memory, host_memory
from mpjax.planner.analytic._products import list_products, model_flops, serving_dtype, stated_collectives
from mpjax.planner.analytic._stored import stored_program
from mpjax.planner.analytic._time_floor import time_floor

__all__ = [
  "DividedWeights",
  "Graph",
  "analytic_memory",
  "host_memory",
  "list_products",
  "make_graph",
  "model_flops",
  "serving_dtype",
  "stated_collectives",
  "stored_program",
  "time_floor",
]
