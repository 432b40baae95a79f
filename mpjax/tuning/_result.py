"""`TuneResult`: the policy that a search found, all trials, and the reasons."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, Self

import yaml

from mpjax._render.plain_text import bytes_text, fold, plain_data, table, with_prefix
from mpjax._render.tables import TEXT_WIDTH, Shown, Table, answer_lines
from mpjax.policy import Policy, as_changes
from mpjax.tuning._gradient_error import GradientError, Noise

_MOST_YAML = 3  # lines of the policy in the answer
_MOST_LABEL = 48  # letters of a policy's name in the answer
_SHORT = {"module": "one module", "mixed": "set of modules", "candidate": "as given"}
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

  def figures(self, objective: str) -> tuple[float, float]:
    """Returns the figure that decides, and the one that decides between equals."""
    time, memory = self.seconds or 0.0, float(self.peak)
    return (memory, time) if self.by_memory(objective) else (time, memory)

  def by_memory(self, objective: str) -> bool:
    """Returns whether memory decides."""
    return objective == "memory" or self.seconds is None

  def spent(self, objective: str) -> float:
    """Returns a figure of the same kind that is nearly a sum over modules."""
    return float(self.saved) if self.by_memory(objective) else self.seconds or 0.0

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


class TrialTable(tuple[Trial, ...]):
  """The trials of a search, which `result.table(NAME)` shows as text."""

  _text: Callable[[str], str]

  def __new__(cls, trials: Iterable[Trial], text: Callable[[str], str]) -> Self:
    """Returns the trials with a function from a table's name to its text."""
    found = super().__new__(cls, trials)
    found._text = text
    return found

  def __call__(self, name: str) -> str:
    """Returns one of `TuneResult.tables` as text."""
    return self._text(name)


