"""The `autocast` transform: which operation of a JAX function runs in which dtype, and why.

A call passes through these files: `_trace.py` traces the function, `_program.py` finds the facts about it,
`_decide.py` decides about all of it and returns a frozen `CastPlan`, and `_emit.py` executes the plan.
`_explain.py` turns the plan into data and tables. Other packages take `plan_of(fun, args, kwargs, policy)`,
walk the nodes of its plan, and `execute` it with a `Tap` that sees values. Names that are not in `__all__`
are for mpjax alone.

The words of these files:

- body: a jaxpr, of the whole program or of a call in it. Facts about it are found by the calls around it.
- source: where a value comes from: arguments, constants or positions, behind a layer or not.
- reads: the uses of a value in half precision and in float32, and what follows it up to the next product.
- node: an operation with the decision about it; a plan has those of a body.
- held: the dtype in which autocast has a value, and its kind, which decides where it meets others.
- wide: a value that may be outside the range of half precision.
- exact: a product that keeps float32 operands.
- original: the float32 value that an operand was rounded from. Its gradient is computed in float32.
- island: float32 operations whose inputs are kept for the backward pass, which computes the inside again.
- fenced: an island whose inputs the backward pass reads through an optimisation barrier.
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
