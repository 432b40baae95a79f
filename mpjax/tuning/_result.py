"""`TuneResult`: the policy that a search found, all trials, and the reasons."""

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
from mpjax._render.plain_data import plain_data
from mpjax._render.plain_text import bytes_text, fold, table, with_prefix
from mpjax._render.text_sections import TextSection, answer_lines, of_rows
from mpjax.fp8 import Recipe
from mpjax.policy import Policy, get_policy
from mpjax.tuning._gradient_error import Noise
from mpjax.tuning._picture import save_picture
from mpjax.tuning._trials import Trial

_LEFT = (0, 1, 6)
_WIDTH = 100  # width of the answer
_MOST_YAML, _YAML_WIDTH = 3, 96  # the most lines of the policy in the answer, and their width
_MOST_LABEL = 48  # the most letters of a policy's name in the answer
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
  print(result.policy, result.recompute)  # for mpjax.make_train_step
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
  def recompute(self) -> str | None:
    """The `recompute` argument for `mpjax.make_train_step`; `None` for the step's own choice."""
    return self.chosen.recompute

  @property
  def front(self) -> tuple[Trial, ...]:
    """The trials that no other trial beats in both cost and error, the cheapest first."""
    cost = lambda trial: trial.cost.figures(self.objective)
    ordered = sorted(self.trials, key=lambda t: (cost(t), t.error.total))
    found: list[Trial] = []
    for trial in ordered:
      if math.isfinite(trial.error.total) and (not found or trial.error.total < found[-1].error.total):
        found.append(trial)
    return tuple(found)

  @property
  def conclusion(self) -> str:
    """The conclusion of the search in one or two sentences."""
    others = [t for t in self.trials if t.label in ("bf16", "fp32") and t is not self.chosen]
    gain = " and ".join(f"{self._gain(t)} of {t.label}'s" for t in others)
    what = "memory" if self._by_memory else "time"
    return f"{self.chosen.label}{f', {gain} {what}' if gain else ''}{self._verdict()}"

  def _verdict(self) -> str:
    """Returns why the policy is a plain preset; empty if it is not a preset."""
    preset = next((t.label for t in self.trials if t.kind == "preset" and t.policy == self.policy), None)
    if preset is None:
      return ""
    if preset != "fp32":
      return ": the plain preset; nothing that was tried is cheaper and within the tolerance"
    tried = [t for t in self.trials if t.policy != self.policy]
    if not any(t.cost.cheaper(self.chosen.cost, self.objective) for t in tried):
      return f": nothing that was tried is cheaper on {self.target}"
    nearest = min((t.error.total for t in tried), default=math.inf)
    return (
      f": nothing cheaper stays below {self.tolerance:.2g}; the smallest error is {nearest:.2g}. If that is "
      "good enough, give a larger tolerance"
    )

  @property
  def _by_memory(self) -> bool:
    return self.objective == "memory" or self.chosen.cost.seconds is None

  def _cost(self, trial: Trial) -> str:
    """Returns the decisive figure in words."""
    if self._by_memory or trial.cost.seconds is None:
      return f"peak {bytes_text(trial.cost.peak)}"
    return f"time {with_prefix(trial.cost.seconds, 's')}"

  def _gain(self, other: Trial) -> str:
    mine, theirs = (t.cost.figures(self.objective)[0] for t in (self.chosen, other))
    return f"{mine / max(theirs, 1e-30):.2f}"

  @property
  def yaml(self) -> str:
    """The `policy` key of a config, with the reason for each line as a comment."""
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
        own = Recipe(value["recipe"]).to_dict()
        lines += ["  fp8:", f"    recipe: {value['recipe']}  # {_RECIPES[value['recipe']]}"]
        for name, setting in value.items():
          if name != "recipe" and setting != own.get(name):
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

  def _answer(self) -> list[str]:
    noise = "" if self.noise is None else f" (the gradients' own noise is {_share(self.noise.total)})"
    error = f"error of the gradients {_share(self.chosen.error.total)}, tolerance {_share(self.tolerance)}"
    first = [
      f"tune for {self.target}: {self.chosen.label}{self._verdict()}",
      error + noise,
      *self._compared(),
      self._dropped(),
    ]
    folded = [part for line in first for part in fold(line, _WIDTH).split("\n")]
    return answer_lines([*folded, *self._short_yaml()], [f"note: {note}" for note in self.notes])

  def _compared(self) -> list[str]:
    """Returns a table of cost and error for the chosen policy, bf16 and fp32."""
    chosen = [t.label for t in self.trials if t is self.chosen]
    labels = {label: label if len(label) <= _MOST_LABEL else "this policy" for label in chosen}
    labels |= {label: label for label in ("bf16", "fp32") if label not in labels}
    rows = [row for t, row in zip(self.trials, self._table_rows()[1:], strict=True) if t.label in labels]
    rows = [[labels[row[0]], *row[2:5]] for row in rows]
    rows.sort(key=lambda row: list(labels.values()).index(row[0]))
    return [line for row in table([["", "time", "peak", "error"], *rows]) for line in row]

  def _dropped(self) -> str:
    """Returns the number of trials, and why the cheaper ones were dropped."""
    many = "1 batch" if self.batches == 1 else f"{self.batches} batches"
    tried = f"{len(self.trials)} policies tried on {many} of {self.rows} rows in all"
    cheaper: dict[str, list[str]] = {}
    for trial in self.trials:
      if trial is not self.chosen and trial.cost.cheaper(self.chosen.cost, self.objective):
        cheaper.setdefault(trial.why, []).append(f"{trial.label} ({_share(trial.error.total)})")
    if not cheaper:
      return f"{tried}; none is cheaper"
    more = lambda labels: f" and {len(labels) - 1} more" if labels[1:] else ""
    said = [f"{why}: {labels[0]}{more(labels)}" for why, labels in cheaper.items()]
    return f"{tried}; cheaper ones dropped, {'; '.join(said)}"

  def _short_yaml(self) -> list[str]:
    """Returns the keys of a config in a few lines, without the comments."""
    policy = yaml.safe_load(self.yaml)
    changed = policy if self.recompute is None else policy | {"train": {"recompute": self.recompute}}
    lines = []
    for key, value in changed.items():
      lines += fold(f"{key}: {_plain(value)}", _YAML_WIDTH).replace("\n", "\n  ").split("\n")
    return lines if len(lines) <= _MOST_YAML else ["the policy is the table yaml, and result.yaml"]

  def _sections(self) -> list[TextSection]:
    lines = [self._dropped(), *(f"note: {note}" for note in self.notes)]
    title = f"Policies that were tried for {self.target}, by {self.objective}"
    tried = of_rows(title, self._table_rows(), left=_LEFT, lines=lines, name="policies")
    [trials] = tried.groups
    marked = [row._replace(strong=t is self.chosen) for row, t in zip(trials, self.trials, strict=True)]
    sections = [dataclasses.replace(tried, groups=[marked])]
    if modules := self._module_rows():
      sections.append(of_rows("Noise and error by module", modules, name="modules"))
    text = self.yaml.splitlines()
    if self.recompute is not None:
      text += ["train:", f"  recompute: {self.recompute}  # changes no number"]
    return [*sections, TextSection("Policy as YAML", lines=text, name="yaml")]

  def _table_rows(self) -> list[list[str]]:
    costs = ["time", "cost: peak"] if self._by_memory else ["cost: time", "peak"]
    rows = [["policy", "what", *costs, "error", "of tolerance", "why dropped"]]
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
    """Returns the noise and the error of each module's gradients."""
    if self.noise is None or not self.noise.modules:
      return []
    errors = self.chosen.error.modules
    rows = [["parameters of", "noise", f"error of {self.chosen.label}"]]
    return rows + [
      [module or "the root", _share(noise), _share(errors.get(module, 0.0))]
      for module, noise in self.noise.modules.items()
    ]

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
_RECIPES = {
  "auto": "what the device multiplies best",
  "current": "scales of each tensor's own largest entry",
  "delayed": "scales of each tensor's largest entries in earlier steps",
  "per_channel": "scales of the entries that are summed together",
  "mx": "a power of two for every 32 entries",
  "nvfp4": "4 bits, with a scale for every 16 entries",
}
_WHY = {
  "backward": "products of the backward pass need more digits",
  "last_layer": "the last layer in FP8 stays within the tolerance",
  "attention": "attention's products in FP8 stay within the tolerance",
  "saved_activations": "keeps less for the backward pass",
  "reduce_dtype": "gradients cross devices in half the bytes",
  "gather_dtype": "parameters that only products read cross devices in 8 bits",
  "optimizer_dtype": "the optimiser's state in fewer bytes",
  "master_weights": "weights in fewer bytes, whose updates are not lost",
  "param_dtype": "weights in fewer bytes",
  "vector_dtype": "norm scales and biases need all their bits",
}


def _share(value: float) -> str:
  return f"{100 * value:.2g}%" if math.isfinite(value) else "not finite"


def _scaling(value: dict[str, Any] | None) -> str:
  """Returns a loss scaling as YAML in one line: its kind, and all that differs from the defaults."""
  usual = get_policy("fp16").to_dict()["loss_scaling"] | {"kind": ""}
  changed = {} if value is None else {key: of for key, of in value.items() if of != usual[key]}
  return _plain(changed if len(changed) > 1 else changed.get("kind"))


def _plain(value: Any, width: int = 10**6) -> str:
  """Returns a value as YAML in the flow style, in one line or in lines of `width`."""
  return (
    yaml.safe_dump(value, default_flow_style=True, width=width, sort_keys=False).removesuffix("...\n").strip()
  )
