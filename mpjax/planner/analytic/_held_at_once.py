"""The memory of weights, their copies, gradients and optimiser state, if all are in memory at once."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import jax

from mpjax.jaxpr import BACKWARD, OTHER, Trait, has
from mpjax.planner.analytic._graph import Graph, GraphValue
from mpjax.planner.analytic._liveness import Peak
from mpjax.products import is_fp8

Shape = tuple[int, ...]


def held_at_once(
  graph: Graph, worst: Peak, weights: Sequence[Shape], size: Callable[[GraphValue], int]
) -> dict[str, int]:
  """Returns the bytes of all weight copies made for products, and of all gradients that the update reads.

  A weight that is copied several times counts once. A gradient that is a sum of several counts once.

  Args:
    graph: graph of the step.
    worst: the step's peak, with everything that it stores, in order.
    weights: shapes of the weights.
    size: returns the bytes of a value on a device.
  """
  count = collections.Counter(map(_known_by, weights))
  found = {
    "compute copies": _one_each(_copies(graph, worst, weights, size), count),
    "gradients": _one_each(_gradients(worst), count),
  }
  return {name: nbytes for name, nbytes in found.items() if nbytes}


def from_arguments(value: GraphValue) -> bool:
  """Returns whether a value is a view of one argument, or a cast of it to the same or fewer bits."""
  given = value
  for _ in range(16):
    if value.argument is not None:
      return given.nbytes <= value.nbytes
    if value.maker is None or not has(value.maker.equation, Trait.ALIAS | Trait.CAST):
      return False
    value = value.maker.operands[0]
  return False


def _known_by(shape: Shape) -> Shape:
  """Returns a key that a shape shares with its transposed forms."""
  return tuple(sorted(shape))


def _one_each(found: Sequence[tuple[Shape, int]], count: collections.Counter[Shape]) -> int:
  """Returns the bytes of the largest values of each shape, as many as there are weights of that shape."""
  by_shape: dict[Shape, list[int]] = {}
  for shape, nbytes in found:
    by_shape.setdefault(_known_by(shape), []).append(nbytes)
  return sum(sum(sorted(sizes)[-count[shape] :]) for shape, sizes in by_shape.items() if count[shape])


def _copies(
  graph: Graph, worst: Peak, weights: Sequence[Shape], size: Callable[[GraphValue], int]
) -> list[tuple[Shape, int]]:
  found = []
  for step in worst.order:
    for value in step.writes:
      if step.operation.phase != BACKWARD and from_arguments(value):
        found.append((value.shape, worst.size(value)))
    if is_fp8(step.operation.equation) and step.operation.phase != BACKWARD:
      for value in step.reads:  # which it quantises
        if value.argument is not None:
          found.append((value.shape, worst.size(value) // value.dtype.itemsize))
  # In loops: copies of weights that the loop carries, or of one layer of a stack in each round.
  for operation, times in graph.every_operation():
    source = operation.operands[0] if len(operation.operands) == 1 else None
    is_cast = operation.equation.primitive is jax.lax.convert_element_type_p
    if not is_cast or source is None or source.argument is None:
      continue
    value = operation.results[0]
    if value.nbytes < source.nbytes and operation.phase != BACKWARD and times > 1:
      stack = next((s for s in weights if s[1:] == value.shape and not times % s[0]), None)
      found.append((stack, size(value) * stack[0]) if stack else (value.shape, size(value)))
  return found


def _gradients(worst: Peak) -> list[tuple[Shape, int]]:
  made = {id(value): step.operation for step in worst.order for value in step.writes}
  found: dict[int, tuple[Shape, int]] = {}
  for step in worst.order:
    for value in step.reads if step.operation.phase == OTHER else ():
      maker = made.get(id(value))
      if maker is None or not maker.operands or maker.equation.primitive is jax.lax.broadcast_in_dim_p:
        continue
      if maker.phase == BACKWARD or maker.bodies:
        found[id(value)] = (value.shape, worst.size(value))
  return list(found.values())
