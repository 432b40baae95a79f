"""`TuneResult`: the policy that a search found, all that was tried, and why."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable
from typing import Any, Self

import yaml

from mpjax._render.html_sections import Shown
from mpjax._render.plain_text import bytes_text, table, with_prefix
from mpjax._render.text_sections import TextSection, of_rows
from mpjax.numerics.render import plain_data
from mpjax.policy import Policy, get_policy
from mpjax.tuning._gradient_error import Noise
from mpjax.tuning._picture import save_picture
from mpjax.tuning._trials import Trial

_BAR = 24
_LEFT, _LEFT_OF_MODULES = (0, 1, 6), (0, 3)
_SHORT = {
  "module": "one module",
  "mixed": "set of modules",
  "option": "option",
  "recompute": "option",
  "preset": "preset",
  "candidate": "as given",
}


class TrialTable(tuple[Trial, ...]):
  """The trials of a search, which `result.table(NAME)` shows as text."""

  _text: Callable[[str], str]

  def __new__(cls, trials: Iterable[Trial], text: Callable[[str], str]) -> Self:
    """Returns the trials with the function that makes a table of a name."""
    found = super().__new__(cls, trials)
    found._text = text
    return found

  def __call__(self, name: str) -> str:
    """Returns one of `TuneResult.tables` as text."""
    return self._text(name)


@dataclasses.dataclass(frozen=True, repr=False)
class TuneResult(Shown):
  """The cheapest policy within a tolerance, as `mpjax.tune` found it; `str()` of it is a report.

  Attributes:
    policy: the policy.
    chosen: its trial.
    trials: all of them, in the order in which they were made: cost, error, and why each was dropped.
    tolerance: that the error of the gradient had to stay below, relative to its norm.
    noise: of the gradient.
    loss: in float32, mean over batches.
    target: that the cost is of.
    objective: `time` or `memory`.
    batches, rows: that were looked at.
    notes: sentences for whoever reads it.
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
  def table(self) -> TrialTable:  # type: ignore[override]
    """The trials as a tuple; called with one of `tables`, it returns that table as text."""
    return TrialTable(self.trials, super().table)

  @property
  def recompute(self) -> str | None:
    """What `mpjax.make_train_step` is to compute again; `None` for what the step does anyway."""
    return self.chosen.recompute

  @property
  def front(self) -> tuple[Trial, ...]:
    """The trials that no other beats in both cost and error, the cheapest first."""
    cost = lambda trial: trial.cost.figures(self.objective)
    ordered = sorted(self.trials, key=lambda t: (cost(t), t.error.total))
    found: list[Trial] = []
    for trial in ordered:
      if math.isfinite(trial.error.total) and (not found or trial.error.total < found[-1].error.total):
        found.append(trial)
    return tuple(found)

  @property
  def conclusion(self) -> str:
    """What the search says, in a sentence or two."""
    name = self.chosen.label
    preset = next((t.label for t in self.trials if t.kind == "preset" and t.policy == self.policy), None)
    plain = preset is not None
    if preset == "fp32":
      tried = [t for t in self.trials if t.policy != self.policy]
      nearest = min((t.error.total for t in tried), default=math.inf)
      cheaper = [t for t in tried if t.cost.cheaper(self.chosen.cost, self.objective)]
      if not cheaper:
        return f"{name}: nothing that was tried is cheaper on {self.target}"
      return (
        f"{name}: nothing cheaper stays below {self.tolerance:.2g}; the smallest error is {nearest:.2g}. If "
        "that is good enough, give a larger tolerance"
      )
    others = [t for t in self.trials if t.label in ("bf16", "fp32") and t.label != name]
    gain = " and ".join(f"{self._gain(t)} of {t.label}'s" for t in others)
    said = f"{name}: error {_share(self.chosen.error.total)}, {self._cost(self.chosen)}, {gain}".rstrip(", ")
    return f"the plain preset is as good as anything that was tried: {said}" if plain else said

  def _cost(self, trial: Trial) -> str:
    """Returns the figure that decides."""
    if self.objective == "memory" or trial.cost.seconds is None:
      return f"peak {bytes_text(trial.cost.peak)}"
    return f"time floor {with_prefix(trial.cost.seconds, 's')}"

  def _gain(self, other: Trial) -> str:
    mine, theirs = (t.cost.figures(self.objective)[0] for t in (self.chosen, other))
    return f"{mine / max(theirs, 1e-30):.2f}"

  @property
  def yaml(self) -> str:
    """The `policy` key of a config, with a comment on each line that says why."""
    if self.chosen.kind == "preset":
      return f"policy: {self.chosen.label}  # {self._reason()}\n"
    policy = self.policy
    base = (
      "fp8" if policy.fp8 else {"bfloat16": "bf16", "float16": "fp16"}.get(policy.compute_dtype.name, "fp32")
    )
    usual = get_policy(base).to_dict()
    lines = ["policy:", f"  base: {base}  # {self._reason()}"]
    for key, value in policy.to_dict().items():
      if value == usual[key]:
        continue
      if key == "overrides":
        lines.append("  overrides:  # the first pattern that matches a module decides")
        lines += [f"    {_plain(pattern)}: {_plain(to)}  # {self._why(pattern)}" for pattern, to in value]
      elif key == "fp8":
        lines += ["  fp8:", f"    recipe: {value['recipe']}  # scales of each tensor's own largest entry"]
        for name, setting in value.items():
          if name == "exclude" and setting:
            lines.append("    exclude:  # modules that FP8 costs more than it gives")
            lines += [f"      - {_plain(pattern)}  # {self._why(pattern)}" for pattern in setting]
          elif name != "recipe" and setting != usual["fp8"].get(name):
            lines.append(f"    {name}: {_plain(setting)}  # {_WHY.get(name, _CHEAPER)}")
      elif key == "loss_scaling":
        why = "float16 needs it: its range begins at 6e-8" if value else "the loss is not scaled"
        lines.append(f"  loss_scaling: {_scaling(value)}  # {why}")
      else:
        lines.append(f"  {key}: {_plain(value)}  # {_WHY.get(key, _CHEAPER)}")
    return "\n".join(lines) + "\n"

  def _reason(self) -> str:
    error = self.chosen.error.total
    return f"{self._cost(self.chosen)} on {self.target}; error {_share(error)} of {_share(self.tolerance)}"

  def _why(self, pattern: str) -> str:
    return self.chosen.reasons.get(pattern, _CHEAPER)

  def _heading(self) -> list[str]:
    noise = (
      ""
      if self.noise is None
      else f"noise of the gradient {_share(self.noise.total)} (from {self.noise.how}), "
    )
    many = "1 batch" if self.batches == 1 else f"{self.batches} batches"
    return [
      f"tune: for {self.target}, by {self.objective}; {len(self.trials)} policies tried",
      f"{noise}tolerance {_share(self.tolerance)}; {many} of {self.rows} rows in all",
    ]

  def __str__(self) -> str:
    modules = self._module_rows()
    lines = [
      *self._heading(),
      "",
      *(line for row in table(self._table_rows(), left=_LEFT) for line in row),
      "",
      *(line for row in table(modules, left=_LEFT_OF_MODULES) for line in row),
      *([""] if modules else ()),
      *(f"note: {note}" for note in self.notes),
      "",
      self.conclusion,
      "",
      self.yaml.rstrip(),
      *([] if self.recompute is None else ["train:", f"  recompute: {self.recompute}  # changes no number"]),
    ]
    return "\n".join(lines)

  def _sections(self) -> list[TextSection]:
    tried = of_rows(self._heading()[0], self._table_rows(), left=_LEFT, lines=self._heading()[1:])
    [trials] = tried.groups
    marked = [row._replace(strong=t is self.chosen) for row, t in zip(trials, self.trials, strict=True)]
    sections = [dataclasses.replace(tried, groups=[marked])]
    if modules := self._module_rows():
      # Without the axis, which needs letters of one width.
      rows = [row[:-1] for row in modules]
      sections.append(of_rows("Noise and error by module", rows))
    notes = [f"note: {note}" for note in self.notes]
    return [*sections, TextSection(self.conclusion, lines=[*notes, *self.yaml.splitlines()])]

  def _table_rows(self) -> list[list[str]]:
    rows = [["policy", "what", "time floor", "peak", "error", "of tolerance", ""]]
    for t in self.trials:
      seconds = "" if t.cost.seconds is None else with_prefix(t.cost.seconds, "s")
      over = t.error.total / self.tolerance if self.tolerance else math.inf
      rows.append(
        [
          t.label,
          _SHORT[t.kind],
          seconds,
          bytes_text(t.cost.peak),
          _share(t.error.total),
          f"{over:.2g}",
          t.why,
        ]
      )
    return rows

  def _module_rows(self) -> list[list[str]]:
    """Returns noise and error by module, and where they lie on one axis, of decades."""
    if self.noise is None or not self.noise.modules:
      return []
    errors = self.chosen.error.modules
    values = [*self.noise.modules.values(), *errors.values()]
    values = [v for v in values if v > 0 and math.isfinite(v)]
    if not values:
      return []
    low, high = math.floor(math.log10(max(min(values), 1e-9))), math.ceil(math.log10(max(values)))
    at = lambda v: round((math.log10(max(v, 10.0**low)) - low) / max(high - low, 1) * (_BAR - 1))
    rows = [
      ["parameters of", "noise", f"error of {self.chosen.label}", f"1e{low} to 1e{high}: e error, n noise"]
    ]
    for module, noise in self.noise.modules.items():
      error = errors.get(module, 0.0)
      bar = [" "] * _BAR
      for value, mark in ((noise, "n"), (error, "e")):
        if value > 0:
          place = min(at(value), _BAR - 1) if math.isfinite(value) else _BAR - 1
          bar[place] = "*" if bar[place] not in (" ", mark) else mark
      rows.append([module or "the root", _share(noise), _share(error), "|" + "".join(bar) + "|"])
    return rows

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data; numbers that are not finite are strings, as JSON has none."""
    return plain_data(
      {
        "version": 1,
        "target": self.target,
        "objective": self.objective,
        "batches": self.batches,
        "rows": self.rows,
        "loss": self.loss,
        "tolerance": self.tolerance,
        "noise": None if self.noise is None else dataclasses.asdict(self.noise),
        "policy": self.policy.to_dict(),
        "yaml": self.yaml,
        "conclusion": self.conclusion,
        "chosen": self.chosen.label,
        "recompute": self.recompute,
        "front": [t.label for t in self.front],
        "table": [t.to_dict() for t in self.trials],
        "notes": list(self.notes),
      }
    )

  def save_json(self, path: str | os.PathLike[str]) -> None:
    """Writes `to_dict` as JSON."""
    pathlib.Path(path).write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

  def save_picture(self, path: str | os.PathLike[str]) -> None:
    """Writes the trials as points of cost and error, with the front and the tolerance: .png or .svg.

    Raises:
      ImportError: without matplotlib.
    """
    save_picture(
      path,
      self.trials,
      self.front,
      self.chosen,
      objective=self.objective,
      target=self.target,
      tolerance=self.tolerance,
    )


_CHEAPER = "cheaper, and within the tolerance"
_WHY = {
  "last_layer": "the last layer in FP8 stays within the tolerance",
  "attention": "attention's products in FP8 stay within the tolerance",
  "saved_activations": "keeps less for the backward pass",
  "reduce_dtype": "gradients cross devices in half the bytes",
  "gather_dtype": "parameters that products alone read cross devices in 8 bits",
  "optimizer_dtype": "the optimiser's state in fewer bytes",
  "master_weights": "weights in fewer bytes, whose updates are not lost",
  "param_dtype": "weights in fewer bytes",
  "vector_dtype": "norm scales and biases need all their bits",
}


def _share(value: float) -> str:
  return f"{100 * value:.2g}%" if math.isfinite(value) else "not finite"


def _scaling(value: dict[str, Any] | None) -> str:
  """Returns a loss scaling as YAML in one line: its kind, and what is not as it is by default."""
  usual = get_policy("fp16").to_dict()["loss_scaling"] | {"kind": ""}
  changed = {} if value is None else {key: of for key, of in value.items() if of != usual[key]}
  return _plain(changed if len(changed) > 1 else changed.get("kind"))


def _plain(value: Any) -> str:
  """Returns a value as YAML in one line."""
  return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").strip()
