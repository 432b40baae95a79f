"""The `autocast` transform: which operation of a JAX function runs in which dtype, and why.

A call goes one way: `_trace.py` traces the function, `_decide.py` decides about all of it and returns a
frozen `CastPlan`, `_explain.py` makes data of that and `_explain_text.py` tables, and `_emit.py` carries it
out. Code of mpjax that looks at values on their way hands `_emit.execute` a `Tap`, as `mpjax.numerics` does.
"""

from mpjax.casting._autocast import autocast, full_precision
from mpjax.casting._explain import Explanation, explain
from mpjax.casting._explain_text import side_by_side
from mpjax.casting._explained import (
  ExplainedCarry,
  ExplainedFragility,
  ExplainedIsland,
  ExplainedOperation,
)
from mpjax.casting._fp8_state import init_fp8_state
from mpjax.casting._half_precision import half_precision
from mpjax.casting._kernels import register_kernel
from mpjax.casting._op_lists import OpLists

__all__ = [
  "ExplainedCarry",
  "ExplainedFragility",
  "ExplainedIsland",
  "ExplainedOperation",
  "Explanation",
  "OpLists",
  "autocast",
  "explain",
  "full_precision",
  "half_precision",
  "init_fp8_state",
  "register_kernel",
  "side_by_side",
]
