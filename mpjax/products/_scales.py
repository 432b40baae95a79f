"""Scales of the members of an ensemble: under `vmap` each member has its scale, as without `vmap`.

A scale has the dimensions of its operand, each of size 1 unless members differ along it.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array
from mpjax.fp8._scaling import amax_of
from mpjax.products._dimensions import Dims, free_dims

Members = tuple[tuple[int, ...], tuple[int, ...]]  # the mapped dimensions of lhs and rhs


def amax_within(x: Array, members: Sequence[int]) -> Array:
  """Returns the largest magnitude of each member, float32 of `x`'s dimensions; f32[] without members."""
  if not members:
    return amax_of(x)
  within = tuple(i for i in range(x.ndim) if i not in members)
  return jnp.max(jnp.abs(x), axis=within, keepdims=True, initial=0).astype(jnp.float32)


def with_dimension(members: Sequence[int], axis: int | None) -> tuple[int, ...]:
  """Returns the mapped dimensions of an operand to which `vmap` added one more, `None` for none."""
  if axis is None:
    return tuple(members)
  return (*(i + (i >= axis) for i in members), axis)


def members_of_result(members: Members, dims: Dims, ndims: Sequence[int]) -> tuple[int, ...]:
  """Returns the dimensions of a product that are mapped in one operand or the other."""
  found: list[int] = []
  first = len(dims[1][0])
  for side in (0, 1):
    free = free_dims(ndims[side], dims, side)
    found += [dims[1][side].index(i) for i in members[side] if i in dims[1][side]]
    found += [first + free.index(i) for i in members[side] if i in free]
    first += len(free)
  return tuple(sorted(set(found)))


class Scales:
  """The scales of lhs and rhs in the layout of their product: [batch, lhs free, rhs free, contracted].

  Attributes:
    values: the values of lhs and rhs; dimensions that an operand does not have are of size 1.
  """

  def __init__(self, scales: Sequence[Array], dims: Dims, ndims: Sequence[int]):
    contract, batch = dims
    self._orders = [(*batch[s], *free_dims(ndims[s], dims, s), *contract[s]) for s in (0, 1)]
    n, k = len(batch[0]), len(contract[0])
    self._free = [len(order) - n - k for order in self._orders]
    self._starts = (n, n + self._free[0])
    self._contracted = tuple(range(n + sum(self._free), n + sum(self._free) + k))
    self.values = [self._aligned(scale, side) for side, scale in enumerate(scales)]

  def _aligned(self, scale: Array, side: int) -> Array:
    order = self._orders[side]
    scale = scale.reshape(*scale.shape, *(1,) * (len(order) - scale.ndim)).transpose(order)
    at = self._starts[0] + (0 if side else self._free[0])
    return jnp.expand_dims(scale, tuple(range(at, at + self._free[1 - side])))

  def of_operand(self, side: int) -> Array:
    """Returns the scale of an operand, in the operand's layout."""
    other = range(self._starts[1 - side], self._starts[1 - side] + self._free[1 - side])
    scale = jax.lax.squeeze(self.values[side], tuple(other))
    return scale.transpose(np.argsort(self._orders[side]))

  def of_result(self) -> Array:
    """Returns the products of scales, equal where they are summed, as [batch, lhs free, rhs free]."""
    product = self.values[0] * self.values[1]
    return jax.lax.squeeze(product, self._contracted) if self.are_equal else product.min(self._contracted)

  @property
  def are_equal(self) -> bool:
    """Whether the members of a sum have equal scales, as far as shapes show."""
    return all(value.shape[i] == 1 for value in self.values for i in self._contracted)

  def level(self, sides: Sequence[int]) -> None:
    """Lowers scales so that the products of scales are equal in each sum, to the lowest.

    A member loses only values that are small compared with the sum. If neither scale can absorb the
    difference alone, both are lowered.

    Args:
      sides: the operands whose scales may be lowered, in the order of preference.
    """
    lowest = (self.values[0] * self.values[1]).min(self._contracted, keepdims=True)
    for side in sides:
      own, other = self.values[side], self.values[1 - side]
      start = self._starts[1 - side]
      if all(size == 1 for size in other.shape[start : start + self._free[1 - side]]):
        self.values[side] = jnp.minimum(lowest / other, own)
        return
    self.values = [value.min(self._contracted, keepdims=True) for value in self.values]
