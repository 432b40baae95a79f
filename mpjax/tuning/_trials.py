"""Trials of policies: the cost and the gradient error of each."""

from __future__ import annotations

import dataclasses

from mpjax.planner import Plan
from mpjax.policy import Policy
from mpjax.tuning._gradient_error import GradientError

# A policy is cheaper if its first or, for equal ones, its second figure is smaller by these shares. Estimated
# times of one model that differ by less say nothing.
_MARGINS = (0.03, 0.1)
OBJECTIVES = ("time", "memory")


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of a step, from the plan for the target without a compiler.

  Attributes:
    seconds: the estimated time; `None` if the target has no published peak rates.
    peak: bytes of memory at the peak.
    saved: bytes that the forward pass leaves for the backward pass.
    fits: whether the step fits the target's memory; true if not known.
  """

  seconds: float | None
  peak: int
  saved: int
  fits: bool

  @classmethod
  def of(cls, plan: Plan) -> Cost:
    """Returns the cost from a plan."""
    seconds = None if plan.time is None else plan.time.seconds
    return cls(seconds, plan.peak, plan.memory.saved_bytes, not plan.room or plan.peak <= plan.room)

  def figures(self, objective: str) -> tuple[float, float]:
    """Returns the figure that decides, and the one that decides between equals."""
    time, memory = self.seconds or 0.0, float(self.peak)
    return (memory, time) if self.by_memory(objective) else (time, memory)

  def by_memory(self, objective: str) -> bool:
    """Returns whether memory decides."""
    return objective == "memory" or self.seconds is None

  def spent(self, objective: str) -> float:
    """Returns a figure of the same kind that is nearly a sum over modules."""
    return float(self.saved) if self.by_memory(objective) else self.figures(objective)[0]

  def cheaper(self, other: Cost, objective: str) -> bool:
    """Returns whether the cost is lower by more than the error of a plan."""
    if self.fits != other.fits:
      return self.fits
    for mine, theirs, margin in zip(self.figures(objective), other.figures(objective), _MARGINS, strict=True):
      if abs(mine - theirs) > margin * theirs:
        return mine < theirs
    return False


@dataclasses.dataclass(frozen=True)
class Trial:
  """A policy that was tried.

  Attributes:
    label: its name.
    kind: `preset`, `candidate` (given by the user), `module` (one module changed), `mixed` (a set of
      modules), or `option`.
    policy: the policy.
    cost: its cost on the target.
    error: its error against float32.
    passes: whether the error is within the tolerance.
    why: the reason why it was chosen or dropped; empty until the search has ended.
  """

  label: str
  kind: str
  policy: Policy
  cost: Cost
  error: GradientError
  passes: bool
  why: str = ""
