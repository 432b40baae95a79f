"""Figures of a step during training, from one more forward and backward pass: histograms and shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import PyTree
from mpjax.loss_scale import find_scaler
from mpjax.numerics._arguments import on_axes_of
from mpjax.numerics._instrumented_step import Seen, loss_points, make_pass
from mpjax.numerics._summary import Summary
from mpjax.numerics._tensors import BINS, GRADIENTS, Magnitudes, binades
from mpjax.numerics._update_sums import as_numbers, descent, lost
from mpjax.step import TrainState, TrainStep, first_of_batch


class Figures(NamedTuple):
  """The figures of a step.

  Attributes:
    shares: shares of values and updates that are lost, by name.
    histograms: by tensor, histograms over log2 of the finite, nonzero magnitudes: edges, and the counts
      between them.
  """

  shares: dict[str, float]
  histograms: dict[str, tuple[list[float], list[float]]]


class Watcher:
  """Inspects steps of a run with one more forward and backward pass. Does not change them."""

  def __init__(self, step: TrainStep):
    self._step = step
    self._summary: Summary = binades()
    self._pass: Any = None
    self._points: list[Any] = []

  def look(self, state: TrainState, batch: PyTree) -> tuple[Seen, jax.Array | float]:
    """Inspects a step; the result stays on the devices. Call this before the step: it donates the state."""
    with on_axes_of(self._step) as placed:
      state, batch = placed((state, batch))
      if self._step.accumulate > 1:  # the first micro-batch, since a backward pass takes one
        batch = first_of_batch(self._step.accumulate, batch)
      if self._pass is None:
        self._points = loss_points(self._step, state, batch)
        self._pass = make_pass(self._step, self._points, self._summary, updates=self._summary)
      scaler = find_scaler(state.opt_state)
      return self._pass(state, batch), 1.0 if scaler is None else jnp.copy(scaler.scale)

  def figures(self, looked: tuple[Seen, jax.Array | float]) -> Figures:
    """Returns the figures of a step that `look` has inspected."""
    seen, scale = jax.device_get(looked)
    dtype = self._step.policy.compute_dtype
    half = dtype.name if dtype.itemsize < 4 else "float16"
    totals: dict[str, Magnitudes] = {}
    histograms = {}
    for kind, path, kept in self._tensors(seen):
      magnitudes = Magnitudes.of(self._summary, kept)
      totals[kind] = totals[kind] + magnitudes if kind in totals else magnitudes
      counts = magnitudes.histogram[1]
      if there := [i for i, count in enumerate(counts) if count]:
        edges = [float(b) for b in range(BINS[there[0]], BINS[there[-1]] + 2)]
        histograms[f"{kind}s/{path}"] = edges, counts[there[0] : there[-1] + 1]
    totals.pop("update", None)
    shares = {}
    for kind, total in totals.items():
      # Gradients of activations include the loss scale; gradients of weights do not.
      factor = float(scale) if kind == GRADIENTS[1] else 1.0
      shares[f"{kind}s lost in {half}"] = total.underflow(half, factor)
      shares[f"{kind}s overflown in {half}"] = total.shares(half, factor).overflow
      shares[f"{kind}s zero"] = total.zero / total.count
    sums = np.sum([as_numbers(u) for u in seen.updates.values()], axis=0)
    for what, by_format in (("updates lost in", lost(sums)), ("descent made by", descent(sums)[1])):
      for name, share in by_format.items():
        shares[f"{what} {f'bfloat16 with {name}' if name.startswith('int') else name} weights"] = share
    return Figures(shares, histograms)

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
