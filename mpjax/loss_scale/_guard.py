"""Leaf-wise arithmetic of loss scaling: what is finite, unscaled gradients, and what a guarded step keeps."""

from __future__ import annotations

import functools
import operator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import PyTreeDef
from jaxtyping import Array, Bool, Float32, PyTree

from mpjax import _compat
from mpjax._types import ArrayLike
from mpjax.dtypes import at_least_float32, cast_like

T = TypeVar("T")


def all_finite(tree: PyTree) -> Bool[Array, ""]:
  """Returns whether every inexact leaf of `tree` is finite.

  ```python
  loss, grads = jax.value_and_grad(loss_fn)(params, batch)
  finite = mpjax.all_finite(grads)  # bool[]
  ```

  Integer, boolean, key, `float0` and `None` leaves count as finite; an empty tree is finite; a complex
  leaf is finite if both its parts are. One reduction per leaf, one scalar result, no host synchronisation.

  Args:
    tree: any pytree; leaves of any shape, dtype and sharding.

  Returns:
    bool[], replicated when the leaves are sharded under one `jit`.
  """
  leaves = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree) if is_inexact(leaf)]
  return functools.reduce(operator.and_, leaves, jnp.asarray(True))


def unscale(tree: T, scale: Float32[Array, ""]) -> T:
  """Divides the inexact leaves of `tree` by `scale`, in float32 or wider.

  Args:
    tree: gradients of a scaled loss; leaves that are not inexact pass through.
    scale: f32[], from 2**-126 to 2**126: in this range its reciprocal is finite and is not flushed to
      zero, so a non-finite gradient stays non-finite.

  Returns:
    The same structure; half-precision leaves become float32, others keep their dtype.
  """
  inverse = 1.0 / scale

  def leaf(g: ArrayLike) -> ArrayLike:
    if not is_inexact(g):
      return g
    g = jnp.asarray(g)
    if jnp.finfo(g.dtype).bits < 32:
      g = g.astype(jnp.float32)
    return g * inverse.astype(jnp.finfo(g.dtype).dtype)

  return jax.tree.map(leaf, tree)


def updated(params: PyTree, updates: PyTree) -> PyTree:
  """Returns parameters after their updates; the updates if there are no parameters like them."""
  return jax.tree.map(_after, params, updates) if alike(params, updates) else updates


def _after(p: Array, u: Array) -> Array:
  """Returns a parameter after its update, or the update if it cannot be added, as for quantised data."""
  p, u = jnp.asarray(p), jnp.asarray(u)
  adds = all(jnp.issubdtype(x.dtype, jnp.inexact) and jnp.finfo(x.dtype).bits >= 16 for x in (p, u))
  wide = at_least_float32(p.dtype)
  if not adds or p.shape != u.shape or not jnp.can_cast(u.dtype, wide, "same_kind"):
    return u
  return (p.astype(wide) + u.astype(wide)).astype(p.dtype)


def but_nonfinite_before(new: PyTree, old: PyTree) -> PyTree:
  """Returns `new` with 0 where `old` was not finite already, such as a mask of -inf."""
  if not alike(new, old):
    return new
  known = lambda a, b: is_inexact(b) and jnp.shape(a) == jnp.shape(b)
  return jax.tree.map(lambda a, b: jnp.where(jnp.isfinite(b), a, 0) if known(a, b) else a, new, old)


def keep_if(taken: Bool[Array, ""], new: Any, old: Any) -> Any:
  """Returns an array if `taken`, else the old one, divided over explicit mesh axes as that is.

  Other leaves are returned as they are.
  """
  if not is_array(new):
    return new
  kind = jax.typeof(old)
  if _compat.is_explicit(kind) and jax.typeof(new).sharding != kind.sharding:
    new = jax.sharding.reshard(new, kind.sharding)
  return jnp.where(taken, new, old)


class StructureError(ValueError):
  """A transform's update changes the structure of its state."""


def keep_dtypes(new_state: T, old_state: T) -> T:
  """Casts `new_state` to the dtypes of `old_state`: wide gradients must not widen half-precision moments.

  Raises:
    StructureError: if the two differ in structure.
  """
  if not alike(new_state, old_state):
    raise StructureError(
      "the wrapped transform changed the structure of its state from "
      f"{jax.tree.structure(old_state)} to {jax.tree.structure(new_state)}"
    )
  kept: T = cast_like(new_state, old_state)
  return kept


def alike(a: PyTree, b: PyTree) -> bool:
  """Returns whether two trees have one structure."""
  structure: PyTreeDef = jax.tree.structure(a)
  return structure == jax.tree.structure(b)


def is_inexact(leaf: object) -> bool:
  """Returns whether `leaf` is a floating or complex array, or a Python float or complex number."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None:
    return isinstance(leaf, (float, complex))
  return jnp.issubdtype(dtype, jnp.inexact)


def is_array(leaf: object) -> bool:
  """Returns whether JAX can trace `leaf` as an array; it cannot trace `float0`."""
  if isinstance(leaf, (bool, int, float, complex)):
    return True
  return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) and leaf.dtype != jax.dtypes.float0
