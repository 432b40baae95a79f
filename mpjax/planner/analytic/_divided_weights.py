"""Weights that the compiler gathers (GSPMD): whole copies for their readers, and whole gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.jaxpr import BACKWARD, Trait, has
from mpjax.planner._arguments import Argument
from mpjax.planner._array_bytes import itemsize
from mpjax.planner._program import Buffer, Operation
from mpjax.planner.analytic._from_jaxpr import Sizes, like_weight


class DividedWeights:
  """The divided weights of a step that is not in a `shard_map`.

  An operation that reads a weight needs the whole weight; only mesh axes that do not divide the batch still
  divide it. The copy stays for all readers in the same loop body and rematerialised region. A gradient is
  whole before it is reduced.

  Args:
    arguments: arguments of the step.
    kind: kind of the platform.
  """

  def __init__(self, arguments: Sequence[Argument] = (), kind: str = ""):
    self._kind = kind
    self._sizes = Sizes((), kind)
    of_batch = {axis for a in arguments if a.part == "batch" for axis in _axes(a)}
    self._shares: dict[int, float] = {}  # a device's share of the copy, by position
    self._of_shape: dict[tuple[int, ...], float] = {}  # a device's share of a whole gradient
    for i, a in enumerate(arguments):
      axes = _axes(a)
      if a.part == "master weights" and len(a.shape) > 1 and not of_batch.isdisjoint(axes):
        self._shares[i] = share = 1 / math.prod(size for axis, size in axes.items() if axis not in of_batch)
        for shape in like_weight(a.shape):
          self._of_shape[shape] = max(share, self._of_shape.get(shape, 0.0))
    self._copies: dict[tuple[Buffer, int, np.dtype], Buffer] = {}

  def copies(self, operation: Operation, root: Callable[[Buffer], Buffer]) -> list[Buffer]:
    """Returns the gathered weights that an operation reads.

    Args:
      operation: any.
      root: returns the value that a value is a view of.
    """
    found = []
    for value in operation.operands if _is_divided(operation) else ():
      if value.weight in self._shares:
        share, dtype = self._shares[value.weight], self._crosses_in(operation, value)
        key = root(value), operation.region, dtype
        if key not in self._copies:
          shape = (int(math.prod(value.shape) * share),)
          self._copies[key] = Buffer(shape, dtype, self._sizes.of(shape, dtype, local=True), local=True)
        found.append(self._copies[key])
    return found

  def gradients(self, operation: Operation) -> int:
    """Returns the bytes of the whole gradients of weights that an operation computes."""
    if operation.phase != BACKWARD or not _is_divided(operation):
      return 0
    if any(value.weight in self._shares for value in operation.operands):
      return 0  # it is the gradient of the other operand
    # In float32: compilers widen the product instead of casting its result.
    sizes = (4 * math.prod(value.shape) * self._of_shape.get(value.shape, 0.0) for value in operation.writes)
    return int(sum(sizes))

  def _crosses_in(self, operation: Operation, value: Buffer) -> np.dtype:
    """Returns the dtype in which a weight crosses: a TPU casts to half precision first, for products."""
    is_product = has(operation.made, Trait.PRODUCT) and operation.made.params.get("precision") is None
    halved = self._kind == "tpu" and is_product and itemsize(value.dtype) == 4
    return np.dtype(jnp.bfloat16) if halved else np.dtype(value.dtype)


def _is_divided(operation: Operation) -> bool:
  return not operation.local and not operation.bodies and has(operation.made, Trait.READS_STORED)


def _axes(argument: Argument) -> dict[str, int]:
  """Returns the axes of a mesh that divide an argument, and their sizes."""
  sharding = argument.sharding
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return {}
  parts = (part if isinstance(part, tuple) else (part,) for part in sharding.spec)
  return {name: sharding.mesh.shape[name] for names in parts for name in names if isinstance(name, str)}
