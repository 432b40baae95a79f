"""Checksums of arrays and JSON values: the same under every sharding, mesh and number of processes."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._tree import named_leaves
from mpjax._types import ArrayLike, PyTree


def tree_kinds(tree: PyTree) -> dict[str, str]:
  """Returns dtype and shape of each leaf, by path: `{"params/w": "float32[8,4]"}`.

  Args:
    tree: leaves are arrays, abstract arrays or Python scalars.
  """
  return {name: _kind(leaf) for name, leaf in named_leaves(tree)}


def tree_checksums(tree: PyTree) -> dict[str, str]:
  """Returns the checksum of each leaf, by path: `{"params/w": "9a3c01ff"}`.

  Computed where the leaves are, in one pass over them; eight hexadecimal digits a leaf come to the host.
  A change within one element of up to 32 bits always shows, any other with a chance of 1 - 2^-32.

  Args:
    tree: leaves of any dtype (PRNG keys too), shape and sharding. Global arrays of a run of several
      processes are a collective: every process has to call this.
  """
  leaves = named_leaves(tree)
  sums = jax.device_get([_leaf_checksum(leaf) for _, leaf in leaves])
  return {name: f"{int(value):08x}" for (name, _), value in zip(leaves, sums, strict=True)}


def json_checksum(value: object) -> str:
  """Returns the SHA-256 of a JSON value's canonical text: of what it says, however it is written."""
  # Through JSON once: its keys are strings, and its tuples lists.
  text = json.dumps(json.loads(json.dumps(value)), sort_keys=True, separators=(",", ":"))
  return hashlib.sha256(text.encode()).hexdigest()


def _kind(leaf: ArrayLike | jax.ShapeDtypeStruct) -> str:
  array = np.asarray(leaf) if isinstance(leaf, (bool, int, float, complex)) else leaf
  return f"{array.dtype}[{','.join(map(str, array.shape))}]"


def _leaf_checksum(leaf: ArrayLike) -> jax.Array:
  if not isinstance(leaf, jax.Array):
    array = np.asarray(leaf)
    if array.dtype.itemsize >= 8:  # JAX without x64 would round it
      array = np.ascontiguousarray(array[..., None]).view(np.uint32)
    leaf = jnp.asarray(array)
  sharding = leaf.sharding
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return _compiled(None)(leaf)
  return _compiled(jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec()))(leaf)


@functools.cache
def _compiled(result: jax.sharding.NamedSharding | None) -> Callable[[jax.Array], jax.Array]:
  """Returns a program for the checksum of one array, whose result every process has."""
  return jax.jit(_checksum, out_shardings=result)


def _checksum(x: jax.Array) -> jax.Array:
  """Returns the sum, modulo 2^32, of every word scrambled with its place; u32[]."""
  words = _words(x)
  place = jnp.zeros(words.shape, jnp.uint32)
  for axis, size in enumerate(words.shape):
    place = place * np.uint32(size % 2**32) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
  # MurmurHash3's finaliser: one to one, so that no change of a single word is lost.
  mixed = words.astype(jnp.uint32) ^ (place * np.uint32(0x9E3779B9))
  mixed = (mixed ^ (mixed >> 16)) * np.uint32(0x85EBCA6B)
  mixed = (mixed ^ (mixed >> 13)) * np.uint32(0xC2B2AE35)
  return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)


def _words(x: jax.Array) -> jax.Array:
  """Returns the bits of an array as unsigned words; 64-bit elements are two."""
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
