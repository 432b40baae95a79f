"""The shortest time that a step can take at the published peak rates of a target."""

from __future__ import annotations

from collections.abc import Sequence

from mpjax.jaxpr import Trait, has
from mpjax.planner._arguments import Argument
from mpjax.planner._results import ARGUMENT_PARTS, Collective, Floor, Memory
from mpjax.planner._targets import Target
from mpjax.planner.analytic._graph import Graph, GraphOperation
from mpjax.planner.analytic._memory import device_sizes
from mpjax.planner.analytic._products import units_of


def time_floor(
  graph: Graph,
  arguments: Sequence[Argument],
  memory: Memory,
  collectives: Sequence[Collective],
  target: Target,
  devices: int,
) -> Floor | None:
  """Returns the shortest time of a step, or `None` if the target has no published peak rates.

  Every step reads its state and its batch from memory, and writes its results there. Only activations that
  wait for the backward pass may stay in a cache instead.

  Args:
    graph: graph of the step.
    arguments: the leaves of its arguments.
    memory: memory of the step, the compiler's if there is one.
    collectives: the collectives of the step.
    target: the target with the peak rates.
    devices: number of devices that share the work.
  """
  if not target.flops or not target.bandwidth:
    return None
  state = sum(memory.parts.get(name, 0) for name in ARGUMENT_PARTS)
  state += _written_bytes(graph, arguments, target.kind)
  touched = state + 2 * memory.saved_bytes
  moved = state + 2 * max(0, memory.saved_bytes - target.cache)
  parts = {
    "matrix units": _seconds_on_units(graph, target, devices),
    "memory": moved / target.bandwidth,
  }
  if collectives and target.interconnect and devices > 1:
    parts["interconnect"] = sum(c.sent for c in collectives) / target.interconnect
  bound = max(parts, key=lambda name: parts[name])
  return Floor(parts[bound], parts, bound, moved, touched, target.cache)


def _seconds_on_units(graph: Graph, target: Target, devices: int) -> float:
  """Returns the seconds of all products at the target's published peak rates.

  Kernels are left out. A kernel may state more FLOPs than it runs: the masked half of causal attention.
  """
  total = 0.0
  for operation, times in graph.every_operation(least=True):
    if operation.flops and not has(operation.equation, Trait.KERNEL):
      total += operation.flops_on(devices) * times / _rate(operation, target)
  return total


def _rate(operation: GraphOperation, target: Target) -> float:
  """Returns the published peak rate, in FLOP/s, for the dtype in which a target multiplies, by its passes."""
  dtype, passes = units_of(operation, target)
  return target.unit_rate(dtype)[1] / passes


def _written_bytes(graph: Graph, arguments: Sequence[Argument], kind: str) -> int:
  """Returns the bytes, on one device, of the results that are not unchanged arguments."""
  sizes = device_sizes(arguments, kind)
  results = {id(value): value for value in graph.results}.values()
  return sum(sizes.of(value) for value in results if value.argument is None)
