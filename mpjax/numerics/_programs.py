"""The passes of an inspection for batches of one shape, kept with their steps, and their number of pieces."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from mpjax import _compat
from mpjax._types import PyTree
from mpjax.numerics._batches import most_pieces, rows
from mpjax.numerics._instrumented_step import Seen, is_mean_of_pieces, loss_points, make_pass
from mpjax.numerics._kept_programs import kept, shapes_of
from mpjax.numerics._probes import Point
from mpjax.numerics._summary import Summary
from mpjax.numerics._whole_tensors import condensed, padded_size
from mpjax.step import TrainState, TrainStep, first_of_batch

# A batch runs in pieces if its activations in float32 have at least this many bytes.
_LARGE = 1 << 28

# A pass leaves whole tensors on the device up to this many bytes; other programs summarise them.
_FITS = 1 << 29

# A step, its state, and the summary of each tensor.
Side = tuple[TrainStep, TrainState, Summary]
Points = dict[tuple[str, str], Point]


class Programs(NamedTuple):
  """The passes for batches of one shape, and the points that each observes, by module and name."""

  mine: Callable[[TrainState, PyTree], Seen]
  points: Points
  theirs: Callable[[TrainState, PyTree], Seen] | None
  wide_points: Points
  pieces: int


def programs_for(
  own: Side, wide: Side | None, batch: PyTree, *, scale: float, updates: Summary | None, pieces: int | None
) -> Programs:
  """Returns the passes for batches of a batch's shape, from an earlier inspection if possible.

  Args:
    own: the step under the policy.
    wide: the reference, or `None`.
    batch: a batch; only its shapes matter, unless it is large: then its loss is also computed in pieces.
    scale: loss scale of the policy's run.
    updates: the summary of the ratios of its updates to weights; `None`: its optimiser does not run.
    pieces: as in `inspect_numerics`.

  Raises:
    ValueError: for pieces that do not divide the rows.
  """
  pieces = _choose_pieces(own, wide, batch, pieces)
  whole = pieces == 1 and all(_can_leave_whole(side, batch) for side in (own, wide) if side is not None)
  mine, points = _pass(own, batch, pieces, whole, scale, updates)
  if wide is None:
    return Programs(mine, points, None, {}, pieces)
  # Activations in float32 take twice the memory: values between matrix products are recomputed.
  theirs, wide_points = _pass(wide, batch, pieces, whole, 1.0, save_memory=not whole)
  return Programs(mine, points, theirs, wide_points, pieces)


def _pass(
  side: Side,
  batch: PyTree,
  pieces: int,
  whole: bool,
  scale: float,
  updates: Summary | None = None,
  save_memory: bool = False,
) -> tuple[Callable[[TrainState, PyTree], Seen], Points]:
  step, state, summary = side
  points = _points(step, state, batch, pieces)
  options: dict[str, Any] = {"pieces": pieces, "whole": whole, "save_memory": save_memory}
  # With whole tensors, one program serves every loss scale.
  inside = not whole or any(p.repeated for p in points)
  options |= {"summary": summary, "scale": scale} if inside else {"summary": Summary(())}
  options["updates"] = Summary(()) if whole and updates else updates
  key = ("pass", shapes_of((state, batch)), *options.items())
  run = kept(step, key, lambda: make_pass(step, points, **options))
  by_name = {(point.module, point.name): point for point in points}
  if not whole:
    return run, by_name
  kept_of = (summary, updates or summary)
  return lambda state, batch: condensed(run(state, batch), points, *kept_of, scale), by_name


def _can_leave_whole(side: Side, batch: PyTree) -> bool:
  """Returns whether all observed values fit on the single device together with the state."""
  step, state, _ = side
  arrays = [x for x in jax.tree.leaves((state, batch)) if isinstance(x, jax.Array)]
  # On an explicit mesh, one program cannot take values on different axes as arrays of one type.
  if any(len(x.devices()) > 1 or _compat.is_explicit(jax.typeof(x)) for x in arrays):
    return False
  weights = sum(4 * padded_size(x.size) for x in jax.tree.leaves(state.arrays))
  points = _points(step, state, batch, 1)
  each = [4 * math.prod(p.steps) * padded_size(math.prod(p.shape)) for p in points]
  return 2 * sum(each) + 4 * weights < _FITS


def _points(step: TrainStep, state: TrainState, batch: PyTree, pieces: int) -> list[Point]:
  def find() -> list[Point]:
    part = batch
    if pieces > 1:
      part = jax.eval_shape(lambda batch: first_of_batch(pieces, batch), batch)
    return loss_points(step, state, part)

  return kept(step, ("points", shapes_of((state, batch)), pieces), find)


def _choose_pieces(own: Side, wide: Side | None, batch: PyTree, asked: int | None) -> int:
  """Returns the number of pieces: `asked`; else 1, or more for large activations."""
  if asked is not None:
    if rows(batch) % asked:
      raise ValueError(f"pieces={asked}: expected a divisor of the batch's {rows(batch)} rows")
    return asked
  step, state, _ = own
  # With fewer rows, fewer products run in FP8.
  if wide is None or jax.tree.leaves(state.model_state) or step.policy.fp8:
    return 1
  most = most_pieces(batch)
  reference, wide_state, _ = wide
  if (
    most == 1
    or _can_leave_whole(wide, batch)
    or activations(_points(reference, wide_state, batch, 1)) < _LARGE
  ):
    return 1
  check = lambda: is_mean_of_pieces(reference, wide_state, batch, most)
  key = ("mean of pieces", shapes_of((wide_state, batch)), most)
  return most if kept(reference, key, check) else 1


def activations(points: list[Point]) -> int:
  """Returns the bytes of all observed values in float32."""
  return sum(4 * math.prod((*p.steps, *p.shape)) for p in points)
