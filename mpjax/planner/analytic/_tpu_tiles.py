"""What an array takes in a TPU's memory, where its two minor dimensions are whole tiles.

A tile is 8 x 128 elements, or fewer rows. The rule was read off the layouts that the compiler chooses for
arguments (OpenXLA, Tiled layout, has the notation): of all orders of dimensions it takes one in which padding
is least.
"""

from __future__ import annotations

import itertools
import math

from mpjax.planner.analytic._graph import itemsize

_LANES = 128
_SUBLANES = 8
_LEAST = 512  # bytes


def tiled_bytes(shape: tuple[int, ...], dtype: object) -> int:
  """Bytes of an array of this shape and dtype, padding included."""
  size = itemsize(dtype)
  if not shape:
    return _LEAST
  if 0 in shape:
    return 0
  packing = max(1, int(4 // size)) if size else 1
  if len(shape) == 1:
    tile = _power_of_two(shape[0], _LANES * packing, _LANES * _SUBLANES)
    return int(_round_up(shape[0], tile) * size)
  count = math.prod(shape)
  best = min(
    count
    // (shape[i] * shape[j])
    * _round_up(shape[i], _power_of_two(shape[i], packing, _SUBLANES))
    * _round_up(shape[j], _LANES)
    for i, j in itertools.permutations(range(len(shape)), 2)
  )
  return int(best * size)


def _power_of_two(n: int, least: int, most: int) -> int:
  """The smallest power of two that holds n, within bounds."""
  tile = least
  while tile < min(n, most):
    tile *= 2
  return tile


def _round_up(n: int, step: int) -> int:
  return -(-n // step) * step
