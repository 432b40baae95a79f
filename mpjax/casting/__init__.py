"""The `autocast` transform: which operation of a JAX function runs in which dtype, and why.

A call passes through these files: `_trace.py` traces the function, `_decide.py` decides about all of it and
returns a frozen `CastPlan`, and `_emit.py` executes the plan. `_explain.py` turns the plan into data and
tables. Other packages take `plan_of(fun, args, kwargs, policy)`, walk the nodes of its plan, and `execute` it
with a `Tap` that sees values. Names that are not in `__all__` are for mpjax alone.
"""

from typing import TYPE_CHECKING

from mpjax._gone import missing
from mpjax.casting._autocast import autocast, full_precision
from mpjax.casting._cast_plan import CastPlan as CastPlan, Mode as Mode, Node as Node, Tap as Tap
from mpjax.casting._casting_rules import (
  ByRules as ByRules,
  CastingRules as CastingRules,
  OpLists,
  Overrides as Overrides,
  make_rules as make_rules,
  require_recompute as require_recompute,
)
from mpjax.casting._explain import (
  ExplainedCarry,
  ExplainedIsland,
  ExplainedOperation,
  Explanation,
  explain,
  explain_as_run,
)
from mpjax.casting._fp8_state import fp8_weights as fp8_weights, init_fp8_state
from mpjax.casting._half_precision import (
  as_its_module as as_its_module,
  float32_where_there_is_one as float32_where_there_is_one,
  half_precision,
)
from mpjax.casting._kinds import castable as castable, is_float as is_float, size as size
from mpjax.casting._nnx_modules import give_scopes as give_scopes
from mpjax.casting._sources import is_layer as is_layer, is_outer as is_outer
from mpjax.casting._trace import Traced as Traced, plan_of as plan_of

__all__ = [
  "ExplainedCarry",
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
