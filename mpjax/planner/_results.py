"""`Plan`: the figures of a plan, and their tables."""

from __future__ import annotations

import dataclasses

from mpjax.planner._figures import PlanFigures
from mpjax.planner.render._plan_text import as_text


@dataclasses.dataclass(frozen=True)
class Plan(PlanFigures):
  """The cost of one step on one target, as `mpjax.plan` returns it; `str()` of it are tables.

  The attributes are those of `PlanFigures`.
  """

  def __str__(self) -> str:
    return as_text([self])
