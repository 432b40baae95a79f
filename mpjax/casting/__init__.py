"""The `autocast` transform: which operation of a JAX function runs in which dtype, and why."""

from mpjax.casting._autocast import autocast, full_precision
from mpjax.casting._explain import Explanation, explain
from mpjax.casting._fp8_state import init_fp8_state
from mpjax.casting._op_lists import OpLists

__all__ = [
  "Explanation",
  "OpLists",
  "autocast",
  "explain",
  "full_precision",
  "init_fp8_state",
]
