"""Histograms of a run's numbers for TensorBoard, every `numerics.every` steps."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import PyTree
from mpjax.loss_scale._state_access import find_scaler
from mpjax.numerics._instrumented_step import Seen, loss_points, make_pass
from mpjax.numerics._summary import Summary
from mpjax.numerics._tensors import BINS, GRADIENTS, Magnitudes, binades
from mpjax.numerics._update_sums import as_numbers, descent, lost
from mpjax.step import TrainState, TrainStep
from mpjax.step._micro_batches import first_of_batch
from mpjax.train.loop._events import Events


class Watcher:
  """Inspects steps of a run with one more forward and backward pass. Does not change them."""

  def __init__(self, step: TrainStep, every: int):
    self._step, self._every = step, every
    self._summary: Summary = binades()
    self._pass: Any = None
    self._points: list[Any] = []

  def due(self, step: int) -> bool:
    """Returns whether to inspect a step."""
    return bool(self._every) and step % self._every == 0

  def look(self, state: TrainState, batch: PyTree) -> tuple[Seen, jax.Array | float]:
    """Inspects a step; the result stays on the devices. Call this before the step: it donates the state."""
    if self._step.accumulate > 1:  # the first micro-batch, since a backward pass takes one
      batch = first_of_batch(self._step.accumulate, batch)
    if self._pass is None:
      self._points = loss_points(self._step, state, batch)
      self._pass = make_pass(self._step, self._points, self._summary, updates=self._summary)
    scaler = find_scaler(state.opt_state)
    return self._pass(state, batch), 1.0 if scaler is None else jnp.copy(scaler.scale)

  def write(self, events: Events, step: int, looked: tuple[Seen, jax.Array | float]) -> None:
    """Writes the result: for each tensor a histogram of log2 of the magnitudes, and shares by kind."""
    seen, scale = jax.device_get(looked)
    name = self._step.policy.compute_dtype.name
    half = name if self._step.policy.compute_dtype.itemsize < 4 else "float16"
    totals: dict[str, Magnitudes] = {}
    for kind, path, kept in self._tensors(seen):
      magnitudes = Magnitudes.of(self._summary, kept)
      _histogram(events, f"{kind}s/{path}", magnitudes, step)
      totals[kind] = totals[kind] + magnitudes if kind in totals else magnitudes
    for kind, total in totals.items():
      if kind == "update":
        continue
      # Gradients of activations include the loss scale; gradients of weights do not.
      factor = float(scale) if kind == "weight gradient" else 1.0
      there = total.above[0] or 1.0
      shares = total.shares(half, factor)
      tag = f"numerics/{kind}s"
      events.add_scalar(f"{tag} lost in {half}", shares.underflow * total.count / there, step)
      events.add_scalar(f"{tag} overflown in {half}", shares.overflow, step)
      events.add_scalar(f"{tag} zero", total.zero / total.count, step)
    sums = np.sum([as_numbers(u) for u in seen.updates.values()], axis=0)
    of_updates = {"updates lost in": lost(sums), "descent made by": descent(sums)[1]}
    for what, by_format in of_updates.items():
      for name, share in by_format.items():
        weights = f"bfloat16 with {name}" if name.startswith("int") else name
        events.add_scalar(f"numerics/{what} {weights} weights", share, step)

  def _tensors(self, seen: Seen) -> Iterator[tuple[str, str, Any]]:
    for point, kept in zip(self._points, seen.watched, strict=True):
      for index in np.ndindex(*point.steps):
        path = "/".join((point.module, *map(str, index), point.name.replace(" ", "_")))
        for row, kind in enumerate(("activation", GRADIENTS[0])):
          values = kept[(0, *index, row)]
          if values[len(self._summary.edges)]:  # else the loss does not depend on it
            yield kind, path, values
    for kind, part in (("parameter", seen.parameters), (GRADIENTS[1], seen.gradients)):
      for path, kept in part.items():
        yield kind, path, kept
    for path, sums in seen.updates.items():
      yield "update", path, sums.ratio


def _histogram(events: Events, tag: str, magnitudes: Magnitudes, step: int) -> None:
  """Writes one histogram over log2 of the finite, nonzero magnitudes."""
  _, counts = magnitudes.histogram
  there = [i for i, count in enumerate(counts) if count]
  if not there:
    return
  first, last = there[0], there[-1]
  values = np.asarray(counts[first : last + 1])
  centres = np.asarray(BINS[first : last + 1]) + 0.5
  events.add_histogram(
    tag,
    # With an empty bucket on each side; TensorBoard draws what is between them.
    limits=[float(b) for b in range(BINS[first], BINS[last] + 2)] + [math.inf],
    counts=[0.0, *values.tolist(), 0.0],
    total=float(values @ centres),
    squares=float(values @ centres**2),
    step=step,
  )
