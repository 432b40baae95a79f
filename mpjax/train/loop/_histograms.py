"""Histograms of a run's numbers for its trackers, every `numerics.every` steps."""

from __future__ import annotations

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
from mpjax.train.loop._trackers import Trackers


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

  def write(self, trackers: Trackers, step: int, looked: tuple[Seen, jax.Array | float]) -> None:
    """Writes the result: for each tensor a histogram of log2 of the magnitudes, and shares by kind."""
    seen, scale = jax.device_get(looked)
    name = self._step.policy.compute_dtype.name
    half = name if self._step.policy.compute_dtype.itemsize < 4 else "float16"
    totals: dict[str, Magnitudes] = {}
    for kind, path, kept in self._tensors(seen):
      magnitudes = Magnitudes.of(self._summary, kept)
      _histogram(trackers, f"{kind}s/{path}", magnitudes, step)
      totals[kind] = totals[kind] + magnitudes if kind in totals else magnitudes
    shares: dict[str, float] = {}
    for kind, total in totals.items():
      if kind == "update":
        continue
      # Gradients of activations include the loss scale; gradients of weights do not.
      found = total.shares(half, float(scale) if kind == "weight gradient" else 1.0)
      shares |= {
        f"{kind}s lost in {half}": found.underflow * total.count / (total.above[0] or 1.0),
        f"{kind}s overflown in {half}": found.overflow,
        f"{kind}s zero": total.zero / total.count,
      }
    sums = np.sum([as_numbers(u) for u in seen.updates.values()], axis=0)
    of_updates = {"updates lost in": lost(sums), "descent made by": descent(sums)[1]}
    for what, by_format in of_updates.items():
      for name, share in by_format.items():
        weights = f"bfloat16 with {name}" if name.startswith("int") else name
        shares[f"{what} {weights} weights"] = share
    values = {f"numerics/{name}": float(share) for name, share in shares.items()}
    trackers.each(lambda tracker: tracker.scalars(step, values))

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


def _histogram(trackers: Trackers, name: str, magnitudes: Magnitudes, step: int) -> None:
  """Writes one histogram over log2 of the finite, nonzero magnitudes."""
  _, counts = magnitudes.histogram
  there = [i for i, count in enumerate(counts) if count]
  if there:
    first, last = there[0], there[-1]
    edges = [float(b) for b in range(BINS[first], BINS[last] + 2)]
    trackers.each(lambda tracker: tracker.histogram(step, name, edges, counts[first : last + 1]))
