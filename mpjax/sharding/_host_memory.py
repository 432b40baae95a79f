"""Arrays in the host's memory: which they are, and how they move to a device and back.

JAX names that memory `pinned_host`; a program copies from it and to it without another copy in between.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Mesh, PyTree
from mpjax.sharding._sharding_rules import SMALLEST

_HOST, _DEVICE = "pinned_host", "device"


def lacks_host_memory(mesh: Mesh) -> str:
  """Returns why programs on a mesh cannot keep arrays in the host's memory; empty if they can.

  Described devices can.
  """
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return ""
  device = mesh.local_devices[0]
  kinds = [memory.kind for memory in device.addressable_memories()]
  if _HOST not in kinds:
    return f"a {device.device_kind} has no memory {_HOST}: its memories are {', '.join(kinds)}"
  if device.platform == "cpu" and not _compat.has_newer_xla():
    return f"JAX {jax.__version__} does not copy to it on a CPU, which needs JAX 0.12; GPUs and TPUs can"
  return ""


def in_host_memory(x: object) -> bool:
  """Returns whether an array, or a shape with a sharding, is in the host's memory."""
  if isinstance(x, jax.core.Tracer):
    return bool(jax.typeof(x).memory_space == jax.memory.Space.Host)
  return getattr(getattr(x, "sharding", None), "memory_kind", None) == _HOST


def on_device(tree: PyTree) -> PyTree:
  """Returns a tree with every array, or shape, from the host's memory on the device, divided as before."""

  def moved(x: Any) -> Any:
    if not in_host_memory(x):
      return x
    if isinstance(x, jax.core.Tracer):
      return jax.device_put(x, jax.memory.Space.Device)
    there = x.sharding.with_memory_kind(_DEVICE)
    return x.update(sharding=there) if isinstance(x, jax.ShapeDtypeStruct) else jax.device_put(x, there)

  return jax.tree.map(moved, tree)


def to_host(tree: PyTree) -> PyTree:
  """Moves the large arrays of a tree to the host's memory; inside `jit`."""
  return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host) if _is_large(x) else x, tree)


def in_host_shardings(tree: PyTree, shardings: PyTree[NamedSharding]) -> PyTree[NamedSharding]:
  """Returns the shardings of a tree (arrays or shapes) after `to_host`."""
  return jax.tree.map(lambda x, at: at.with_memory_kind(_HOST) if _is_large(x) else at, tree, shardings)


def _is_large(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
  """Returns whether a copy of an array takes longer than its start; a PRNG key does not move."""
  return math.prod(x.shape) >= SMALLEST and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
