"""Tensors that a pass leaves whole on the device, and the few programs that summarise them.

Inside the pass, every summary would be a separate piece of program, which takes several times as long to
compile as the step. Instead, arrays are padded with zeros to one of few lengths, with one program for each.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array
from mpjax.numerics._probes import Point
from mpjax.numerics._summary import SKETCH, Summary
from mpjax.numerics._update_sums import UpdateSums, whole_update_sums


class Left(NamedTuple):
  """A whole value and its cotangent; also the probe as whose cotangents they leave a program.

  Attributes:
    value: float32[*steps, 1, padded_size].
    gradient: float32[*steps, 1, padded_size].
    reached: [*steps, 1, 1]: 1; 0 if the loss does not depend on the value.
  """

  value: Any
  gradient: Any
  reached: Any

  @staticmethod
  def probe(point: Point) -> Left:
    """Returns the probe for `leave`, for each step of the loops around a point."""
    zeros = lambda size: jnp.zeros((*point.steps, 1, size), jnp.float32)
    size = padded_size(math.prod(point.shape))
    return Left(zeros(size), zeros(size), zeros(1))


@jax.custom_vjp
def leave(x: Array, probe: Left) -> Array:
  """Returns `x`; the probe's cotangent is `x` and its cotangent.

  Args:
    x: a floating array.
    probe: a probe; nothing depends on it.
  """
  return x


def _leave_backward(x: Array, ct: Array) -> tuple[Array, Left]:
  return ct, Left(_filled(x), _filled(ct), jnp.ones([1, 1], jnp.float32))


leave.defvjp(lambda x, probe: (x, x), _leave_backward)


def padded_size(size: int) -> int:
  """Returns the next of few lengths; zeros after an array change only the number of zeros."""
  return SKETCH if size <= SKETCH else 1 << (size - 1).bit_length()


def _filled(x: Array) -> Array:
  """Returns float32[1, padded_size]: the values, then zeros."""
  return jnp.pad(x.astype(jnp.float32).reshape(1, -1), ((0, 0), (0, padded_size(x.size) - x.size)))


def kept_whole(x: Array) -> tuple[Array, np.ndarray]:
  """Returns an array as it is in `Seen` for a single piece, and the number of its values."""
  return _filled(x)[None], np.asarray(x.size, np.float32)


def pair_kept_whole(weight: Array, update: Array) -> tuple[Array, Array, np.ndarray]:
  """Returns the same for a weight and its update."""
  return (kept_whole(weight)[0], *kept_whole(update))


def condensed(seen: Any, points: Sequence[Point], summary: Summary, of_updates: Summary, scale: float) -> Any:
  """Summarises the tensors of a pass that left them whole; the result is on the host.

  Args:
    seen: result of `make_pass` with `whole`.
    points: points of the pass.
    summary: the summary of each tensor.
    of_updates: the summary of each update's ratios.
    scale: the loss scale; gradients of activations are divided by it.
  """
  quick = dataclasses.replace(summary, finite=True), dataclasses.replace(of_updates, finite=True)
  found = _looked_at(seen, points, *quick, scale)
  tensors = (*found.watched, *found.parameters.values(), *found.gradients.values())
  sums = [x[..., len(summary.edges) + 1] for x in tensors]
  sums += [x.ratio[len(of_updates.edges) + 1] for x in found.updates.values()]
  if all(np.isfinite(x).all() for x in sums):
    return found
  return _looked_at(seen, points, summary, of_updates, scale)


def _looked_at(
  seen: Any, points: Sequence[Point], summary: Summary, of_updates: Summary, scale: float
) -> Any:
  """Returns the same; its figures are as right as those of the summaries."""

  def at(point: Point, x: Any) -> Any:
    if point.repeated:
      return x
    gradient = x.gradient if scale == 1 else x.gradient / np.float32(scale)
    return Left(_summaries(x.value, summary), _summaries(gradient, summary), x.reached)

  def of_update(weight: Array, update: Array, count: Array) -> tuple[UpdateSums, Array]:
    sums = whole_update_sums(weight, update)
    return sums._replace(ratio=_summaries(sums.ratio, of_updates)), count

  each = lambda part: {path: (_summaries(x, summary), count) for path, (x, count) in part.items()}
  found = jax.device_get(
    seen._replace(
      watched=[at(point, x) for point, x in zip(points, seen.watched, strict=True)],
      parameters=each(seen.parameters),
      gradients=each(seen.gradients),
      updates={path: of_update(*update) for path, update in seen.updates.items()},
    )
  )
  first = lambda part: {path: _counted(summary, x[0, 0], count) for path, (x, count) in part.items()}
  return found._replace(
    watched=[
      x if point.repeated else _joined(summary, x, math.prod(point.shape))
      for point, x in zip(points, found.watched, strict=True)
    ],
    parameters=first(found.parameters),
    gradients=first(found.gradients),
    updates={
      path: sums._replace(ratio=_counted(of_updates, sums.ratio[0, 0], count))
      for path, (sums, count) in found.updates.items()
    },
  )


@functools.partial(jax.jit, static_argnums=1)
def _summaries(x: Array, summary: Summary) -> Array:
  """Returns float32[..., summary.size] of float32[..., size]."""
  kept = jax.lax.map(summary, x.reshape(-1, x.shape[-1]))
  return kept.reshape(*x.shape[:-1], summary.size)


def _joined(summary: Summary, x: Left, count: float) -> np.ndarray:
  """Returns the summaries of a value and its cotangent, as from `look`: [pieces, *steps, 2, summary.size]."""
  both = np.concatenate([x.value, x.gradient], axis=-2)
  return np.where(x.reached, _counted(summary, both, count), np.float32(0))


def _counted(summary: Summary, kept: np.ndarray, count: float) -> np.ndarray:
  """Returns the summaries of padded arrays, with the number of values before padding."""
  kept = kept.copy()
  kept[..., len(summary.edges)] = count
  return kept
