"""How many of an optimiser's updates are lost in the formats of weights."""

from __future__ import annotations

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


class UpdateSums(NamedTuple):
  """The figures of the updates of one parameter.

  Attributes:
    ratio: summary of |update / weight|.
    counts: int32[1 + formats]: the number of nonzero updates, and of those that do not change their weight in
      each format of `KEPT_IN`.
  """

  ratio: Any
  counts: Any


def update_sums(weight: Array, update: Array) -> UpdateSums:
  """Returns the figures of the updates of a (master) weight."""
  flat = padded(weight)
  return _sums(flat, padded(update), np.uint32(flat.size - weight.size))


@jax.jit
def _sums(w: Array, u: Array, absent: Any) -> UpdateSums:
  moved = u != 0
  ratio = jnp.where(w != 0, jnp.abs(u) / jnp.where(w != 0, jnp.abs(w), 1), 0)
  stays = lambda kept, name: moved & (_kept(kept + u, name) == kept)
  counts = [moved, *(stays(_kept(w, name), name) for name in KEPT_IN)]
  return UpdateSums(
    see_padded(ratio, absent, jnp.float32(1)),
    jnp.stack([jnp.sum(c, dtype=jnp.int32) for c in counts]),
  )


def lost(counts: np.ndarray) -> dict[str, float]:
  """Returns the share of the nonzero updates that do not change a weight, by format."""
  moved, *stay = counts
  return {name: float(n / moved) if moved else 0.0 for name, n in zip(KEPT_IN, stay, strict=True)}


def _kept(x: Array, name: str) -> Array:
  """Rounds `x` to a format, in arithmetic that a compiler does not mistake for a pair of casts."""
  if name in ("int8", "int16"):  # int8: on average
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
