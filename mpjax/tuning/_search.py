"""The search: presets as they are, then the cheaper ones that fail, with some modules at a safer level."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from mpjax._plain_text import percent
from mpjax.planner import Plan
from mpjax.policy import Policy, get_policy
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import LEVELS, Module, mixed_policy, pattern_of
from mpjax.tuning._trials import Cost, Trial, TrialFile

# In the order in which a user would take them where they cost the same.
PRESETS = ("bf16", "fp16", "fp8", "tf32", "fp32")
# A change that saves less than this share gains nothing.
_GAINS, _CASTS = 1e-3, 1e-6
# From which share on layers that are alike are told apart.
_WORTH = 0.01
# How often a set that fails is made smaller, and one that passes larger; alike layers that are told apart.
_BACK_OFF, _ADD, _LAYERS = 6, 3, 16
# What is tried on top of the policy found: (what it applies to, fields).
_OPTIONS: tuple[tuple[str, str, dict[str, object]], ...] = (
  ("fp8", "fp8.last_layer", {"last_layer": True}),
  ("fp8", "fp8.attention", {"attention": True}),
  ("fp8", "fp8.saved_activations", {"saved_activations": "fp8"}),
  ("state", "optimizer_dtype=bfloat16", {"optimizer_dtype": "bfloat16"}),
  ("state", "optimizer_dtype=int8", {"optimizer_dtype": "int8"}),
  (
    "masters",
    "param_dtype=bfloat16,master_weights=int16",
    {"param_dtype": "bfloat16", "master_weights": "int16", "vector_dtype": "float32"},
  ),
  (
    "masters",
    "param_dtype=bfloat16,master_weights=int8",
    {"param_dtype": "bfloat16", "master_weights": "int8", "vector_dtype": "float32"},
  ),
)


class OutOfTime(Exception):
  """Raised where the time for the search is over."""


class Search:
  """A search for the cheapest policy within a tolerance.

  Attributes:
    trials: so far, in the order in which they were made.
    notes: sentences for whoever reads the result.
  """

  def __init__(
    self,
    gradients: Gradients,
    plan_of: Callable[[Policy, str | None], Plan],
    modules: Sequence[Module],
    tolerance: float,
    objective: str,
    kept: TrialFile,
    deadline: float | None,
    progress: Callable[[str], None],
    has_state: bool,
    recompute: Sequence[str],
  ):
    self._gradients, self._plan_of, self._modules = gradients, plan_of, list(modules)
    self._paths = [path for module in modules for path in module.paths]
    self._tolerance, self._objective, self._kept = tolerance, objective, kept
    self._deadline, self._say, self._has_state, self._recompute = deadline, progress, has_state, recompute
    self._costs: dict[Policy, Cost] = {}
    self.trials: list[Trial] = []
    self.notes: list[str] = []

  def try_policy(
    self,
    policy: Policy,
    label: str,
    kind: str,
    *,
    predicted: float | None = None,
    reasons: Mapping[str, str] | None = None,
    always: bool = False,
  ) -> Trial:
    """Plans and measures a policy, or finds it among the trials.

    Raises:
      OutOfTime: if the time is over; not with `always`.
    """
    for trial in self.trials:
      if trial.policy == policy:
        return trial
    cost, error = self._cost(policy), self._kept.get(policy)
    if error is None:
      self._check_time(always)
      self._say(label)
      error = self._gradients.error(policy)
      self._kept.put(policy, error)
    passes = error.total <= self._tolerance
    trial = Trial(label, kind, policy, cost, error, passes, predicted=predicted, reasons=reasons or {})
    self.trials.append(trial)
    return trial

  def _cost(self, policy: Policy) -> Cost:
    """Returns what a policy costs; planned once."""
    if policy not in self._costs:
      self._costs[policy] = Cost.of(self._plan_of(policy, None))
    return self._costs[policy]

  def _check_time(self, always: bool = False) -> None:
    if not always and self._deadline is not None and time.monotonic() > self._deadline:
      raise OutOfTime

  def whole(self, policies: Iterable[tuple[str, Policy]]) -> Trial | None:
    """Tries policies as they are; returns the cheapest that passes, of equal ones the first."""
    best = None
    for label, policy in policies:
      is_preset = label in PRESETS and policy == get_policy(label)
      trial = self.try_policy(policy, label, "preset" if is_preset else "candidate", always=True)
      if trial.passes and (best is None or trial.cost.cheaper(best.cost, self._objective)):
        best = trial
    return best

  def run(self, presets: Sequence[str]) -> Trial:
    """Returns the best trial; ends early if the time is over."""
    best = self.whole([(name, get_policy(name)) for name in presets])
    assert best is not None, "fp32 has no error"
    if len(self._paths) < 2:
      self.notes.append(
        "the loss function has no named scopes, so that no module can be treated apart (jax.named_scope)"
      )
    try:
      best = self._by_module(best)
      best = self._with_options(best)
    except OutOfTime:
      best = self._best()
      self.notes.append(
        "the time was over before the search was: more of --minutes may find a cheaper policy"
      )
    best = self._with_recompute(best)
    if not best.cost.fits:
      self.notes.append("nothing that was tried fits the target's memory")
    return best

  def _best(self) -> Trial:
    best = None
    for trial in self.trials:
      if trial.passes and (best is None or trial.cost.cheaper(best.cost, self._objective)):
        best = trial
    assert best is not None
    return best

  def _by_module(self, best: Trial) -> Trial:
    """Returns a cheaper trial than the best preset, in which some modules alone are at a cheaper level."""
    trials = {t.label: t for t in self.trials if t.label in LEVELS}
    cheaper = [t for t in trials.values() if t.cost.cheaper(best.cost, self._objective)]
    if not cheaper or best.label not in LEVELS:
      return best
    # Where bfloat16 as a whole is good enough, what is below it alone is in question.
    base = best if best.label == "bf16" else trials["fp32"]
    options = _Options(base, self._objective)
    for name, trial in trials.items():
      for module in self._modules:
        if name in module.levels and trial.cost.cheaper(base.cost, self._objective):
          self._single(options, module, name)
    chosen = options.choose(self._tolerance)
    for module in options.held_back(chosen):
      if 1 < len(module.paths) <= _LAYERS:
        levels = options.take_apart(module)
        for part in module.split():
          for level in levels:
            if level in part.levels:
              self._single(options, part, level)
    return self._measure(options, best)

  def _single(self, options: _Options, module: Module, level: str) -> None:
    """Measures a preset with one module changed, if that saves something."""
    levels = options.levels(self._everything(options, module), {module: level})
    policy = mixed_policy(levels, self._paths)
    self._check_time()
    saves = options.saves(self._cost(policy), level)
    if saves > 0:
      label = f"{options.base.label} but {level} in {_names([module])}"
      options.add(module, level, saves, self.try_policy(policy, label, "module").error.total)

  def _everything(self, options: _Options, module: Module | None = None) -> list[Module]:
    """Returns all modules, those that are taken apart in their parts."""
    found: list[Module] = []
    for each in self._modules:
      apart = each in options.apart or (module is not None and set(module.paths) < set(each.paths))
      found += each.split() if apart else [each]
    return found

  def _measure(self, options: _Options, best: Trial) -> Trial:
    """Measures the best set, makes it smaller while it fails, and larger while there is room."""
    allowed, passed, tried = self._tolerance, None, 0
    everything = self._everything(options)
    while tried < _BACK_OFF:
      chosen = options.choose(allowed)
      if not chosen:
        break
      trial = self._mixed(options, everything, chosen)
      tried += 1
      if trial.passes:
        passed = (trial, chosen)
        break
      predicted = options.predicted(chosen)
      self.notes.append(
        f"{trial.label}: measured error {trial.error.total:.2g} where the sum of single changes is "
        f"{predicted:.2g}: made smaller"
      )
      # Below what this set was predicted to be, so that the next one is another.
      allowed = min(allowed, predicted) * 0.7
    if passed is None:
      return best
    for module, level in options.more(passed[1])[:_ADD]:
      trial = self._mixed(options, everything, {**passed[1], module: level})
      if trial.passes and trial.cost.cheaper(passed[0].cost, self._objective):
        passed = (trial, {**passed[1], module: level})
    return passed[0] if passed[0].cost.cheaper(best.cost, self._objective) else best

  def _mixed(self, options: _Options, everything: list[Module], chosen: Mapping[Module, str]) -> Trial:
    reasons = {pattern_of(m, self._paths): why for m, why in options.reasons(chosen, self._objective).items()}
    return self.try_policy(
      mixed_policy(options.levels(everything, chosen), self._paths),
      _set_label(options, everything, chosen),
      "mixed",
      predicted=options.predicted(chosen),
      reasons=reasons,
    )

  def _with_options(self, best: Trial) -> Trial:
    """Returns the trial with what else makes it cheaper: FP8 in more places, state in fewer bytes."""
    plain, taken = best.label, dict[str, str]()
    for applies, label, fields in _OPTIONS:
      policy = best.policy
      if applies == "fp8":
        if policy.fp8 is None:
          continue
        recipe = dataclasses.replace(policy.fp8, **fields)  # type: ignore[arg-type]
        changed = get_policy({"base": policy, "fp8": recipe})
      else:
        half = ("bfloat16",) if applies == "masters" else ("bfloat16", "float16")
        if self._objective != "memory" or not self._has_state or policy.compute_dtype.name not in half:
          continue
        changed = get_policy({"base": policy, **fields})
      self._check_time()
      if self._cost(changed).cheaper(best.cost, self._objective):
        # A later choice for the optimiser's state or the masters takes the place of an earlier one.
        with_it = taken | {label if applies == "fp8" else applies: label}
        trial = self.try_policy(
          changed, ", ".join([plain, *with_it.values()]), "option", reasons=best.reasons
        )
        if trial.passes:
          best, taken = trial, with_it
    return best

  def _with_recompute(self, best: Trial) -> Trial:
    """Returns the trial with what the backward pass computes again, where memory counts: it has no error."""
    if self._objective != "memory" and best.cost.fits:
      return best
    plain = best
    for choice in self._recompute:
      cost = Cost.of(self._plan_of(plain.policy, choice))
      label = f"{plain.label}, recompute={choice}"
      trial = dataclasses.replace(plain, label=label, kind="recompute", cost=cost, recompute=choice)
      self.trials.append(trial)
      if cost.cheaper(best.cost, self._objective):
        best = trial
    return best


class _Options:
  """The single changes of a preset: what each saves, and what it adds to the squared error.

  Attributes:
    base: trial of the preset.
    apart: modules whose layers are treated one by one.
  """

  def __init__(self, base: Trial, objective: str):
    self.base = base
    self.apart: list[Module] = []
    self._objective = objective
    self._own = base.error.total**2
    self._changes: dict[Module, dict[str, tuple[float, float]]] = {}

  def saves(self, cost: Cost, level: str) -> float:
    """Returns what a module at a level saves of what the preset spends; 0 if FP8 gains nothing."""
    spent = self.base.cost.spent(self._objective)
    saves = spent - cost.spent(self._objective)
    if saves > _GAINS * spent:
      return saves
    # Without products of its own, a module in half precision saves the casts between it and the others.
    return 0.0 if level == "fp8" else _CASTS * spent

  def add(self, module: Module, level: str, saves: float, error: float) -> None:
    """Takes in a change: what it saves, and the error of the preset with it."""
    self._changes.setdefault(module, {})[level] = (saves, max(0.0, error**2 - self._own))

  def reasons(self, chosen: Mapping[Module, str], objective: str) -> dict[Module, str]:
    """Returns why modules do not have the level that would save most."""
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
    """Forgets a module, whose layers take its place; returns the levels that were tried."""
    self.apart.append(module)
    return list(self._changes.pop(module))

  def levels(self, everything: Iterable[Module], changes: Mapping[Module, str]) -> dict[Module, str]:
    """Returns the level of every module under some changes."""
    return {module: changes.get(module, self.base.label) for module in everything}

  def predicted(self, chosen: Mapping[Module, str]) -> float:
    """Returns the error of a set of changes, to first order: squares add up."""
    return float((self._own + sum(self._changes[m][level][1] for m, level in chosen.items())) ** 0.5)

  def choose(self, tolerance: float) -> dict[Module, str]:
    """Returns the changes that save most within a tolerance.

    It begins with the one that saves most of each module, and takes back the step that gains most error for
    what it loses, until the sum fits.
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
    # What was taken back on the way though it costs nothing, and need not have been.
    back = [m for m, level in chosen.items() if level == "fp16" and _alike(self._changes[m], "bf16", "fp16")]
    for module in sorted(back, key=lambda m: self._changes[m]["bf16"][1]):
      if self.predicted({**chosen, module: "bf16"}) <= tolerance:
        chosen[module] = "bf16"
    return chosen

  def held_back(self, chosen: Mapping[Module, str]) -> list[Module]:
    """Returns modules that lose something worth having by not having the level that saves most."""
    spent = self.base.cost.spent(self._objective)
    found = []
    for module, changes in self._changes.items():
      saves = changes[chosen[module]][0] if module in chosen else 0.0
      if changes[_saves_most(changes)][0] - saves > _WORTH * spent:
        found.append(module)
    return found

  def more(self, chosen: Mapping[Module, str]) -> list[tuple[Module, str]]:
    """Returns changes that a set could have besides, the one that adds least error for its gain first."""
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
  """Returns the level that saves most; of those that save the same, the one without a loss scale."""
  most = max(saves for saves, _ in found.values())
  alike = [level for level, (saves, _) in found.items() if saves > 0.99 * most]
  return max(alike, key=LEVELS.index)


def _set_label(options: _Options, everything: Sequence[Module], chosen: Mapping[Module, str]) -> str:
  """Names a set by what is cheaper, or by what is not, whichever is shorter."""
  levels = sorted(set(chosen.values()), key=LEVELS.index)
  best = options.base.label
  if len(levels) == 1:
    rest = [m for m in everything if m not in chosen and levels[0] in m.levels]
    if len(rest) < len(chosen):
      return f"{levels[0]} but {best} in {_names(rest)}" if rest else levels[0]
  parts = [f"{level} in {_names([m for m in chosen if chosen[m] == level])}" for level in levels]
  return f"{best} but {', '.join(parts)}"


def _names(modules: Sequence[Module]) -> str:
  """Returns the last parts of modules' names; with the layer's number, if they are of one layer."""
  short = []
  for module in modules:
    *parents, last = module.name.split("/")
    number = parents[-1:] if last and parents and parents[-1].isdecimal() else []
    short.append("/".join([*number, last]) or "the rest")
  return ", ".join(short) if len(short) <= 4 else f"{', '.join(short[:3])} and {len(short) - 3} more"
