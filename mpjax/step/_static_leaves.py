"""Leaves of parameters that are not arrays, such as the functions and numbers of an Equinox module.

In a step they are part of the structure of its state, so that `jit`, optimisers, meshes and checkpoints
see only arrays.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np

from mpjax._types import PyTree


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False)
class Static:
  """A leaf that is not an array, as a tree without leaves.

  Two are equal if their values are equal and have one type, so that a step is compiled once for both.

  Attributes:
    value: the leaf.
  """

  value: Any

  def __hash__(self) -> int:
    try:
      return hash(self.value)
    except TypeError:
      return id(self.value)

  def __eq__(self, other: object) -> bool:
    if not isinstance(other, Static) or type(self.value) is not type(other.value):
      return False
    if self.value is other.value:
      return True
    try:
      return bool(self.value == other.value)
    except Exception:  # from an object that does not compare
      return False


def arrays_of(tree: PyTree) -> PyTree:
  """Returns a tree with `Static` for each leaf that is not an array."""
  return jax.tree.map(lambda x: x if _is_array(x) or is_static(x) else Static(x), tree, is_leaf=is_static)


def whole_of(tree: PyTree) -> PyTree:
  """Returns the original tree from the tree of `arrays_of`, with its present arrays."""
  if not has_static(tree):
    return tree
  return jax.tree.map(lambda x: x.value if is_static(x) else x, tree, is_leaf=is_static)


def has_static(tree: PyTree) -> bool:
  """Returns whether a tree has a leaf that is not an array."""
  return any(map(is_static, jax.tree.leaves(tree, is_leaf=is_static)))


def is_static(x: object) -> bool:
  """Returns whether `x` is a `Static`; use it as `is_leaf`."""
  return isinstance(x, Static)


def _is_array(x: object) -> bool:
  if not isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
    return False
  return getattr(x.dtype, "kind", "V") not in "OSU"  # NumPy's arrays of objects and text are not JAX's
