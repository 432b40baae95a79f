"""Checksums of arrays, the same under every sharding, mesh and number of processes.

The pass that computes the checksum of an array also finds whether it holds NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import PyTree
from mpjax.patterns import named_leaves
from mpjax.sharding import on_device


class Examined(NamedTuple):
  """Dtype, shape and checksum of each leaf by path, and the paths of the leaves that hold NaN.

  For example `{"params/w": "float32[8,4] 9a3c01ff"}`; a checksum has eight hexadecimal digits.
  """

  leaves: dict[str, str]
  nan: list[str]


def kinds(tree: PyTree) -> dict[str, str]:
  """Returns dtype and shape of each array or abstract array, by path: `{"params/w": "float32[8,4]"}`."""
  return {name: f"{x.dtype}[{','.join(map(str, x.shape))}]" for name, x in named_leaves(tree)}


def examine(tree: PyTree) -> Examined:
  """Returns what tells the arrays of a tree from others, and which of them hold NaN.

  Computed on the arrays' devices in one pass; five bytes per array come to the host. A change within one
  element of up to 32 bits always changes the checksum, any other with a probability of 1 - 2^-32. For global
  arrays of several processes, every process has to call it.
  """
  arrays = jax.tree.leaves(on_device(tree))
  looks = jax.device_get([_looking(getattr(array.sharding, "mesh", None))(array) for array in arrays])
  found = [(name, kind, *look) for (name, kind), look in zip(kinds(tree).items(), looks, strict=True)]
  leaves = {name: f"{kind} {int(checksum):08x}" for name, kind, checksum, _ in found}
  return Examined(leaves, [name for name, _, _, has_nan in found if has_nan])


@functools.cache
def _looking(mesh: jax.sharding.Mesh | None) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns a program for the checksum of an array, u32[], and whether it has NaN, bool[].

  Every process has its results.
  """

  def look(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
      return _checksum(x), jnp.bool_(False)
    wide = x.astype(jnp.float32) if jnp.finfo(x.dtype).bits < 16 else x
    return _checksum(x), jnp.isnan(wide).any()

  whole = None if mesh is None else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  return jax.jit(look, out_shardings=whole)


def _checksum(x: jax.Array) -> jax.Array:
  """Returns the sum, modulo 2^32, of all words, each hashed with its position; u32[]."""
  words = _words(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    place = place * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
  # MurmurHash3's finaliser is one to one, so every change of a single word changes the sum.
  mixed = words.astype(jnp.uint32) ^ (place * np.uint32(0x9E3779B9))
  mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as unsigned words; a 64-bit element makes two words."""
  if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
    x = jax.random.key_data(x)
  if jnp.issubdtype(x.dtype, jnp.complexfloating):
    x = jnp.stack([x.real, x.imag], axis=-1)
  if x.dtype == bool or (jnp.issubdtype(x.dtype, jnp.integer) and x.dtype.itemsize == 1):
    x = x.astype(jnp.int32)
  if jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits < 8:
    x = x.astype(jnp.float32)
  unsigned = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
  return jax.lax.bitcast_convert_type(x, unsigned)
