"""Figures of a step during training, from one more forward and backward pass: histograms and shares."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import PyTree
from mpjax.loss_scale import find_scaler, hide
from mpjax.numerics._arguments import on_axes_of
from mpjax.numerics._pass import Looked, float_leaves, passes
from mpjax.numerics._seen import BINS, Seen, see
from mpjax.numerics._tensors import GRADIENTS
from mpjax.numerics._updates import lost
from mpjax.sharding import on_device
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

  def look(self, state: TrainState, batch: PyTree) -> tuple[Looked, dict[str, Seen], jax.Array | float]:
    """Inspects a step; the result stays on the devices. Call this before the step: it donates the state."""
    with on_axes_of(self._step) as placed:
      state, batch = placed((state, batch))
      if self._step.options.accumulate > 1:  # the first micro-batch, since a backward pass takes one
        batch = first_of_batch(self._step.options.accumulate, batch)
      [run] = passes([(self._step, state)], batch, updates=True)
      parameters = {path: see(leaf) for path, leaf in float_leaves(hide(on_device(state.arrays)))}
      scaler = find_scaler(state.opt_state)
      return run(state, batch), parameters, 1.0 if scaler is None else jnp.copy(scaler.scale)

  def figures(self, looked: tuple[Looked, dict[str, Seen], jax.Array | float]) -> Figures:
    """Returns the figures of a step that `look` has inspected."""
    seen, parameters, scale = jax.device_get(looked)
    dtype = self._step.policy.compute_dtype
    half = dtype.name if dtype.itemsize < 4 else "float16"
    totals: dict[str, Seen] = {}
    histograms = {}
    for kind, path, one in _tensors(seen, parameters):
      totals[kind] = totals[kind] + one if kind in totals else one
      counts = one.histogram[1]
      if there := [i for i, count in enumerate(counts) if count]:
        edges = [float(b) for b in range(BINS[there[0]], BINS[there[-1]] + 2)]
        histograms[f"{kind}s/{path}"] = edges, counts[there[0] : there[-1] + 1]
    totals.pop("update", None)
    shares = {}
    for kind, total in totals.items():
      # What the step has: gradients that a product computes are scaled.
      factor = float(scale) if kind in GRADIENTS else 1.0
      shares[f"{kind}s lost in {half}"] = total.underflow(half, factor)
      shares[f"{kind}s overflown in {half}"] = total.shares(half, factor).overflow
      shares[f"{kind}s zero"] = total.zero / total.count
    moves = np.array([u.counts for u in seen.updates.values()], np.int64).sum(axis=0)
    for name, share in lost(moves).items():
      shares[f"updates lost in {f'bfloat16 with {name}' if name.startswith('int') else name} weights"] = share
    return Figures(shares, histograms)


def _tensors(looked: Looked, parameters: dict[str, Seen]) -> Iterator[tuple[str, str, Seen]]:
  for (kind, name, *index), one in looked.seen():
    if index:
      module, operation = name
      name = "/".join((module, *map(str, index[0]), operation.replace(" ", "_")))
    yield kind, name, one
  for path, one in parameters.items():
    yield "parameter", path, one
  for path, sums in looked.updates.items():
    yield "update", path, sums.ratio
