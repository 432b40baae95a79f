"""Tensors that a pass leaves whole on the device, and the few programs that look at all of them.

Compiled with the pass, every summary is a piece of program of its own, which takes several times as long to
compile as the step. Arrays are filled up with zeros to one of few lengths, for which there is one program.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array
from mpjax.casting._probes import Point
from mpjax.numerics._summary import Summary, Whole, padded_size
from mpjax.numerics._update_sums import whole_update_sums


def whole_size(point: Point, summary: Summary) -> int:
  """Returns the length in which a value is kept whole: not that of a summary, by which the two are told."""
  size = padded_size(math.prod(point.shape)) + 1
  return size + (size == summary.size)


def kept_whole(x: Array) -> tuple[Array, np.ndarray]:
  """Returns an array as a pair of one, and the number of its values."""
  return Whole(padded_size(x.size) + 1)(x)[None], np.asarray(x.size, np.float32)


def pair_kept_whole(weight: Array, update: Array) -> tuple[Array, Array, np.ndarray]:
  """Returns a weight and its update, filled up, and the number of their values."""
  fill = lambda x: jnp.pad(x.astype(jnp.float32).reshape(-1), (0, padded_size(x.size) - x.size))
  return fill(weight), fill(update), np.asarray(weight.size, np.float32)


def condensed(seen: Any, points: Sequence[Point], summary: Summary, scale: float) -> Any:
  """Returns the `Seen` of a pass that looks at each tensor, of one that keeps them whole; on the host.

  Args:
    seen: of `make_pass` with `whole`, at a scale of 1.
    points: of the pass.
    summary: what is kept of each tensor.
    scale: what the gradients of activations are divided by: the loss scale.
  """
  units = np.asarray([1.0, scale], np.float32)
  looked = []
  for point, x in zip(points, seen.watched, strict=True):
    if not point.repeated:
      size = math.prod(point.shape)
      x = _summaries(x, units, np.float32(size), summary, padded_size(size))
    looked.append(x)
  one = np.ones(1, np.float32)
  row = lambda x, count: _summaries(x, one, count, summary, x.shape[-1] - 1)
  each = lambda part: {path: row(x, count) for path, (x, count) in part.items()}
  updates = {}
  for path, (weight, update, count) in seen.updates.items():
    sums = whole_update_sums(weight, update)
    updates[path] = sums._replace(ratio=row(sums.ratio, count))
  found = seen._replace(
    watched=looked, parameters=each(seen.parameters), gradients=each(seen.gradients), updates=updates
  )
  found = jax.device_get(found)
  first = lambda part: {path: x[0] for path, x in part.items()}
  return found._replace(
    parameters=first(found.parameters),
    gradients=first(found.gradients),
    updates={path: sums._replace(ratio=sums.ratio[0]) for path, sums in found.updates.items()},
  )


@functools.partial(jax.jit, static_argnums=(3, 4))
def _summaries(x: Array, units: Array, count: Array, summary: Summary, size: int) -> Array:
  """Returns float32[..., k, summary.size] of float32[..., k, above size], each in its unit: float32[k]."""

  def of_row(row: tuple[Array, Array]) -> Array:
    values, unit = row
    return jnp.where(values[-1] != 0, _counted(summary, summary(values[:size] / unit), count), 0)

  each = jnp.broadcast_to(units, x.shape[:-1]).reshape(-1)
  rows = jax.lax.map(of_row, (x.reshape(-1, x.shape[-1]), each))
  return rows.reshape(*x.shape[:-1], summary.size)


def _counted(summary: Summary, kept: Array, count: Array) -> Array:
  """Returns what is kept of an array that was filled up, with its own number of values."""
  return kept.at[len(summary.edges)].set(count)
