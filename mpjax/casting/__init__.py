"""The `autocast` transform: which operation of a JAX function runs in which dtype, and why.

A call passes through these files: `_trace.py` traces the function, `_decide.py` decides about all of it and
returns a frozen `CastPlan`, and `_emit.py` executes the plan. `_explain.py` turns the plan into data and
tables. mpjax code that inspects values, such as `mpjax.numerics`, passes a `Tap` to `_emit.execute`.
"""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.casting._autocast import autocast, full_precision
from mpjax.casting._casting_rules import OpLists
from mpjax.casting._explain import (
  ExplainedCarry,
  ExplainedGather,
  ExplainedIsland,
  ExplainedOperation,
  Explanation,
  explain,
  explain_as_run,
)
from mpjax.casting._fp8_state import init_fp8_state
from mpjax.casting._half_precision import as_its_module as as_its_module, half_precision

__all__ = [
  "ExplainedCarry",
  "ExplainedGather",
  "ExplainedIsland",
  "ExplainedOperation",
  "Explanation",
  "OpLists",
  "autocast",
  "explain",
  "explain_as_run",
  "full_precision",
  "half_precision",
  "init_fp8_state",
]

if not TYPE_CHECKING:

  def __getattr__(name):
    raise missing(__name__, name)
