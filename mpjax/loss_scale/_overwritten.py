"""Leaves whose "gradient" is their next value: FP8 scales and amax histories.

flax keeps them in a collection of the name below; every leaf whose path has this name counts. They are not
gradients: nothing unscales, judges, clips or averages them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from mpjax._types import Array, PyTree
from mpjax.loss_scale._guard import alike

T = TypeVar("T")

COLLECTION = "_overwrite_with_gradient"


def apply_updates(params: T, updates: PyTree) -> T:
  """Applies updates like `optax.apply_updates`; a leaf under `_overwrite_with_gradient` becomes its update.

  ```python
  params = mpjax.apply_updates(params, updates)
  ```

  Args:
    params: tree of parameters.
    updates: what an optimiser's `update` returned for them: a tree of the same structure.

  Returns:
    New parameters in the dtypes of the old ones.
  """
  if not any(is_overwritten(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)):
    return optax.apply_updates(params, updates)
  hidden = optax.apply_updates(hide(params), hide(updates))
  return map_parts(lambda p, new, u: new, lambda p, _, u: jnp.asarray(u, p.dtype), params, hidden, updates)


def apart(
  inner: optax.GradientTransformationExtraArgs, taken: Callable[[Any], Array] | None = None
) -> optax.GradientTransformationExtraArgs:
  """Splits leaves that are overwritten off before `inner`: their updates are the given values.

  Args:
    inner: any transform.
    taken: (new state of `inner`) -> bool[], whether the step was taken; their old values stay if not.
  """

  def update(
    updates: PyTree, state: PyTree, params: PyTree = None, **extra_args: object
  ) -> tuple[PyTree, PyTree]:
    if not any(is_overwritten(path) for path, _ in jax.tree_util.tree_leaves_with_path(updates)):
      return inner.update(updates, state, params, **extra_args)
    extra_args = {name: hide(arg) if alike(arg, updates) else arg for name, arg in extra_args.items()}
    hidden, state = inner.update(hide(updates), state, hide(params), **extra_args)
    values = updates if taken is None else _kept(taken(state), updates, params)
    return show(updates, hidden, values), state

  return optax.GradientTransformationExtraArgs(lambda params: inner.init(hide(params)), update)


def _kept(taken: Array, values: PyTree, params: PyTree) -> PyTree:
  if params is None:
    raise ValueError(
      f"update(grads, state) without params: leaves under '{COLLECTION}' keep their old value on "
      "a skipped step, so params is needed: update(grads, state, params)"
    )
  select = lambda new, old: jnp.where(taken, new, old).astype(old.dtype)
  return map_parts(lambda new, _: new, select, values, params)


def hide(tree: T) -> T:
  """Returns `tree` with `optax.MaskedNode` for each leaf that is overwritten."""
  return map_parts(lambda leaf: leaf, lambda leaf: optax.MaskedNode(), tree)


def show(like: PyTree, hidden: T, values: PyTree) -> T:
  """Takes the masked leaves of `hidden` from `values`; `like` is a whole tree of the same structure."""
  return map_parts(lambda _, kept, __: kept, lambda _, __, value: value, like, hidden, values)


def map_parts(of_gradients: Callable[..., Any], of_overwritten: Callable[..., Any], *trees: PyTree) -> PyTree:
  """Maps trees by one function for leaves that are differentiated and one for leaves that are overwritten."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: (of_overwritten if is_overwritten(path) else of_gradients)(*leaves), *trees
  )


def is_overwritten(path: KeyPath) -> bool:
  """Returns whether a leaf at this key path is overwritten instead of differentiated."""
  return any(getattr(key, "key", getattr(key, "name", None)) == COLLECTION for key in path)
