"""Inputs of an emitted program that the user's program does not have; bodies that read them get them, too."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax

from mpjax._types import Array, PyTree


class SideInputs(NamedTuple):
  """The scales and probes of delayed FP8 scaling, and the probes of tapped values.

  Attributes:
    scales: float32[3] for lhs, rhs and gradient of an FP8 product, by the name of its history.
    amax_probes: float32[3] by number of the FP8 product; their cotangents are the amaxes.
    tap_probes: the probes of a tap, by number of the tapped value: an array, or a tree of arrays, with
      a row for each step of the loops around the value.
  """

  scales: dict[str, Array]
  amax_probes: dict[int, Array]
  tap_probes: dict[int, PyTree]

  def select(self, sites: Collection[str], products: Collection[int], taps: Sequence[int]) -> SideInputs:
    """Returns the inputs for some histories, FP8 products and tapped values."""
    return SideInputs(
      {site: x for site, x in self.scales.items() if site in sites},
      {number: x for number, x in self.amax_probes.items() if number in products},
      {number: self.tap_probes[number] for number in taps},
    )

  @property
  def arrays(self) -> list[Array]:
    """All arrays, in one order."""
    return jax.tree.leaves(self)

  def with_arrays(self, arrays: Sequence[Array]) -> SideInputs:
    """Returns the same inputs with other arrays, in the order of `arrays`."""
    return jax.tree.unflatten(jax.tree.structure(self), arrays)
