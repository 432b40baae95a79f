"""Trials of policies: what each costs and what it does to the gradients, kept as they are made."""

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

# Shares by which the first and the second figure must be smaller for a policy to count as cheaper.
_MARGINS = (0.01, 0.1)
OBJECTIVES = ("time", "memory")


@dataclasses.dataclass(frozen=True)
class Cost:
  """The cost of a step, as the plan for the target says it without a compiler.

  Attributes:
    seconds: floor of the time; `None` where the target has no published peaks.
    busy: sum of the floor's parts (matrix units, memory, interconnect), in seconds; 0 where there are none.
    peak: bytes of the worst moment.
    saved: bytes that the forward pass leaves for the backward pass.
    wire: the least bytes that a device sends to others.
    fits: whether the target's memory holds it; true where that is not known.
  """

  seconds: float | None
  busy: float
  peak: int
  saved: int
  wire: float
  fits: bool

  @classmethod
  def of(cls, plan: Plan) -> Cost:
    """Returns the cost that a plan says."""
    return cls(
      seconds=None if plan.floor is None else plan.floor.seconds,
      busy=0.0 if plan.floor is None else sum(plan.floor.parts.values()),
      peak=plan.peak,
      saved=plan.memory.saved_bytes,
      wire=sum(c.sent for c in plan.collectives),
      fits=not plan.room or plan.peak <= plan.room,
    )

  def figures(self, objective: str) -> tuple[float, float]:
    """Returns what decides, and what decides where that is equal."""
    time, memory = self.seconds or 0.0, float(self.peak)
    return (memory, time) if objective == "memory" or self.seconds is None else (time, memory)

  def spent(self, objective: str) -> float:
    """Returns a figure of the same kind that is close to a sum over modules."""
    return float(self.saved) if objective == "memory" or self.seconds is None else self.busy

  def cheaper(self, other: Cost, objective: str) -> bool:
    """Returns whether it is cheaper by more than a plan can be wrong."""
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
    label: what it is called.
    kind: `preset`, `candidate` (a policy that was given), `module` (one module changed), `mixed` (a set),
      `option`, or `recompute`.
    policy: the policy.
    cost: on the target.
    error: against float32.
    passes: whether the error is within the tolerance.
    why: it was chosen or dropped, in words; empty until the search has ended.
    predicted: error that the sum of single changes says; `None` for what is none.
    reasons: why modules are not at the cheapest level, by the pattern that the policy has for them.
    recompute: what the backward pass computes again; `None` for what the step does anyway.
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
  """Errors of policies that were measured before, in a file with a line each; of none if there is no file.

  A line counts for the same policy, program, parameters and batches alone; what it costs is planned anew.

  Args:
    path: of the file.
    subject: what the errors depend on besides the policy.
    devices: what those depend on of a policy that says in which dtypes something crosses devices.

  Raises:
    ValueError: for a path that is no file, or where none can be made.
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
      problem = f"trials={str(path)!r}: {error.strerror}; expected a file, or where to make one"
      raise ValueError(problem) from error
    for line in content.decode(errors="replace").splitlines():
      try:
        kept = json.loads(line)
        if kept["subject"] == self._subject:
          found = GradientError(**kept["error"])
          if all(isinstance(x, float) for x in (found.total, found.loss, *found.modules.values())):
            self._found[kept["policy"]] = found
      except (ValueError, KeyError, TypeError, AttributeError):
        continue  # a line that an interruption cut off, or one of another version

  def get(self, policy: Policy) -> GradientError | None:
    """Returns the error of a policy; `None` if it was not measured."""
    return self._found.get(self._key(policy))

  def put(self, policy: Policy, error: GradientError) -> None:
    """Keeps the error of a policy."""
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
    ValueError: names the candidate.
  """
  try:
    return get_policy(spec)
  except ValueError as error:
    raise ValueError(f"candidates: {error}") from error
