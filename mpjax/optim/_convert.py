"""Converts states in few bytes to plain ones and back, for a step that takes over another's state."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_like
from mpjax.optim._master_weights import is_half_array, split
from mpjax.optim._quantized import Quantized, quantize, rebuild, scales_of, unstored
from mpjax.optim._quantized_state import QuantizedState
from mpjax.optim._stochastic import leaf_key


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
    if not isinstance(old, Quantized):
      return cast_like(x, old)
    x = x.astype(jnp.float32)
    groups = 1 if old.scales is None else old.scales.shape[-1]
    group = math.ceil(x.shape[-1] / groups) if x.size and x.ndim else 1
    key = leaf_key(0, jnp.asarray(steps, jnp.int32), path)
    return quantize(x, scales_of(x, old.codes.dtype, group), old.codes.dtype, key)

  return jax.tree_util.tree_map_with_path(leaf, stored, plain, is_leaf=_is_stored)


def split_like(masters: PyTree, params: PyTree, correction: str) -> tuple[PyTree, PyTree]:
  """Returns parameters and corrections for master weights.

  Args:
    masters: tree of float32 arrays.
    params: tree of the same shapes in the new dtypes; leaves that are not half precision stay as they are.
    correction: see `master_weights`.
  """

  def leaf(path: KeyPath, master: Array, p: Array) -> _Pair:
    if not is_half_array(p):
      return _Pair(p, optax.MaskedNode())
    key = leaf_key(0, jnp.zeros([], jnp.int32), path)
    return _Pair(*split(master.astype(jnp.float32), correction, p.dtype, key, nearest=True))

  pairs = jax.tree_util.tree_map_with_path(leaf, masters, params)
  pick = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=lambda x: isinstance(x, _Pair))
  return pick(0), pick(1)


class _Pair(NamedTuple):
  param: Array
  correction: Array | optax.MaskedNode


def _is_stored(x: object) -> bool:
  return isinstance(x, (Quantized, QuantizedState))
