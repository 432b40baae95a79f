"""Converts states in few bytes to plain ones and back, for a step that takes over another's state."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from mpjax._types import Array, PyTree
from mpjax.optim._quantized import Quantized, quantize_like, rebuild, scales_like, unstored
from mpjax.optim._quantized_state import QuantizedState


def in_full_bytes(state: PyTree) -> PyTree:
  """Returns a state with that of the wrapped transform, in float32, for each `QuantizedState` in it."""

  def plain(x: PyTree) -> PyTree:
    if isinstance(x, QuantizedState):
      return in_full_bytes(rebuild(x.inner_state))
    return unstored(x)

  return jax.tree.map(plain, state, is_leaf=_is_stored)


def store_like(stored: PyTree, plain: PyTree, steps: Array | int = 0) -> PyTree:
  """Returns a plain state stored like another: quantised in the same leaves, to the same codes and groups.

  Args:
    stored: a state.
    plain: the plain form of a state of that structure, as from `in_full_bytes`; or what a step makes of
      `unstored(stored)`, with a `QuantizedState` in the same places.
    steps: updates so far, for the noise of rounding to bfloat16; those of a `QuantizedState` in `plain`.
  """

  def leaf(path: KeyPath, old: Array | Quantized | QuantizedState, x: PyTree) -> PyTree:
    if isinstance(old, QuantizedState):
      inner, now = x if isinstance(x, QuantizedState) else (x, steps)
      return old._replace(inner_state=store_like(old.inner_state, inner, now))
    return quantize_like(old, x, scales_like(old, x), path, jnp.asarray(steps, jnp.int32))

  return jax.tree_util.tree_map_with_path(leaf, stored, plain, is_leaf=_is_stored)


def _is_stored(x: object) -> bool:
  return isinstance(x, (Quantized, QuantizedState))
