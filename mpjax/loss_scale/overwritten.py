"""Leaves whose "gradient" is their next value: FP8 scales and amax histories.

flax keeps them in a collection of the name below, and so does every tree whose paths hold it. They are not
gradients: nobody unscales, judges, clips or averages them.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax

T = TypeVar("T")

COLLECTION = "_overwrite_with_gradient"


def apply_updates(params: T, updates: Any) -> T:
  """`optax.apply_updates`, where a leaf under `_overwrite_with_gradient` becomes its update.

  Args:
    params: tree of parameters.
    updates: what an optimiser's `update` returned for them.

  Returns:
    New parameters in the dtypes of the old ones.
  """
  if not has_overwritten(params):
    return optax.apply_updates(params, updates)
  hidden = optax.apply_updates(hide(params), hide(updates))
  return show(params, hidden, jax.tree.map(lambda p, u: jnp.asarray(u, p.dtype), params, updates))


def has_overwritten(tree: Any) -> bool:
  """Whether any leaf of `tree` is overwritten rather than differentiated."""
  return any(is_overwritten(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])


def hide(tree: T) -> T:
  """`tree` with `optax.MaskedNode` in place of the leaves that are overwritten."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: optax.MaskedNode() if is_overwritten(path) else leaf, tree
  )


def show(like: Any, hidden: T, values: Any) -> T:
  """`hidden` with its masked leaves taken from `values`; `like` is a whole tree of the same structure."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _, kept, value: value if is_overwritten(path) else kept, like, hidden, values
  )


def is_overwritten(path: Any) -> bool:
  """Whether a leaf at this key path is overwritten rather than differentiated."""
  return any(getattr(key, "key", getattr(key, "name", None)) == COLLECTION for key in path)
