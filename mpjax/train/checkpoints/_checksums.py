"""Checksums of arrays and JSON values, the same under every sharding, mesh and number of processes.

The pass that computes the checksum of an array also finds whether it holds NaN or infinity.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import ArrayLike, PyTree
from mpjax.patterns import named_leaves
from mpjax.sharding import on_device

# "NaN", "inf" or both, for each leaf that holds them, by path.
NonFiniteLeaves = dict[str, list[str]]

_KINDS = ("NaN", "inf")


class Examined(NamedTuple):
  """The checksum of each leaf of a tree, and which leaves hold NaN or infinity, by path."""

  checksums: dict[str, str]
  nonfinite: NonFiniteLeaves


def tree_kinds(tree: PyTree) -> dict[str, str]:
  """Returns dtype and shape of each leaf, by path: `{"params/w": "float32[8,4]"}`.

  Args:
    tree: leaves are arrays, abstract arrays or Python scalars.
  """
  return {name: _kind(leaf) for name, leaf in named_leaves(tree)}


def tree_checksums(tree: PyTree) -> dict[str, str]:
  """Returns the checksum of each leaf, by path: `{"params/w": "9a3c01ff"}`.

  Computed on the leaves' devices in one pass; eight hexadecimal digits per leaf come to the host. A change
  within one element of up to 32 bits always changes the checksum, any other with a probability of 1 - 2^-32.

  Args:
    tree: leaves of any dtype (PRNG keys, too), shape and sharding. For global arrays of several processes
      this is a collective: every process has to call it.
  """
  return examine(tree).checksums


def examine(tree: PyTree) -> Examined:
  """Returns the checksums of `tree_checksums`, and which leaves hold NaN or infinity."""
  leaves = named_leaves(tree)
  looks = jax.device_get([_look(on_device(leaf)) for _, leaf in leaves])
  found = {name: look for (name, _), look in zip(leaves, looks, strict=True)}
  kinds = {
    name: [kind for kind, there in zip(_KINDS, has, strict=True) if there] for name, (_, has) in found.items()
  }
  return Examined(
    {name: f"{int(checksum):08x}" for name, (checksum, _) in found.items()},
    {name: held for name, held in kinds.items() if held},
  )


def beyond(found: NonFiniteLeaves, known: Mapping[str, list[str]]) -> NonFiniteLeaves:
  """Returns the NaN and infinity of leaves, without those that they are known to hold."""
  new = {path: [kind for kind in kinds if kind not in known.get(path, ())] for path, kinds in found.items()}
  return {path: kinds for path, kinds in new.items() if kinds}


def json_checksum(value: object) -> str:
  """Returns the SHA-256 of a JSON value's canonical text, which does not depend on formatting."""
  # One round trip through JSON turns keys into strings and tuples into lists.
  text = json.dumps(json.loads(json.dumps(value)), sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def _kind(leaf: ArrayLike | jax.ShapeDtypeStruct) -> str:
  array = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _look(leaf: ArrayLike) -> tuple[jax.Array, jax.Array | np.ndarray]:
  """Returns the checksum of an array, u32[], and whether it holds each of `_KINDS`, bool[2]."""
  if not isinstance(leaf, jax.Array):
    array = np.asarray(leaf)
    if array.dtype.itemsize >= 8:  # JAX without x64 would round it
      is_inexact = np.issubdtype(array.dtype, np.inexact)
      held = np.array([np.isnan(array).any(), np.isinf(array).any()] if is_inexact else [False, False])
      words = np.ascontiguousarray(array[..., None]).view(np.uint32)
      return _compiled(None)(jnp.asarray(words))[0], held
    leaf = jnp.asarray(array)
  sharding = leaf.sharding
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return _compiled(None)(leaf)
  return _compiled(jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))(leaf)


@functools.cache
def _compiled(
  result: jax.sharding.NamedSharding | None,
) -> Callable[[jax.Array], tuple[jax.Array, jax.Array]]:
  """Returns a program that examines one array; every process has its results."""
  return jax.jit(lambda x: (_checksum(x), _held(x)), out_shardings=result)


def _held(x: jax.Array) -> jax.Array:
  """Returns whether an array holds each of `_KINDS`, bool[2]."""
  if not jnp.issubdtype(x.dtype, jnp.inexact):
    return jnp.zeros(2, bool)
  if jnp.finfo(x.dtype).bits < 16:
    x = x.astype(jnp.float32)
  return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])


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
