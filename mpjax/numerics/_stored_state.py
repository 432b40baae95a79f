"""What an optimiser's state in few bytes loses: stored values against the float32 values behind them."""

from __future__ import annotations

import bisect
import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32

from mpjax._types import Array, PyTree
from mpjax.numerics._summary import Summary
from mpjax.optim import Quantized, dequantize, is_quantized
from mpjax.patterns import named_leaves, parameter_of, path_text

# Up to 1, eight relative errors in each binade: a median between two of them is known to about one per cent.
_ERRORS = Summary.of([2.0 ** (i / 8) for i in range(-24 * 8, 0)] + [2.0**i for i in range(33)])


@dataclasses.dataclass(frozen=True)
class StoredSlot:
  """What one slot of an optimiser's state lost when a step stored it.

  Relative errors are those of entries that are finite and not zero in float32.

  Attributes:
    slot: its name, such as `mu`.
    dtype: dtype of the codes.
    arrays: number of arrays in the slot, for one batch.
    entries: number of entries that are finite and not zero.
    median: median of the relative errors.
    largest: largest relative error; infinite for a finite entry in a group whose scale is not finite.
    became_zero: share of the entries that are stored as zero.
    groups: number of scales; 0 for a format without scales.
    not_finite: share of the groups whose scale is not finite.
  """

  slot: str
  dtype: str
  arrays: int
  entries: float
  median: float
  largest: float
  became_zero: float
  groups: float
  not_finite: float


def what_is_lost(params: PyTree, stored: PyTree, exact: PyTree) -> dict[str, tuple[Array, Array]]:
  """Returns sums and the largest relative error by slot and dtype (`mu int8`).

  Args:
    params: the parameters; the paths of the state's arrays end in their paths.
    stored: an optimiser's state.
    exact: the same state, with float32 arrays in place of each `Quantized`.
  """
  shapes = {name: leaf.shape for name, leaf in named_leaves(params)}
  found: dict[str, tuple[Array, Array]] = {}

  def look(path: tuple[object, ...], kept: PyTree, x: PyTree) -> None:
    if not isinstance(kept, Quantized) or not x.size:
      return
    name = path_text(path)
    end = parameter_of(name, x.shape, shapes) or ""
    parts = [part for part in name.removesuffix(end).split("/") if part and not part.isdecimal()]
    key = f"{parts[-1] if parts else 'state'} {kept.codes.dtype.name}"
    sums, largest = _of_array(kept, x)
    if key in found:
      sums, largest = sums + found[key][0], jnp.maximum(largest, found[key][1])
    found[key] = (sums, largest)

  jax.tree_util.tree_map_with_path(look, stored, exact, is_leaf=is_quantized)
  return found


def _of_array(kept: Quantized, x: Array) -> tuple[Float32[Array, "..."], Float32[Array, ""]]:
  """Returns counts of relative errors, then of arrays, entries, zeros, groups and broken groups; the largest.

  Args:
    kept: the stored array.
    x: the float32 array behind it.
  """
  back = dequantize(kept)
  there = jnp.isfinite(x) & (x != 0)
  error = jnp.where(jnp.isfinite(back), jnp.abs(back - x) / jnp.abs(x), jnp.inf)
  error = jnp.where(there, error, 0)
  scales = jnp.zeros(0) if kept.scales is None else kept.scales
  count = lambda mask: jnp.sum(mask, dtype=jnp.int32).astype(jnp.float32)
  counts = [1.0, count(there), count(there & (back == 0)), scales.size, count(~jnp.isfinite(scales))]
  return jnp.concatenate([_ERRORS(error), jnp.stack(list(map(jnp.float32, counts)))]), jnp.max(error)


def slot_of(key: str, sums: np.ndarray, largest: float, batches: int) -> StoredSlot:
  """Returns a slot from the results of `what_is_lost`, added up over batches."""
  slot, dtype = key.rsplit(" ", 1)
  arrays, entries, zeros, groups, broken = map(float, sums[-5:])
  return StoredSlot(
    slot=slot,
    dtype=dtype,
    arrays=round(arrays / batches),
    entries=entries,
    median=_median(sums, entries),
    largest=float(largest),
    became_zero=zeros / entries if entries else 0.0,
    groups=groups,
    not_finite=broken / groups if groups else 0.0,
  )


def _median(above: np.ndarray, entries: float) -> float:
  """Returns the median of the errors, with evenly spread logarithms between two edges."""
  half = entries / 2
  edges = np.asarray(_ERRORS.edges[:-1], np.uint32).view(np.float32).astype(np.float64)
  # The number of errors at or above an edge falls from edge to edge.
  i = bisect.bisect_right([-float(n) for n in above[: len(edges)]], -half) - 1
  if i <= 0 or not entries:
    return 0.0
  low, high = edges[i : i + 2]
  if not math.isfinite(high):
    return float(low)
  return float(low * (high / low) ** ((above[i] - half) / (above[i] - above[i + 1])))
