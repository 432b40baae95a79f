"""Single changes of a preset, each with one module at another level, and the set that saves most."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from mpjax._render.plain_text import percent
from mpjax.tuning._modules import LEVELS, Module
from mpjax.tuning._trials import Cost, Trial

# A change that saves less than this share gains nothing.
_GAINS, _CASTS = 1e-3, 1e-6
# Above this share, equal layers are treated separately.
_WORTH = 0.01


class SingleChanges:
  """The single changes of a preset: the saving of each, and what it adds to the squared error.

  Attributes:
    level: level of the preset.
    base: the preset's trial.
    apart: modules whose layers are treated one by one.
  """

  def __init__(self, level: str, base: Trial, objective: str):
    self.level, self.base = level, base
    self.apart: list[Module] = []
    self._objective = objective
    self._own = base.error.total**2
    self._changes: dict[Module, dict[str, tuple[float, float]]] = {}

  def saves(self, cost: Cost, level: str) -> float:
    """Returns how much a module at a level saves of the preset's cost; 0 if FP8 gains nothing."""
    spent = self.base.cost.spent(self._objective)
    saves = spent - cost.spent(self._objective)
    if saves > _GAINS * spent:
      return saves
    # A module without products still saves the casts between it and the others in half precision.
    return 0.0 if level == "fp8" else _CASTS * spent

  def add(self, module: Module, level: str, saves: float, error: float) -> None:
    """Adds a change: its saving, and the error of the preset with it."""
    self._changes.setdefault(module, {})[level] = (saves, max(0.0, error**2 - self._own))

  def reasons(self, chosen: Mapping[Module, str], objective: str) -> dict[Module, str]:
    """Returns the reasons why modules do not have the level that saves most."""
    found = {}
    for module, changes in self._changes.items():
      most = _saves_most(changes)
      saves, error = changes[most]
      if chosen.get(module) == most:
        continue
      if not math.isfinite(error):
        found[module] = f"in {most} the gradient is not finite"
      else:
        what = "time" if objective == "time" and self.base.cost.seconds is not None else "memory"
        share = saves / max(self.base.cost.spent(objective), 1e-30)
        found[module] = (
          f"{most} would add an error of {error**0.5:.2g} and save {percent(share)} of the {what}"
        )
    return found

  def take_apart(self, module: Module) -> list[str]:
    """Removes a module, whose layers take its place; returns the levels that were tried."""
    self.apart.append(module)
    return list(self._changes.pop(module))

  def levels(self, everything: Iterable[Module], changes: Mapping[Module, str]) -> dict[Module, str]:
    """Returns the level of every module under some changes."""
    return {module: changes.get(module, self.level) for module in everything}

  def predicted(self, chosen: Mapping[Module, str]) -> float:
    """Returns the error of a set of changes, to first order: squares add up."""
    return float((self._own + sum(self._changes[m][level][1] for m, level in chosen.items())) ** 0.5)

  def choose(self, tolerance: float) -> dict[Module, str]:
    """Returns the changes that save most within a tolerance.

    It begins with each module's change that saves most. Until the error fits, it takes back the step that
    removes most error for the saving that it gives up.
    """
    chosen = {module: _saves_most(found) for module, found in self._changes.items()}
    while chosen and not self.predicted(chosen) <= tolerance:
      steps = []
      for module, level in chosen.items():
        saves, error = self._changes[module][level]
        others = {**self._changes[module], "": (0.0, 0.0)}
        for other, (less, smaller) in others.items():
          if smaller < error or other == "":
            steps.append(((error - smaller) / max(saves - less, 1e-30), module, other))
      _, module, other = max(steps, key=lambda step: step[0])
      if other:
        chosen[module] = other
      else:
        del chosen[module]
    # Restore changes that were taken back without need and cost nothing.
    back = [m for m, level in chosen.items() if level == "fp16" and _alike(self._changes[m], "bf16", "fp16")]
    for module in sorted(back, key=lambda m: self._changes[m]["bf16"][1]):
      if self.predicted({**chosen, module: "bf16"}) <= tolerance:
        chosen[module] = "bf16"
    return chosen

  def held_back(self, chosen: Mapping[Module, str]) -> list[Module]:
    """Returns modules that give up a large saving because they do not have the level that saves most."""
    spent = self.base.cost.spent(self._objective)
    found = []
    for module, changes in self._changes.items():
      saves = changes[chosen[module]][0] if module in chosen else 0.0
      if changes[_saves_most(changes)][0] - saves > _WORTH * spent:
        found.append(module)
    return found

  def more(self, chosen: Mapping[Module, str]) -> list[tuple[Module, str]]:
    """Returns further changes for a set, the one with the least error for its saving first."""
    found = [
      (error / saves, i, module, level)
      for i, (module, levels) in enumerate(self._changes.items())
      if module not in chosen
      for level, (saves, error) in levels.items()
    ]
    return [(module, level) for _, _, module, level in sorted(found, key=lambda f: f[:2])]


def _alike(found: Mapping[str, tuple[float, float]], one: str, other: str) -> bool:
  """Returns whether two levels save the same."""
  return one in found and other in found and math.isclose(found[one][0], found[other][0], rel_tol=0.01)


def _saves_most(found: Mapping[str, tuple[float, float]]) -> str:
  """Returns the level that saves most; among equal ones, the one without a loss scale."""
  most = max(saves for saves, _ in found.values())
  alike = [level for level, (saves, _) in found.items() if saves > 0.99 * most]
  return max(alike, key=LEVELS.index)
