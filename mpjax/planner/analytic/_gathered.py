"""Parameters that are gathered over `fsdp` and there at once."""

from __future__ import annotations

from collections.abc import Callable

import jax

from mpjax.jaxpr import Trait, has
from mpjax.planner.analytic._graph import Graph, GraphOperation, GraphValue


def gathered_at_once(graph: Graph, size: Callable[[GraphValue], int]) -> int:
  """Returns the most bytes of gathered parameters that a program holds at one time, in its own order.

  A cast or a view of one is the same parameter.

  Args:
    graph: of the program.
    size: bytes of a value on a device.
  """
  root: dict[int, GraphValue] = {}
  last: dict[int, int] = {}
  for i, operation in enumerate(graph.operations):
    if _is_gather(operation):
      root.update((id(v), v) for v in operation.results)
    for operand in operation.operands:
      if (found := root.get(id(operand))) is not None:
        last[id(found)] = i
        if has(operation.equation, Trait.ALIAS | Trait.CAST):
          root.update((id(v), found) for v in operation.results)
  most = 0
  live: dict[int, int] = {}
  for i, operation in enumerate(graph.operations):
    if _is_gather(operation):
      live.update((id(v), size(v)) for v in operation.results if id(v) in last)
    inside = max((gathered_at_once(body, size) for body in operation.bodies), default=0)
    most = max(most, sum(live.values()) + inside)
    live = {key: nbytes for key, nbytes in live.items() if last[key] > i}
  return most


def _is_gather(operation: GraphOperation) -> bool:
  equation = operation.equation
  return equation.primitive is jax.lax.all_gather_p and "fsdp" in equation.params["axis_name"]