@dataclasses.dataclass(frozen=True, repr=False)
class TuneResult(Shown):
  """The cheapest policy within a tolerance, as `mpjax.tune` found it; `str()` gives the short answer.

  ```python
  result = mpjax.tune(loss_fn, params, [batch], tolerance=0.05)
  print(result.policy)  # for mpjax.make_train_step
  print(result.yaml)  # for a config
  print(result.table("policies"))  # one table; result.tables has the names
  ```

  Attributes:
    policy: the policy.
    chosen: its trial.
    trials: all trials in the order of the search, each with cost, error, and the reason why it was dropped.
    tolerance: the largest error of the gradient, relative to its norm.
    noise: noise of the gradient; `None` if it was not needed.
    loss: mean float32 loss over batches.
    target: the target of the costs.
    objective: `time` or `memory`.
    batches, rows: numbers of batches and rows.
    notes: sentences for the reader of the result.
  """

  policy: Policy
  chosen: Trial
  trials: tuple[Trial, ...]
  tolerance: float
  noise: Noise | None
  loss: float
  target: str
  objective: str
  batches: int
  rows: int
  notes: tuple[str, ...] = ()

  @property
  def table(self) -> TrialTable:
    """The trials as a tuple. A call with one of the names in `tables` returns that table as text."""
    return TrialTable(self.trials, super().table)

  @property
  def yaml(self) -> str:
    """The `policy` key of a config."""
    return yaml.safe_dump({"policy": self._spec()}, sort_keys=False)

  def _spec(self) -> Any:
    changes = as_changes(self.policy)
    return changes if changes.keys() - {"base"} else changes["base"]

  def _answer(self) -> list[str]:
    noise = "" if self.noise is None else f" (the gradients' own noise is {_share(self.noise.total)})"
    error = f"error of the gradients {_share(self.chosen.error.total)}, tolerance {_share(self.tolerance)}"
    first = [f"tune for {self.target}: {self.chosen.label}{self._verdict()}", error + noise]
    text = yaml.safe_dump(self._spec(), default_flow_style=True, width=10**6, sort_keys=False)
    policy = text.removesuffix("...\n").strip()
    lines = fold(f"policy: {policy}", TEXT_WIDTH - 2).replace("\n", "\n  ").split("\n")
    if len(lines) > _MOST_YAML:
      lines = ["the policy is the table yaml, and result.yaml"]
    notes = [f"note: {note}" for note in self.notes]
    return answer_lines([*first, *self._compared(), self._dropped(), *lines], notes)

  def _verdict(self) -> str:
    """Returns why the policy is a plain preset; empty if it is not a preset."""
    if self.chosen.kind != "preset":
      return ""
    if self.chosen.label != "fp32":
      return ": the plain preset; nothing that was tried is cheaper and within the tolerance"
    others = [trial for trial in self.trials if trial is not self.chosen]
    if not any(trial.cost.cheaper(self.chosen.cost, self.objective) for trial in others):
      return f": nothing that was tried is cheaper on {self.target}"
    least = min(trial.error.total for trial in others)
    return (
      f": nothing cheaper stays below {self.tolerance:.2g}; the smallest error is {least:.2g}. If that is "
      "good enough, give a larger tolerance"
    )

  def _compared(self) -> list[str]:
    """Returns a table of cost and error for the chosen policy, bf16 and fp32."""
    others = [t for t in self.trials if t.label in ("bf16", "fp32") and t is not self.chosen]
    rows = [[t.label, *_figures(t)] for t in (self.chosen, *others)]
    if len(rows[0][0]) > _MOST_LABEL:
      rows[0][0] = "this policy"
    return [line for row in table([["", "time", "peak", "error"], *rows]) for line in row]

  def _dropped(self) -> str:
    """Returns the number of trials, and why the cheaper ones were dropped."""
    many = "1 batch" if self.batches == 1 else f"{self.batches} batches"
    tried = f"{len(self.trials)} policies tried on {many} of {self.rows} rows in all"
    cheaper: dict[str, list[str]] = {}
    for trial in self.trials:
      if trial.cost.cheaper(self.chosen.cost, self.objective):
        cheaper.setdefault(trial.why, []).append(f"{trial.label} ({_share(trial.error.total)})")
    if not cheaper:
      return f"{tried}; none is cheaper"
    more = lambda labels: f" and {len(labels) - 1} more" if labels[1:] else ""
    said = [f"{why}: {labels[0]}{more(labels)}" for why, labels in cheaper.items()]
    return f"{tried}; cheaper ones dropped, {'; '.join(said)}"

  def _sections(self) -> list[Table]:
    by_memory = self.chosen.cost.by_memory(self.objective)
    costs = ["time", "cost: peak"] if by_memory else ["cost: time", "peak"]
    trials = [["policy", "what", *costs, "error", "of tolerance", "why dropped"]]
    trials += [
      [t.label, _SHORT.get(t.kind, t.kind), *_figures(t), f"{t.error.total / self.tolerance:.2g}", t.why]
      for t in self.trials
    ]
    lines = [self._dropped(), *(f"note: {note}" for note in self.notes)]
    title = f"Policies that were tried for {self.target}, by {self.objective}"
    errors = [[module or "the root", _share(error)] for module, error in self.chosen.error.modules.items()]
    modules = [["parameters of", f"error of {self.chosen.label}"], *errors]
    return [
      Table("policies", title, trials, lines, left=(0, 1, 6)),
      Table("modules", "Error by module", modules),
      Table("yaml", "Policy as YAML", lines=self.yaml.splitlines()),
    ]

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data; numbers that are not finite are strings, as JSON has none."""
    same = ("target", "objective", "batches", "rows", "loss", "tolerance", "yaml")
    return plain_data(
      {name: getattr(self, name) for name in same}
      | {
        "noise": None if self.noise is None else dataclasses.asdict(self.noise),
        "policy": self.policy.to_dict(),
        "chosen": self.chosen.label,
        "table": [dataclasses.asdict(t) | {"policy": t.policy.to_dict()} for t in self.trials],
        "notes": self.notes,
      }
    )


def _figures(trial: Trial) -> list[str]:
  """Returns time, peak and error as text."""
  seconds = trial.cost.seconds
  time = "" if seconds is None else with_prefix(seconds, "s")
  return [time, bytes_text(trial.cost.peak), _share(trial.error.total)]


def _share(value: float) -> str:
  return f"{100 * value:.2g}%" if math.isfinite(value) else "not finite"
