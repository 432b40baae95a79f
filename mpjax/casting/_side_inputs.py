"""Arrays that travel with a program beside its own inputs, through every body that needs them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpjax._types import Array


class SideInputs(NamedTuple):
  """Inputs that an emitted program reads beside its own: delayed FP8 scaling's, and probes of tapped values.

  Attributes:
    scales: by the name of an FP8 product's history, float32[3] for lhs, rhs and gradient.
    amax_probes: by number of the FP8 product, float32[3], whose cotangents are the amaxes.
    tap_probes: by number of the tapped value, the array that its tap is handed; with a row for each step of
      the loops that it is in, where those are kept apart.
  """

  scales: dict[str, Array]
  amax_probes: dict[int, Array]
  tap_probes: dict[int, Array]

  def select(self, sites: Collection[str], products: Collection[int], taps: Sequence[int]) -> SideInputs:
    """Returns those of some histories, FP8 products and tapped values."""
    return SideInputs(
      {site: x for site, x in self.scales.items() if site in sites},
      {number: x for number, x in self.amax_probes.items() if number in products},
      {number: self.tap_probes[number] for number in taps},
    )

  @property
  def arrays(self) -> list[Array]:
    """All of them, in one order."""
    return [*self.scales.values(), *self.amax_probes.values(), *self.tap_probes.values()]

  def with_arrays(self, arrays: Sequence[Array]) -> SideInputs:
    """Returns the same with other arrays, in the order of `arrays`."""
    given = iter(arrays)
    return SideInputs(
      {site: next(given) for site in self.scales},
      {number: next(given) for number in self.amax_probes},
      {number: next(given) for number in self.tap_probes},
    )
