"""Converts plain states to states in few bytes and back, in the middle of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Never

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from mpjax._calls import refuse_keywords
from mpjax._types import Array, DTypeLike, PyTree
from mpjax.dtypes import cast_floating, cast_like
from mpjax.optim._master_weights import MasterWeightsState, is_half_array, join, master_weights, split
from mpjax.optim._quantized import Quantized, quantize, rebuild, scales_of, unstored
from mpjax.optim._quantized_state import ELSEWHERE, QuantizedState, quantized_state
from mpjax.optim._stochastic import leaf_key


def quantize_state(
  inner_state: PyTree,
  params: PyTree = None,
  dtype: str = "int8",
  *,
  group: int = 128,
  min_size: int = 4096,
  exclude: str | Sequence[str] | None = None,
  **unknown: Never,
) -> QuantizedState:
  """Converts a state of `inner` to the state of `quantized_state(inner, ...)`.

  ```python
  opt_state = mpjax.optim.quantize_state(optax.adamw(1e-3).init(params), params)
  tx = mpjax.quantized_state(optax.adamw(1e-3))  # goes on from opt_state
  ```

  `quantized_state` leaves some leaves as they are, because they hold parameters. A state does not tell which
  they are: name them in `exclude`, such as `"z"` of `optax.contrib.schedule_free`.

  Args:
    inner_state: a state of `inner`.
    params: tree of parameters.
    dtype: see `quantized_state`; so for the arguments that follow.
    group: see `quantized_state`.
    min_size: see `quantized_state`.
    exclude: see `quantized_state`.

  Returns:
    A `QuantizedState`.

  Raises:
    TypeError: for an optimiser instead of its state, or without parameters.
    ValueError: names the wrong argument.
  """
  if isinstance(inner_state, optax.GradientTransformation) or params is None:
    raise TypeError(
      "mpjax.optim.quantize_state converts the state of an optimiser, quantize_state(opt_state, params); to "
      "keep an optimiser's state in 8 bits, wrap it: mpjax.quantized_state(tx, 'int8')"
    )
  refuse_keywords(quantize_state, unknown, ELSEWHERE)
  given = optax.GradientTransformation(
    lambda _: inner_state, lambda updates, state, params=None: (updates, state)
  )
  return quantized_state(given, dtype, group=group, min_size=min_size, exclude=exclude).init(params)


def dequantize_state(state: PyTree) -> PyTree:
  """Converts each `QuantizedState` in a state to the plain float32 state.

  ```python
  tx = mpjax.quantized_state(optax.adamw(1e-3))
  plain_state = mpjax.optim.dequantize_state(tx.init(params))  # a state of optax.adamw(1e-3)
  ```

  Args:
    state: any tree, such as an optimiser's state.

  Returns:
    The tree with the state of the wrapped transform for each `QuantizedState`; other leaves unchanged.
  """

  def plain(x: PyTree) -> PyTree:
    if isinstance(x, QuantizedState):
      return dequantize_state(rebuild(x.inner_state))
    return unstored(x)

  return jax.tree.map(plain, state, is_leaf=_is_stored)


def _is_stored(x: object) -> bool:
  return isinstance(x, (Quantized, QuantizedState))


def store_step(before: PyTree, after: PyTree) -> PyTree:
  """Returns a state as it would be stored after a step.

  Args:
    before: the state before the step, as it is stored.
    after: the state that the step gives for `unstored(before)`.
  """

  def stored(old: PyTree, new: PyTree) -> PyTree:
    if not isinstance(old, QuantizedState):
      return new
    return new._replace(inner_state=store_like(old.inner_state, new.inner_state, new.steps))

  return jax.tree.map(stored, before, after, is_leaf=lambda x: isinstance(x, QuantizedState))


def split_master_weights(
  params: PyTree,
  inner_state: PyTree,
  correction: str = "int16",
  *,
  seed: int = 0,
  dtype: DTypeLike = jnp.bfloat16,
) -> tuple[PyTree, MasterWeightsState]:
  """Converts float32 parameters and their state to half-precision parameters under `master_weights`.

  ```python
  params, opt_state = mpjax.optim.split_master_weights(params, optax.adamw(1e-3).init(params))
  tx = mpjax.master_weights(optax.adamw(1e-3))  # goes on from opt_state
  ```

  Args:
    params: tree of float32 parameters; leaves in another dtype stay as they are.
    inner_state: the state of `inner` for them.
    correction: see `master_weights`.
    seed: see `master_weights`.
    dtype: dtype of the new parameters.

  Returns:
    `(params, opt_state)`: parameters in `dtype`, and a `MasterWeightsState`.

  Raises:
    ValueError: for an unknown correction, or one that `dtype` does not support.
  """
  target = np.dtype(dtype)
  narrow = jax.tree.map(lambda p: cast_floating(p, target) if p.dtype == jnp.float32 else p, params)
  first = master_weights(optax.identity(), correction, seed=seed).init(narrow)
  new, corrections = split_like(params, narrow, correction, seed)
  return new, first._replace(inner_state=inner_state, correction=corrections)


def split_like(masters: PyTree, params: PyTree, correction: str, seed: int = 0) -> tuple[PyTree, PyTree]:
  """Returns parameters and corrections for master weights.

  Args:
    masters: tree of float32 arrays.
    params: tree of the same shapes in the new dtypes; leaves that are not half precision stay as they are.
    correction: see `master_weights`.
    seed: see `master_weights`.
  """

  def leaf(path: KeyPath, master: Array, p: Array) -> _Pair:
    if not is_half_array(p):
      return _Pair(p, optax.MaskedNode())
    key = leaf_key(seed, jnp.zeros([], jnp.int32), path)
    return _Pair(*split(master.astype(jnp.float32), correction, p.dtype, key, nearest=True))

  pairs = jax.tree_util.tree_map_with_path(leaf, masters, params)
  pick = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=lambda x: isinstance(x, _Pair))
  return pick(0), pick(1)


def store_like(stored: PyTree, plain: PyTree, steps: Array | int = 0) -> PyTree:
  """Returns a plain state stored like another: quantised in the same leaves, to the same codes and groups.

  Args:
    stored: a state.
    plain: the plain form of a state of that structure, as from `dequantize_state`.
    steps: updates so far, for the noise of rounding to bfloat16.
  """

  def leaf(path: KeyPath, old: Array | Quantized | QuantizedState, x: PyTree) -> PyTree:
    if isinstance(old, QuantizedState):
      return old._replace(inner_state=store_like(old.inner_state, x, steps))
    if not isinstance(old, Quantized):
      return cast_like(x, old)
    x = x.astype(jnp.float32)
    groups = 1 if old.scales is None else old.scales.shape[-1]
    group = math.ceil(x.shape[-1] / groups) if x.size and x.ndim else 1
    key = leaf_key(0, jnp.asarray(steps, jnp.int32), path)
    return quantize(x, scales_of(x, old.codes.dtype, group), old.codes.dtype, key)

  return jax.tree_util.tree_map_with_path(leaf, stored, plain, is_leaf=_is_stored)


class _Pair(NamedTuple):
  param: Array
  correction: Array | optax.MaskedNode


def merge_master_weights(params: PyTree, state: MasterWeightsState) -> tuple[PyTree, PyTree]:
  """Returns the float32 master weights of half-precision parameters, and the wrapped state.

  ```python
  tx = mpjax.master_weights(optax.adamw(1e-3))
  half = mpjax.cast_floating(params, jnp.bfloat16)
  params, opt_state = mpjax.optim.merge_master_weights(half, tx.init(half))  # for optax.adamw(1e-3)
  ```

  Args:
    params: tree of parameters under `mpjax.master_weights`.
    state: the state of `mpjax.master_weights` for them.

  Returns:
    `(params, inner_state)`: float32 for each half-precision parameter, and the wrapped transform's state.
  """
  return join(params, state.correction), state.inner_state
