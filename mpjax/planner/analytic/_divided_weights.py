"""Weights that the compiler gathers (GSPMD): whole copies for their readers, and whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import BACKWARD, Trait, call_layout, has, is_variable
from mpjax.planner._arguments import Argument
from mpjax.planner._array_bytes import itemsize
from mpjax.planner.analytic._graph import Graph, GraphOperation, GraphValue

Shape = tuple[int, ...]


_SLICES = (jax.lax.slice_p, jax.lax.dynamic_slice_p, jax.lax.squeeze_p)


class DividedWeights:
  """The divided weights of a step that is not in a `shard_map`.

  An operation that reads a weight needs the whole weight; only mesh axes that do not divide the batch still
  divide it. The copy stays for all readers in the same loop body and rematerialised region. A gradient is
  whole before it is reduced.

  Args:
    graph: graph of the step.
    arguments: arguments of the step, in the graph's order.
    kind: kind of the platform.
  """

  def __init__(self, graph: Graph, arguments: Sequence[Argument], kind: str):
    self._kind = kind
    of_batch = {axis for a in arguments if a.part == "batch" for axis in _axes(a)}
    self._of_shape: dict[Shape, float] = {}  # a device's share of a whole gradient
    self._weights: dict[int, tuple[GraphValue, float]] = {}  # by identity; a device's share of the copy
    for value, a in zip(graph.arguments, arguments, strict=True):
      axes = _axes(a)
      if a.part == "master weights" and len(a.shape) > 1 and not of_batch.isdisjoint(axes):
        share = 1 / math.prod(size for axis, size in axes.items() if axis not in of_batch)
        self._weights[id(value)] = value, share
        for shape in like_weight(a.shape):
          self._of_shape[shape] = max(share, self._of_shape.get(shape, 0.0))
    if self._weights:
      self._follow(graph)
    self._copies: dict[tuple[int, int, np.dtype], GraphValue] = {}

  def _follow(self, graph: Graph) -> None:
    """Finds casts, views and slices of the weights."""
    for operation in graph.operations:
      first = operation.operands[0] if operation.operands else None
      is_same = has(operation.equation, Trait.ALIAS | Trait.CAST) or operation.equation.primitive in _SLICES
      if is_same and first is not None and id(first) in self._weights:
        share = self._weights[id(first)][1]
        self._weights.update((id(value), (value, share)) for value in operation.results)
      given = iter(operation.operands)
      operands = [next(given) if is_variable(atom) else None for atom in operation.equation.invars]
      for body, (_, places, _) in zip(operation.bodies, call_layout(operation.equation).bodies, strict=False):
        for inner, outer in zip(body.arguments, [operands[k] for k in places], strict=True):
          if outer is not None and id(outer) in self._weights:
            self._weights[id(inner)] = inner, self._weights[id(outer)][1]
        self._follow(body)

  def copies(self, operation: GraphOperation, root: Callable[[GraphValue], GraphValue]) -> list[GraphValue]:
    """Returns the gathered weights that an operation reads.

    Args:
      operation: any.
      root: returns the value that a value is a view of.
    """
    if not _is_divided(operation):
      return []
    found = []
    for value in operation.operands:
      if id(value) in self._weights:
        share, dtype = self._weights[id(value)][1], self._crosses_in(operation, value)
        key = id(root(value)), operation.region, dtype
        if key not in self._copies:
          self._copies[key] = GraphValue((int(math.prod(value.shape) * share),), dtype, local=True)
        found.append(self._copies[key])
    return found

  def gradients(self, operation: GraphOperation) -> int:
    """Returns the bytes of the whole gradients of weights that an operation computes."""
    if operation.phase != BACKWARD or not _is_divided(operation):
      return 0
    if any(id(value) in self._weights for value in operation.operands):
      return 0  # it is the gradient of the other operand
    # In float32: compilers widen the product instead of casting its result.
    sizes = (4 * math.prod(value.shape) * self._of_shape.get(value.shape, 0.0) for value in operation.results)
    return int(sum(sizes))

  def _crosses_in(self, operation: GraphOperation, value: GraphValue) -> np.dtype:
    """Returns the dtype in which a weight crosses: a TPU casts to half precision first, for products."""
    is_product = has(operation.equation, Trait.PRODUCT) and operation.equation.params.get("precision") is None
    halved = self._kind == "tpu" and is_product and itemsize(value.dtype) == 4
    return np.dtype(jnp.bfloat16) if halved else np.dtype(value.dtype)


NOT_DIVIDED = DividedWeights(Graph([], [], [], 0), (), "")


def like_weight(shape: Shape) -> list[Shape]:
  """Returns the shapes that stand for a weight or its gradient: transposed, and one layer of a stack."""
  found = [shape, shape[::-1]]
  return [*found, shape[1:], shape[:0:-1]] if len(shape) > 2 else found


def _is_divided(operation: GraphOperation) -> bool:
  return not operation.local and not operation.bodies and has(operation.equation, Trait.READS_STORED)


def _axes(argument: Argument) -> dict[str, int]:
  """Returns the axes of a mesh that divide an argument, and their sizes."""
  sharding = argument.sharding
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return {}
  parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
  return {name: sharding.mesh.shape[name] for names in parts for name in names if isinstance(name, str)}
