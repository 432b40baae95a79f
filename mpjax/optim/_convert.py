"""Between plain states and those in few bytes, in the middle of a run."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath

from mpjax._types import Array, DTypeLike, PyTree
from mpjax.dtypes import cast_floating
from mpjax.optim._master_weights import MasterWeightsState, join, master_weights, split
from mpjax.optim._quantized import dequantize, is_quantized
from mpjax.optim._quantized_state import QuantizedState, quantized_state
from mpjax.optim._stochastic import leaf_key


def quantize_state(
  inner_state: PyTree,
  params: PyTree,
  dtype: str = "int8",
  *,
  group: int = 128,
  min_size: int = 4096,
  exclude: str | Sequence[str] | None = None,
) -> QuantizedState:
  """Returns the state of `quantized_state(inner, ...)` that stands for a state of `inner`.

  Args:
    inner_state: a state of `inner`.
    params: tree of parameters.
    dtype: as `quantized_state` takes it, and the arguments that follow.
    group: see there.
    min_size: see there.
    exclude: see there.

  Raises:
    ValueError: names the argument that is wrong.
  """
  given = optax.GradientTransformation(
    lambda _: inner_state, lambda updates, state, params=None: (updates, state)
  )
  return quantized_state(given, dtype, group=group, min_size=min_size, exclude=exclude).init(params)


def dequantize_state(state: PyTree) -> PyTree:
  """Returns a state with the plain float32 one in place of each `QuantizedState` in it."""

  def plain(x: PyTree) -> PyTree:
    if isinstance(x, QuantizedState):
      return dequantize_state(x.inner_state)
    return dequantize(x) if is_quantized(x) else x

  return jax.tree.map(plain, state, is_leaf=lambda x: isinstance(x, QuantizedState) or is_quantized(x))


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
  first = master_weights(optax.identity(), correction, seed=seed).init(cast_floating(params, target))

  def leaf(path: KeyPath, p: Array) -> tuple[Array, Array | optax.MaskedNode]:
    if p.dtype != jnp.float32:
      return p, optax.MaskedNode()
    return split(p, correction, target, leaf_key(seed, first.steps, path))

  pairs = jax.tree_util.tree_map_with_path(leaf, params)
  pick = lambda i: jax.tree.map(lambda pair: pair[i], pairs, is_leaf=lambda x: type(x) is tuple)
  return pick(0), MasterWeightsState(inner_state, pick(1), first.steps)


def merge_master_weights(params: PyTree, state: MasterWeightsState) -> tuple[PyTree, PyTree]:
  """Returns the float32 master weights of half-precision parameters, and the wrapped state."""
  return join(params, state.correction), state.inner_state
