"""The search: presets, a preset that fails in some modules only, and options of the policy that is found."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax.formats import runs_on
from mpjax.fp8 import Recipe, on_units
from mpjax.policy import Policy, get_policy
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import LEVELS, Module, mixed_policy
from mpjax.tuning._result import Cost, Trial

# If costs are equal, the first one is chosen.
PRESETS = ("bf16", "fp16", "fp8", "tf32", "fp32")
# A change of a module to FP8 that saves less than this share gains nothing; one to half precision still saves
# casts between the module and its neighbours.
_GAINS, _CASTS = 1e-3, 1e-6
_ALIKE = 0.99  # a saving of this share of another one is as good


class Option(NamedTuple):
  """A change of a policy.

  Attributes:
    label: its name.
    applies: what it needs: `fp8`, FP8 products; `tensors`, those with a scale for each tensor; `blocks`,
      units for NVFP4; `state`, an optimiser's state in a search for memory.
    fields: fields of the policy, or of its FP8 recipe.
  """

  label: str
  applies: str
  fields: Mapping[str, Any]


# On the preset fp8 if it fails; its recipe is that of the target.
FP8_FAILS = (
  Option("fp8.recipe=per_channel", "tensors", {"recipe": "per_channel", "gradient_dtype": ""}),
  Option("fp8.backward=compute", "fp8", {"backward": "compute"}),
)
# On the policy that was found. Where two exclude each other, the first one saves more.
OPTIONS = (
  Option(
    "fp8.recipe=nvfp4",
    "blocks",
    {"recipe": "nvfp4", "forward_dtype": "", "gradient_dtype": "", "keep_last": None},
  ),
  Option("fp8.last_layer", "fp8", {"last_layer": True}),
  Option("fp8.attention", "fp8", {"attention": True}),
  Option("fp8.saved_activations", "tensors", {"saved_activations": "fp8"}),
  Option("optimizer_dtype=int8", "state", {"optimizer_dtype": "int8"}),
  Option("optimizer_dtype=bfloat16", "state", {"optimizer_dtype": "bfloat16"}),
)


class _Change(NamedTuple):
  """A module at another level than the base: what it adds to the squared error, and what it saves."""

  module: Module
  level: str
  adds: float
  saves: float


@dataclasses.dataclass
class Search:
  """A search for the cheapest policy within a tolerance.

  Attributes:
    gradients: the float32 gradients, which measure a policy.
    cost_of: the cost of a policy on the target.
    modules: the modules that a policy can treat separately.
    tolerance: the largest error.
    objective: `time` or `memory`.
    units: the target's matrix units.
    say: called with a line before each trial.
    trials: the trials so far, in order.
    notes: sentences for the reader of the result.
  """

  gradients: Gradients
  cost_of: Callable[[Policy], Cost]
  modules: Sequence[Module]
  tolerance: float
  objective: str
  units: str
  say: Callable[[str], None]
  trials: list[Trial] = dataclasses.field(default_factory=list)
  notes: list[str] = dataclasses.field(default_factory=list)

  def among(self, policies: Iterable[tuple[str, Policy]]) -> Trial:
    """Measures policies; returns the cheapest that passes, the first of equal ones.

    Raises:
      ValueError: if no policy passes.
    """
    for label, policy in policies:
      is_preset = label in PRESETS and policy == get_policy(label)
      self._measure(policy, label, "preset" if is_preset else "candidate")
    best = None
    for trial in self.trials:
      if trial.passes and (best is None or self._cheaper(trial.cost, best)):
        best = trial
    if best is None:
      nearest = min(self.trials, key=lambda t: t.error.total)
      raise ValueError(
        f"none of {len(self.trials)} candidates stays below {self.tolerance:.2g}: the smallest error is "
        f"{nearest.error.total:.2g}, with {nearest.label}; add fp32, or give a larger tolerance"
      )
    return best

  def run(self, presets: Sequence[str]) -> Trial:
    """Returns the best trial that starts from some presets, `fp32` among them."""
    best = self.among([(name, get_policy(name)) for name in presets])
    of_presets = {trial.label: trial for trial in self.trials}
    if sum(len(module.paths) for module in self.modules) < 2:
      self.notes.append(
        "the loss function does not have named scopes (jax.named_scope), so its modules cannot be treated "
        "separately"
      )
    fp8 = of_presets.get("fp8")
    for option in FP8_FAILS if fp8 and not fp8.passes else ():
      best = self._with(option, fp8 or best, best)
    best = self._by_module(of_presets, best)
    for option in OPTIONS:
      best = self._with(option, best, best)
    if not best.cost.fits:
      self.notes.append("nothing that was tried fits the target's memory")
    return best

  def _cheaper(self, cost: Cost, than: Trial) -> bool:
    return cost.cheaper(than.cost, self.objective)

  def _measure(self, policy: Policy, label: str, kind: str) -> Trial:
    """Plans and measures a policy, or finds it among the trials."""
    for trial in self.trials:
      if trial.policy == policy:
        return trial
    self.say(f"policy {len(self.trials) + 1}: {label}")
    recipe = self._recipe(policy)
    error = self.gradients.error(policy if recipe is None else get_policy({"base": policy, "fp8": recipe}))
    trial = Trial(label, kind, policy, self.cost_of(policy), error, error.total <= self.tolerance)
    self.trials.append(trial)
    return trial

  def _recipe(self, policy: Policy) -> Recipe | None:
    """Returns what the FP8 recipe of a policy is on the target."""
    return policy.fp8 and on_units(policy.fp8, self.units)

  def _with(self, option: Option, start: Trial, best: Trial) -> Trial:
    """Returns the trial with an option if it is cheaper than the best and passes, else the best."""
    policy = self._changed(start.policy, option)
    if policy is None or not self._cheaper(self.cost_of(policy), best):
      return best
    trial = self._measure(policy, f"{start.label}, {option.label}", "option")
    return trial if trial.passes else best

  def _changed(self, policy: Policy, option: Option) -> Policy | None:
    """Returns a policy with an option; `None` if the option does not apply to it."""
    if option.applies == "state":
      return get_policy({"base": policy, **option.fields}) if self.objective == "memory" else None
    own = self._recipe(policy)
    if policy.fp8 is None or own is None:
      return None
    lacks_blocks = option.applies == "blocks" and not runs_on(self.units, "nvfp4")
    if lacks_blocks or (option.applies == "tensors" and not own.of_tensors):
      return None
    recipe = dataclasses.replace(own if "recipe" in option.fields else policy.fp8, **option.fields)
    return get_policy({"base": policy, "fp8": recipe})

  def _by_module(self, presets: Mapping[str, Trial], best: Trial) -> Trial:
    """Returns a cheaper trial than the best, with the level of a preset that fails in some modules.

    Each module is measured alone at each level. To first order the squares of these errors add up: the
    changes with the least error for their saving are taken while they fit. While the measured error is
    larger than the tolerance, the last one is taken back.
    """
    levels = {name: trial for name, trial in presets.items() if name in LEVELS}
    if not any(self._cheaper(trial.cost, best) for trial in levels.values()):
      return best
    base = levels["bf16"] if "bf16" in levels and levels["bf16"].passes else levels["fp32"]
    tried = [name for name, trial in levels.items() if self._cheaper(trial.cost, base)]
    single = [self._single(base, module, level) for level in tried for module in self.modules]
    taken: list[_Change] = []
    for change in sorted(filter(None, single), key=lambda change: change.adds / change.saves):
      now = {c.module: c for c in taken}
      before = now.pop(change.module, None)
      is_further = before is None or (
        LEVELS.index(change.level) > LEVELS.index(before.level) and change.saves >= _ALIKE * before.saves
      )
      added = change.adds + sum(c.adds for c in now.values())
      if is_further and base.error.total**2 + added <= self.tolerance**2:
        taken.append(change)
    while taken:
      policy, label = self._mixed(base, {change.module: change.level for change in taken})
      if not self._cheaper(self.cost_of(policy), best):
        break
      trial = self._measure(policy, label, "mixed")
      if trial.passes:
        return trial
      taken.pop()
    return best

  def _single(self, base: Trial, module: Module, level: str) -> _Change | None:
    """Measures the base with a module at another level; `None` if that saves nothing."""
    if level == "fp8" and not module.fp8:
      return None
    policy, label = self._mixed(base, {module: level})
    spent = base.cost.spent(self.objective)
    saves = spent - self.cost_of(policy).spent(self.objective)
    if saves <= _GAINS * spent:
      if level == "fp8":
        return None
      saves = _CASTS * max(spent, 1e-30)
    error = self._measure(policy, label, "module").error.total
    return _Change(module, level, max(0.0, error**2 - base.error.total**2), saves)

  def _mixed(self, base: Trial, chosen: Mapping[Module, str]) -> tuple[Policy, str]:
    """Returns the policy with some modules at other levels than a preset's, and its name."""
    levels = {module: chosen.get(module, base.label) for module in self.modules}
    policy = mixed_policy(levels, [path for module in self.modules for path in module.paths])
    most = base.label if len(chosen) == 1 else Counter(levels.values()).most_common(1)[0][0]
    others = [level for level in LEVELS if level != most and level in levels.values()]
    parts = [f"{level} in {_names([m for m in levels if levels[m] == level])}" for level in others]
    return policy, f"{most} but {', '.join(parts)}" if parts else most


def _names(modules: Sequence[Module]) -> str:
  """Returns the last parts of modules' names, at most four."""
  short = [module.name.rpartition("/")[2] or "the rest" for module in modules]
  return ", ".join(short) if len(short) <= 4 else f"{', '.join(short[:3])} and {len(short) - 3} more"
