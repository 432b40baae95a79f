"""Tests whether a tree is finite, and unscales its leaves: the leaf-wise arithmetic of loss scaling."""

from __future__ import annotations

import functools
import operator
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, PyTree

from mpjax._types import ArrayLike

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


def is_inexact(leaf: object) -> bool:
  """Returns whether `leaf` is a floating or complex array, or a Python float or complex number."""
  dtype = getattr(leaf, "dtype", None)
  if dtype is None:
    return isinstance(leaf, (float, complex))
  return jnp.issubdtype(dtype, jnp.inexact)
