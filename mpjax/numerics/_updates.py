"""How many of an optimiser's updates are lost in the formats of weights."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array
from mpjax.numerics._seen import is_half, padded, see_padded
from mpjax.patterns import named_leaves
from mpjax.sharding import on_device
from mpjax.step import TrainState, TrainStep

# Formats of weights for which lost updates are counted: dtypes, and bfloat16 with corrections.
KEPT_IN = ("bfloat16", "float16", "int8", "int16")
# Formats for which the share of an update that a weight takes is computed.
_DESCENT_IN = (*KEPT_IN, "float32")


class UpdateSums(NamedTuple):
  """The figures of the updates of one parameter; float32.

  Attributes:
    ratio: summary of |update / weight|.
    counts: [1 + formats]: the number of nonzero updates, and of those that do not change their weight in each
      format of `KEPT_IN`.
    descent: [2 + formats]: the largest update. Then, in units of it, the sum of squares of the updates, and
      the sum of products of each update with the weight's change, in each format of `KEPT_IN` and in float32.
  """

  ratio: Any
  counts: Any
  descent: Any


def update_sums(weight: Array, update: Array) -> UpdateSums:
  """Returns the figures of the updates of a (master) weight."""
  flat = padded(weight)
  return _sums(flat, padded(update), np.uint32(flat.size - weight.size))


@jax.jit
def _sums(w: Array, u: Array, absent: Any) -> UpdateSums:
  moved = u != 0
  ratio = jnp.where(w != 0, jnp.abs(u) / jnp.where(w != 0, jnp.abs(w), 1), 0)
  largest = jnp.max(jnp.abs(u))
  unit = u / jnp.where(largest > 0, largest, 1)
  counts, sums = [moved], [unit * unit]
  for name in _DESCENT_IN:
    kept = _kept(w, name)
    after = _kept(kept + u, name)
    if name in KEPT_IN:
      counts.append(moved & (after == kept))
    sums.append(unit * ((after - kept) / jnp.where(largest > 0, largest, 1)))
  return UpdateSums(
    see_padded(ratio, absent, jnp.float32(1)),
    jnp.stack([jnp.sum(c, dtype=jnp.int32).astype(jnp.float32) for c in counts]),
    jnp.stack([largest, *map(jnp.sum, sums)]),
  )


def as_numbers(sums: UpdateSums) -> np.ndarray:
  """Returns counts and sums of one batch as float64[...], which add up over batches."""
  descent = np.asarray(sums.descent, np.float64)
  return np.concatenate([np.asarray(sums.counts, np.float64), descent[1:] * descent[0] ** 2])


def lost(numbers: np.ndarray) -> dict[str, float]:
  """Returns the share of the nonzero updates that do not change a weight, by format."""
  moved, *stay = numbers[: 1 + len(KEPT_IN)]
  return {name: float(n / moved) if moved else 0.0 for name, n in zip(KEPT_IN, stay, strict=True)}


def descent(numbers: np.ndarray) -> tuple[float, dict[str, float]]:
  """Returns the norm of the updates, and <weights' change, updates> / |updates|^2 in each format."""
  squared, *products = numbers[1 + len(KEPT_IN) :]
  shares = {
    name: float(x / squared) if squared else 1.0 for name, x in zip(_DESCENT_IN, products, strict=True)
  }
  return math.sqrt(squared) if squared >= 0 else math.nan, shares


def _kept(x: Array, name: str) -> Array:
  """Rounds `x` to a format, in arithmetic that a compiler does not mistake for a pair of casts."""
  if name in ("int8", "int16", "float32"):  # int8: on average
    return x
  info = jnp.finfo(name)
  rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=int(info.nmant))
  if info.minexp < -100:
    return rounded
  # Below the normal numbers, the spacing is that of the smallest normal numbers.
  spacing = np.float32(2.0 ** (int(info.minexp) - int(info.nmant)))
  return jnp.where(jnp.abs(x) < 2.0 ** int(info.minexp), jnp.round(x / spacing) * spacing, rounded)


def held_as(step: TrainStep, state: TrainState) -> dict[str, str]:
  """Returns the dtype of each half-precision parameter's correction, or `stochastic`, by tree path."""
  masters = step.layers(state).masters
  if masters is None:
    return {}
  have = dict(named_leaves(on_device(masters.correction)))
  half = [name for name, p in named_leaves(state.arrays) if is_half(p.dtype.name)]
  return {name: have[name].dtype.name if name in have else "stochastic" for name in half}
