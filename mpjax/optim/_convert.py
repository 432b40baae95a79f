"""Between plain states and those in few bytes, in the middle of a run."""

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
  """Returns the state of `quantized_state(inner, ...)` that stands for a state of `inner`.

  A state does not tell which of its leaves have parameters in them, which `quantized_state` leaves as they
  are: name them in `exclude`, as `"z"` of `optax.contrib.schedule_free`.

  Args:
    inner_state: a state of `inner`.
    params: tree of parameters.
    dtype: as `quantized_state` takes it, and the arguments that follow.
    group: see there.
    min_size: see there.
    exclude: see there.

  Raises:
    TypeError: for an optimiser in place of its state, or without parameters.
    ValueError: names the argument that is wrong.
  """
  if isinstance(inner_state, optax.GradientTransformation) or params is None:
    raise TypeError(
      "mpjax.optim.quantize_state converts the state of an optimiser, quantize_state(opt_state, params); an "
      "optimiser whose state is kept in 8 bits is mpjax.quantized_state(tx, 'int8')"
    )
  refuse_keywords(quantize_state, unknown, ELSEWHERE)
  given = optax.GradientTransformation(
    lambda _: inner_state, lambda updates, state, params=None: (updates, state)
  )
  return quantized_state(given, dtype, group=group, min_size=min_size, exclude=exclude).init(params)


def dequantize_state(state: PyTree) -> PyTree:
  """Returns a state with the plain float32 one in place of each `QuantizedState` in it."""

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
    after: the state that the step makes of `unstored(before)`.
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
  """Returns half-precision parameters and the state of `master_weights(inner, ...)` of float32 parameters.

  Args:
    params: tree of float32 parameters; leaves in another dtype stay as they are.
    inner_state: the state of `inner` for them.
    correction: as `master_weights` takes it.
    seed: as `master_weights` takes it.
    dtype: of the new parameters.

  Raises:
    ValueError: for an unknown correction, or one that `dtype` cannot have.
  """
  target = np.dtype(dtype)
  narrow = jax.tree.map(lambda p: cast_floating(p, target) if p.dtype == jnp.float32 else p, params)
  first = master_weights(optax.identity(), correction, seed=seed).init(narrow)
  new, corrections = split_like(params, narrow, correction, seed)
  return new, first._replace(inner_state=inner_state, correction=corrections)


def split_like(masters: PyTree, params: PyTree, correction: str, seed: int = 0) -> tuple[PyTree, PyTree]:
  """Returns parameters and corrections of master weights.

  Args:
    masters: tree of float32 arrays.
    params: a tree of the same shapes in the dtypes wanted; its leaves that are not half stay as they are.
    correction: as `master_weights` takes it.
    seed: as `master_weights` takes it.
  """

  def leaf(path: KeyPath, master: Array, p: Array) -> _Pair:
    if not is_half_array(p):
      return _Pair(p, optax.MaskedNode())
    key = leaf_key(seed, jnp.zeros([], jnp.int32), path)
    return _Pair(*split(master.astype(jnp.float32), correction, p.dtype, key))

  pairs = jax.tree_util.tree_map_with_path(leaf, masters, params)
  pick = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=lambda x: isinstance(x, _Pair))
  return pick(0), pick(1)


def store_like(stored: PyTree, plain: PyTree, steps: Array | int = 0) -> PyTree:
  """Returns a plain state kept as another is: quantised in the same leaves, to the same codes and groups.

  Args:
    stored: a state.
    plain: what `dequantize_state` makes of a state of that structure.
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
  """Returns the float32 master weights of half-precision parameters, and the wrapped state."""
  return join(params, state.correction), state.inner_state
