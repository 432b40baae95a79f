"""The order of columns in a kernel that makes queries, keys and values: by head, and in files of before not.

By head are the columns of q, k and v of one head, then those of the next: a device that has a part of the
columns has whole heads. Exports, and checkpoints of before, have all columns of q, then those of k and of v.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.tree_util import KeyPath

from mpjax._tree import named_leaves, path_text
from mpjax._types import Array, PyTree
from mpjax.optim import Quantized, is_quantized
from mpjax.optim._quantized import dequantize, quantize, scales_of
from mpjax.patterns import component_regex

# The heads of each such kernel, by a pattern of its path.
ByHead = Mapping[str, int]


def reordered(x: Array, heads: int, *, axis: int = -1, back: bool = False) -> Array:
  """Returns an array with the columns of q, k and v apart in the order by head.

  Args:
    x: any array with 3 D entries along `axis`.
    heads: they divide D.
    axis: of the columns.
    back: from the order by head to q, k and v apart.
  """
  order = np.arange(x.shape[axis]).reshape(3, heads, -1).swapaxes(0, 1).ravel()
  return x.take(np.argsort(order) if back else order, axis=axis)


def heads_of(path: str, by_head: ByHead) -> int | None:
  """Returns the heads of the kernel that a path leads to, or through; `None` for another parameter."""
  return next((n for pattern, n in by_head.items() if component_regex(pattern).search(path)), None)


def reordered_params(params: PyTree, by_head: ByHead, *, back: bool = False) -> PyTree:
  """Returns parameters with the columns of their kernels in the other order, as `reordered` has them."""

  def of(path: KeyPath, leaf: Array) -> Array:
    heads = heads_of(path_text(path), by_head)
    return leaf if heads is None else reordered(leaf, heads, back=back)

  return jax.tree_util.tree_map_with_path(of, params)


def reordered_state(opt_state: PyTree, params: PyTree, by_head: ByHead) -> PyTree:
  """Returns an optimiser's state with the columns that belong to kernels by head.

  Quantised arrays keep their values where groups of a scale move whole, and are rounded once more where not.

  Args:
    opt_state: arrays; those of a kernel have its path in theirs, whatever their shape.
    params: arrays or shapes.
    by_head: as for `heads_of`.
  """
  kernels = [leaf.shape[-1] for path, leaf in named_leaves(params) if heads_of(path, by_head) is not None]

  def of(path: KeyPath, leaf: Array | Quantized) -> Array | Quantized:
    heads = heads_of(path_text(path), by_head)
    if heads is None:
      return leaf
    if isinstance(leaf, Quantized):
      return _requantized(leaf, lambda x: moved(x, heads))
    return moved(leaf, heads)

  def moved(x: Array, heads: int) -> Array:
    for axis, size in enumerate(x.shape):
      if size in kernels:  # one of a factored moment has columns alone
        x = reordered(x, heads, axis=axis)
    return x

  return jax.tree_util.tree_map_with_path(of, opt_state, is_leaf=is_quantized)


def _requantized(stored: Quantized, move: Callable[[Array], Array]) -> Quantized:
  """Returns a quantised array whose entries were moved, with as many scales."""
  if stored.scales is None:
    return Quantized(move(stored.codes), None)
  moved, dtype = move(dequantize(stored)), stored.codes.dtype
  columns, groups = stored.codes.shape[-1], stored.scales.shape[-1]
  sizes = itertools.count(math.ceil(columns / groups))
  scales = scales_of(moved, dtype, next(size for size in sizes if math.ceil(columns / size) == groups))
  return quantize(moved, scales, dtype, jax.random.key(0))  # a key for bfloat16 alone
