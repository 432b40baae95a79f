"""The skip of a non-finite step, in the form that each platform compiles best."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def apply_if(finite: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any) -> tuple[Any, Any]:
  """`update()` where `finite`, else zero updates and `old_state`.

  On GPU and TPU by leaf-wise selects, which fuse into the optimiser's loops, where a conditional breaks
  fusion and buffer aliasing. On CPU, where selects do not fuse, by a conditional. The choice is made when
  the program is lowered, so the same trace serves a compilation for another platform.

  Args:
    finite: bool[]; batched under `vmap`.
    update: makes updates and state; the state's leaves have the dtypes of `old_state`.
    old_state: the state to keep on a skip.
  """
  shapes = jax.eval_shape(update)
  if any(_is_float0(leaf) for leaf in jax.tree.leaves(shapes)):
    # A conditional cannot return float0 leaves.
    return _select(finite, update, old_state)
  return jax.lax.platform_dependent(
    finite,
    old_state,
    cpu=lambda finite, old_state: _branch(finite, update, old_state, shapes[0]),
    default=lambda finite, old_state: _select(finite, update, old_state),
  )


def _select(finite: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any) -> tuple[Any, Any]:
  updates, state = update()
  keep = lambda new, old: old if _is_float0(new) else jnp.where(finite, new, old)
  zero = lambda leaf: leaf if _is_float0(leaf) else jnp.where(finite, leaf, jnp.zeros_like(leaf))
  return jax.tree.map(zero, updates), jax.tree.map(keep, state, old_state)


def _branch(
  finite: jax.Array, update: Callable[[], tuple[Any, Any]], old_state: Any, shapes: Any
) -> tuple[Any, Any]:
  zeros = lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
  return jax.lax.cond(finite, update, lambda: (zeros(), old_state))


def _is_float0(leaf: Any) -> bool:
  return getattr(leaf, "dtype", None) == jax.dtypes.float0
