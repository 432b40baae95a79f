"""Weights that the compiler gathers (GSPMD): whole copies for what reads them, and whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import BACKWARD, Trait, has
from mpjax.planner._arguments import Argument
from mpjax.planner._array_bytes import itemsize
from mpjax.planner.analytic._graph import GraphOperation, GraphValue

Shape = tuple[int, ...]


class DividedWeights:
  """The divided weights of a step that is not in a `shard_map`.

  What reads one needs it whole, but for axes of the mesh that do not divide the batch. The copy stays for all
  that reads it in the same loop body and rematerialised region. A gradient is whole before it is reduced.

  Args:
    arguments: of the step.
    kind: of the platform.
  """

  def __init__(self, arguments: Sequence[Argument], kind: str):
    self._kind = kind
    of_batch = {axis for a in arguments if a.part == "batch" for axis in _axes(a)}
    self._share: dict[Shape, float] = {}  # of a gathered weight
    for a in arguments:
      if a.part == "master weights" and len(a.shape) > 1:
        gathered = any(axis in of_batch for axis in _axes(a))
        kept = math.prod(size for axis, size in _axes(a).items() if axis not in of_batch)
        for shape in like_weight(a.shape):
          self._share.setdefault(shape, 1 / kept if gathered else 0.0)
    self._copies: dict[tuple[int, int, np.dtype], GraphValue] = {}

  def copies(self, operation: GraphOperation, root: Callable[[GraphValue], GraphValue]) -> list[GraphValue]:
    """Returns the gathered weights that an operation reads.

    Args:
      operation: any.
      root: gives what a value is a view of.
    """
    if not _is_divided(operation):
      return []
    found = []
    for value in operation.operands:
      if share := self._share.get(value.shape, 0.0):
        dtype = self._crosses_in(operation, value)
        key = id(root(value)), operation.region, dtype
        if key not in self._copies:
          size = int(math.prod(value.shape) * share)
          self._copies[key] = GraphValue((size,), dtype, local=True)
        found.append(self._copies[key])
    return found

  def gradients(self, operation: GraphOperation) -> int:
    """Returns the bytes of the whole gradients of weights that an operation computes."""
    if operation.phase != BACKWARD or not _is_divided(operation):
      return 0
    return int(sum(value.nbytes * self._share.get(value.shape, 0.0) for value in operation.results))

  def _crosses_in(self, operation: GraphOperation, value: GraphValue) -> np.dtype:
    """Returns the dtype in which a weight crosses: for products a TPU casts to half precision before."""
    is_product = has(operation.equation, Trait.PRODUCT) and operation.equation.params.get("precision") is None
    halved = self._kind == "tpu" and is_product and itemsize(value.dtype) == 4
    return np.dtype(jnp.bfloat16) if halved else np.dtype(value.dtype)


NOT_DIVIDED = DividedWeights((), "")


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
