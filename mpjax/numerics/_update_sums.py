"""What becomes of an optimiser's updates in the formats that weights are kept in: how many are lost."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array
from mpjax.numerics._summary import Summary
from mpjax.numerics._tensors import is_half
from mpjax.patterns import named_leaves
from mpjax.step import TrainState
from mpjax.step._optimizer import corrections_of

# What weights are asked in whether an update moves them: formats, and bfloat16 with corrections.
KEPT_IN = ("bfloat16", "float16", "int8", "int16")
# Of how much of an update they take, there is a figure for float32 weights, too.
_DESCENT_IN = (*KEPT_IN, "float32")


class UpdateSums(NamedTuple):
  """The numbers that are kept of the updates of one parameter; float32.

  Attributes:
    ratio: of |update / weight|, what a `Summary` keeps.
    counts: [1 + formats], of the updates that are not zero, and of those that leave their weight as it is in
      each format of `KEPT_IN`.
    descent: [2 + formats]: the largest update, and in its unit the sum of squares of the updates, and the sum
      of products of each with what the weight moves by, in each format of `KEPT_IN` and in float32.
  """

  ratio: Any
  counts: Any
  descent: Any


def update_sums(summary: Summary, weight: Array, update: Array) -> UpdateSums:
  """Returns what is kept of the updates of a (master) weight."""
  sums = _sums(weight.astype(jnp.float32), update.astype(jnp.float32))
  return sums._replace(ratio=summary(sums.ratio))


@jax.jit
def whole_update_sums(weight: Array, update: Array) -> UpdateSums:
  """Returns the same with the ratios themselves; of arrays as `kept_whole` fills them up."""
  return _sums(weight, update)


def _sums(w: Array, u: Array) -> UpdateSums:
  """Returns the sums, and the ratios themselves."""
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
    ratio,
    jnp.stack([jnp.sum(c, dtype=jnp.int32).astype(jnp.float32) for c in counts]),
    jnp.stack([largest, *map(jnp.sum, sums)]),
  )


def as_numbers(sums: UpdateSums) -> np.ndarray:
  """Returns counts and sums of one batch as float64[...], which add up over batches."""
  descent = np.asarray(sums.descent, np.float64)
  return np.concatenate([np.asarray(sums.counts, np.float64), descent[1:] * descent[0] ** 2])


def lost(numbers: np.ndarray) -> dict[str, float]:
  """Returns the share of the updates (of those that are not zero) that leaves a weight as it is."""
  moved, *stay = numbers[: 1 + len(KEPT_IN)]
  return {name: float(n / moved) if moved else 0.0 for name, n in zip(KEPT_IN, stay, strict=True)}


def descent(numbers: np.ndarray) -> tuple[float, dict[str, float]]:
  """Returns the norm of the updates, and <what weights move by, updates> / |updates|^2 in each format."""
  squared, *products = numbers[1 + len(KEPT_IN) :]
  shares = {
    name: float(x / squared) if squared else 1.0 for name, x in zip(_DESCENT_IN, products, strict=True)
  }
  return math.sqrt(squared) if squared >= 0 else math.nan, shares


def _kept(x: Array, name: str) -> Array:
  """Rounds `x` to what is kept of it, in arithmetic that no compiler takes for a pair of casts."""
  if name in ("int16", "float32"):
    return x
  if name == "int8":  # 24 bits, and ties away from zero, as in `master_weights`
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return jax.lax.bitcast_convert_type((bits + np.uint32(0x80)) & np.uint32(0xFFFFFF00), jnp.float32)
  info = jnp.finfo(name)
  rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=int(info.nmant))
  if info.minexp < -100:
    return rounded
  # Below the normal numbers the spacing is that of the smallest.
  spacing = np.float32(2.0 ** (int(info.minexp) - int(info.nmant)))
  return jnp.where(jnp.abs(x) < 2.0 ** int(info.minexp), jnp.round(x / spacing) * spacing, rounded)


def held_as(state: TrainState) -> dict[str, str]:
  """Returns what half-precision parameters have besides, by tree path, where that is not nothing."""
  corrections = corrections_of(state.opt_state)
  if corrections is None:
    return {}
  have = dict(named_leaves(corrections))
  half = [name for name, p in named_leaves(state.arrays) if is_half(p.dtype.name)]
  return {name: have[name].dtype.name if name in have else "stochastic" for name in half}
