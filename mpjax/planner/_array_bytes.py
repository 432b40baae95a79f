"""Bytes of an array in memory, for dtypes below a byte, PRNG keys and a TPU's tiles.

A TPU pads the two minor dimensions to whole tiles of 8 x 128 elements, or of fewer rows. The rule was read
off the layouts that the compiler chooses for arguments (OpenXLA, Tiled layout, explains the notation): the
compiler takes an order of dimensions with the least padding.
"""

from __future__ import annotations

import functools
import itertools
import math
import re

import jax
import numpy as np

_LANES = 128
_SUBLANES = 8
_LEAST = 512  # bytes


def itemsize(dtype: object) -> float:
  """Returns the bytes of an element; a PRNG key counts as its 32-bit words."""
  if isinstance(dtype, np.dtype):
    bits = re.search(r"\d+", dtype.name)
    return 0 if dtype == "V" else int(bits[0]) / 8 if bits else dtype.itemsize
  return 4 * key_words(dtype)


@functools.cache
def key_words(dtype: object) -> int:
  """Returns the number of 32-bit words of a PRNG key of a dtype."""
  key = jax.ShapeDtypeStruct((), dtype)
  return math.prod(jax.eval_shape(jax.random.key_data, key).shape)


def tiled_bytes(shape: tuple[int, ...], dtype: object) -> int:
  """Returns the bytes of an array of this shape and dtype on a TPU, padding included."""
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
  """Returns the smallest power of two that is at least n, within bounds."""
  tile = least
  while tile < min(n, most):
    tile *= 2
  return tile


def _round_up(n: int, step: int) -> int:
  return -(-n // step) * step
