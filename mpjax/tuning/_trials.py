"""Trials of policies: cost and gradient error of each, stored as soon as they are measured."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax.planner import Plan
from mpjax.policy import Policy, get_policy
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
    wire: the least bytes that a device sends to others.
    fits: whether the step fits the target's memory; true if not known.
  """

  seconds: float | None
  peak: int
  saved: int
  wire: float
  fits: bool

  @classmethod
  def of(cls, plan: Plan) -> Cost:
    """Returns the cost from a plan."""
    return cls(
      seconds=None if plan.time is None else plan.time.seconds,
      peak=plan.peak,
      saved=plan.memory.saved_bytes,
      wire=sum(c.sent for c in plan.collectives),
      fits=not plan.room or plan.peak <= plan.room,
    )

  def figures(self, objective: str) -> tuple[float, float]:
    """Returns the figure that decides, and the one that decides between equals."""
    time, memory = self.seconds or 0.0, float(self.peak)
    return (memory, time) if objective == "memory" or self.seconds is None else (time, memory)

  def spent(self, objective: str) -> float:
    """Returns a figure of the same kind that is nearly a sum over modules."""
    return float(self.saved) if objective == "memory" or self.seconds is None else self.seconds

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
      modules), `option`, or `recompute`.
    policy: the policy.
    cost: its cost on the target.
    error: its error against float32.
    passes: whether the error is within the tolerance.
    why: the reason why it was chosen or dropped; empty until the search has ended.
    predicted: error predicted from single changes; `None` for policies that are not such a set.
    reasons: why modules are not at the cheapest level, by their pattern in the policy.
    recompute: what the backward pass recomputes; `None` for the step's own choice.
  """

  label: str
  kind: str
  policy: Policy
  cost: Cost
  error: GradientError
  passes: bool
  why: str = ""
  predicted: float | None = None
  reasons: Mapping[str, str] = dataclasses.field(default_factory=dict)
  recompute: str | None = None

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data."""
    return {
      "label": self.label,
      "kind": self.kind,
      "policy": self.policy.to_dict(),
      "cost": dataclasses.asdict(self.cost),
      "error": dataclasses.asdict(self.error),
      "passes": self.passes,
      "why": self.why,
      "predicted": self.predicted,
      "reasons": dict(self.reasons),
      "recompute": self.recompute,
    }


class TrialFile:
  """A file with one line for each measured error of a policy; empty without a path.

  A line counts only for the same policy, program, parameters and batches. Costs are planned anew.

  Args:
    path: path of the file, or `None`.
    subject: all that the errors depend on, apart from the policy.
    devices: all else that they depend on if the policy sets dtypes for values that cross devices.

  Raises:
    ValueError: if the path is not a file and a file cannot be made there.
  """

  def __init__(self, path: pathlib.Path | None, subject: str, devices: str = ""):
    self._path = path
    self._subject, self._devices = (
      hashlib.sha256(text.encode()).hexdigest()[:16] for text in (subject, devices)
    )
    self._found: dict[str, GradientError] = {}
    if path is None:
      return
    try:
      path.parent.mkdir(parents=True, exist_ok=True)
      with path.open("a+b") as file:
        file.seek(0)
        content = file.read()
        if content and not content.endswith(b"\n"):  # cut off by an interruption
          file.write(b"\n")
    except OSError as error:
      problem = f"trials={str(path)!r}: {error.strerror}; expected a file, or a place for a new one"
      raise ValueError(problem) from error
    for line in content.decode(errors="replace").splitlines():
      try:
        kept = json.loads(line)
        if kept["subject"] == self._subject:
          found = GradientError(**kept["error"])
          if all(isinstance(x, float) for x in (found.total, found.loss, *found.modules.values())):
            self._found[kept["policy"]] = found
      except (ValueError, KeyError, TypeError, AttributeError):
        continue  # a line that an interruption cut off, or that another version wrote

  def get(self, policy: Policy) -> GradientError | None:
    """Returns the error of a policy; `None` if it was not measured."""
    return self._found.get(self._key(policy))

  def put(self, policy: Policy, error: GradientError) -> None:
    """Stores the error of a policy."""
    self._found[self._key(policy)] = error
    if self._path is None:
      return
    values: Mapping[str, Any] = {
      "subject": self._subject,
      "policy": self._key(policy),
      "error": dataclasses.asdict(error),
    }
    with self._path.open("a") as file:
      file.write(json.dumps(values) + "\n")

  def _key(self, policy: Policy) -> str:
    return f"{policy} over {self._devices}" if policy.across_devices else str(policy)


def as_policy(spec: Any) -> Policy:
  """Returns a candidate's policy.

  Raises:
    ValueError: if it is not a policy; the message names the candidate.
  """
  try:
    return get_policy(spec)
  except ValueError as error:
    raise ValueError(f"candidates: {error}") from error
