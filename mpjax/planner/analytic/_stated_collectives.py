"""Collectives in the traced program, as in a step with a mesh; not those that a compiler adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import numpy as np

from mpjax.jaxpr import CallKind, call_kind, facts
from mpjax.planner._results import Collective, Crossing, add_up
from mpjax.planner.analytic._graph import Graph, GraphValue


def stated_collectives(graph: Graph, *, least: bool = False) -> tuple[Collective, ...]:
  """Returns the program's collectives in one step: the bytes of the results on each device.

  Args:
    graph: graph of the step.
    least: count the branch of a conditional that sends least, not the one that sends most.
  """
  return add_up(_crossings(graph, 1, min if least else max))


def _crossings(graph: Graph, times: int, choose: Callable[..., list[Crossing]]) -> list[Crossing]:
  found: list[Crossing] = []
  for operation in graph.operations:
    name = facts(operation.equation).collective
    if name and operation.group > 1:
      group = 0 if name == "collective-permute" else operation.group
      found += [
        Crossing(name, _dtype_name(value), value.nbytes, group, operation.path, times)
        for value in operation.results
      ]
    bodies = [_crossings(body, times * operation.times, choose) for body in operation.bodies]
    if call_kind(operation.equation) is CallKind.COND:
      bodies = [choose(bodies, key=_sent)]
    found += [crossing for body in bodies for crossing in body]
  return found


def _sent(crossings: Iterable[Crossing]) -> float:
  return sum(collective.sent for collective in add_up(crossings))


def _dtype_name(value: GraphValue) -> str:
  """Returns the dtype of the values that move; for PRNG keys, the dtype of their words."""
  is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
  return "uint32" if is_key else np.dtype(value.dtype).name
