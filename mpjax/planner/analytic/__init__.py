"""A traced program as buffers and operations, and what follows from it without a compiler."""

from mpjax.planner.analytic._divided_weights import DividedWeights
from mpjax.planner.analytic._from_jaxpr import from_jaxpr
from mpjax.planner.analytic._memory import analytic_memory, host_memory
from mpjax.planner.analytic._products import list_products, model_flops, serving_dtype
from mpjax.planner.analytic._stored import is_heavy, stored_program
from mpjax.planner.analytic._time_floor import time_floor

__all__ = [
  "DividedWeights",
  "analytic_memory",
  "from_jaxpr",
  "host_memory",
  "is_heavy",
  "list_products",
  "model_flops",
  "serving_dtype",
  "stored_program",
  "time_floor",
]
