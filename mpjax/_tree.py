"""Pytrees: the paths of their leaves as text, and one tree cast like another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath
from jaxtyping import PyTree

from mpjax._types import Array


def path_text(path: KeyPath) -> str:
  """Returns a key path as rules, reports and files have it: `blocks/0/qkv/kernel`; `""` for a bare leaf."""
  return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
  """Returns each leaf of a tree with its `path_text`, in the order of `jax.tree.leaves`."""
  return [(path_text(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]


def as_shapes(tree: PyTree) -> PyTree:
  """Returns the shape and dtype of each leaf of a tree, of numbers too, without where it lies."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree)


def parameter_of(name: str, shape: tuple[int, ...], shapes: Mapping[str, tuple[int, ...]]) -> str | None:
  """Returns the path of the parameter that a leaf of an optimiser's state belongs to; `None` for none.

  That is the longest path of a parameter of the leaf's shape with which the leaf's ends.

  Args:
    name: path of the leaf, as `path_text` gives it.
    shape: of the leaf.
    shapes: of each parameter, by its path; of a bare array by `""`.
  """
  parts = name.split("/")
  ends = ("/".join(parts[i:]) for i in range(len(parts) + 1))
  return next((end for end in ends if shapes.get(end) == shape), None)


def cast_like(tree: PyTree, like: PyTree) -> PyTree:
  """Casts each leaf of a tree to the dtype of its counterpart; a leaf that has it already stays as it is.

  Args:
    tree: of arrays or numbers.
    like: a tree of the same structure; where a leaf has no dtype, the one of `tree` stays as it is.
  """

  def cast(leaf: Array, other: Array) -> Array:
    same = not hasattr(other, "dtype") or jnp.asarray(leaf).dtype == other.dtype
    return leaf if same else jnp.asarray(leaf).astype(other.dtype)

  return jax.tree.map(cast, tree, like)
