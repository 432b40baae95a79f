"""The search: plain presets first, then failed cheaper ones with some modules at a safer level."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpjax.formats import runs_on
from mpjax.fp8 import Recipe
from mpjax.fp8._hardware import on_units
from mpjax.planner import Plan
from mpjax.policy import Policy, get_policy
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import LEVELS, Module, mixed_policy, pattern_of
from mpjax.tuning._single_changes import SingleChanges
from mpjax.tuning._trials import Cost, Trial, TrialFile

# If costs are equal, the first one is chosen.
PRESETS = ("bf16", "fp16", "fp8", "tf32", "fp32")
# How often a failing set is made smaller, and a passing set larger; the most equal layers to separate.
_BACK_OFF, _ADD, _LAYERS = 6, 3, 16
# Fields that NVFP4 has its own values of.
_NVFP4 = {"recipe": "nvfp4", "forward_dtype": "", "gradient_dtype": "", "keep_last": None}
# Options to try on top of the policy: (condition, label, fields).
_OPTIONS: tuple[tuple[str, str, dict[str, Any]], ...] = (
  ("fp8", "fp8.recipe=nvfp4", dict(_NVFP4)),
  ("fp8", "fp8.last_layer", {"last_layer": True}),
  ("fp8", "fp8.attention", {"attention": True}),
  ("fp8", "fp8.saved_activations", {"saved_activations": "fp8"}),
  ("devices", "reduce_dtype=bfloat16", {"reduce_dtype": "bfloat16"}),
  ("devices", "gather_dtype=float8_e4m3fn", {"gather_dtype": "float8_e4m3fn"}),
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
_CROSSING = tuple(fields for applies, _, fields in _OPTIONS if applies == "devices")


class OutOfTime(Exception):
  """Raised when the time for the search is over."""


class Search:
  """A search for the cheapest policy within a tolerance.

  Attributes:
    trials: the trials so far, in order.
    notes: sentences for the reader of the result.
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
    devices: int,
    matrix_units: str,
  ):
    self._gradients, self._plan_of, self._modules = gradients, plan_of, list(modules)
    self._paths = [path for module in modules for path in module.paths]
    self._tolerance, self._objective, self._kept = tolerance, objective, kept
    self._deadline, self._say, self._has_state, self._recompute = deadline, progress, has_state, recompute
    self._devices, self._units = devices, matrix_units
    # Fields of the FP8 recipe of mixed policies.
    self._recipe: dict[str, str] = {}
    # Fields of all later policies, and the presets with these fields.
    self._across: dict[str, str] = {}
    self._presets: dict[str, Trial] = {}
    self._costs: dict[Policy, Cost] = {}
    # The expected number of trials, and the words before it if there may be fewer.
    self._total, self._at_most = 0, ""
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
    there = policy if policy.fp8 is None else get_policy({"base": policy, "fp8": self._recipe_of(policy)})
    cost, error = self._cost(policy), self._kept.get(there)
    if error is None:
      self._check_time(always)
      number = len(self.trials) + 1
      self._say(f"policy {number} of {self._at_most}{max(number, self._total)}: {label}")
      error = self._gradients.error(there)
      self._kept.put(there, error)
    passes = error.total <= self._tolerance
    trial = Trial(label, kind, policy, cost, error, passes, predicted=predicted, reasons=reasons or {})
    self.trials.append(trial)
    return trial

  def _recipe_of(self, policy: Policy) -> Recipe:
    """Returns what the FP8 recipe of a policy is on the target."""
    return on_units(policy.fp8 or Recipe(), self._units)

  def _cost(self, policy: Policy) -> Cost:
    """Returns the cost of a policy, planned only once."""
    if policy not in self._costs:
      self._costs[policy] = Cost.of(self._plan_of(policy, None))
    return self._costs[policy]

  def _check_time(self, always: bool = False) -> None:
    if not always and self._deadline is not None and time.monotonic() > self._deadline:
      raise OutOfTime

  def _expect(self, more: int) -> None:
    """Sets the largest possible number of trials: the past ones and `more`."""
    self._total, self._at_most = len(self.trials) + more, "at most "

  def whole(self, policies: Sequence[tuple[str, Policy]]) -> Trial | None:
    """Tries policies unchanged; returns the cheapest that passes, the first of equal ones."""
    best = None
    self._total = len(policies)
    for label, policy in policies:
      is_preset = label in PRESETS and policy == get_policy(label)
      trial = self.try_policy(policy, label, "preset" if is_preset else "candidate", always=True)
      if trial.passes and (best is None or trial.cost.cheaper(best.cost, self._objective)):
        best = trial
    return best

  def among(self, policies: Sequence[tuple[str, Policy]]) -> Trial:
    """Returns the cheapest of some policies that passes, the first of equal ones.

    Raises:
      ValueError: if no policy passes.
    """
    best = self.whole(policies)
    if best is None:
      nearest = min(self.trials, key=lambda t: t.error.total)
      raise ValueError(
        f"none of {len(policies)} candidates stays below {self._tolerance:.2g}: the smallest error is "
        f"{nearest.error.total:.2g}, with {nearest.label}; add fp32, or give a larger tolerance"
      )
    return best

  def run(self, presets: Sequence[str]) -> Trial:
    """Returns the best trial; ends early if the time is over."""
    best = self.whole([(name, get_policy(name)) for name in presets])
    assert best is not None, "fp32 has no error"
    self._presets = {trial.label: trial for trial in self.trials}
    if len(self._paths) < 2:
      self.notes.append(
        "the loss function does not have named scopes (jax.named_scope), so its modules cannot be treated "
        "separately"
      )
    try:
      best = self._per_channel(self._between_devices(best))
      best = self._by_module(best)
      best = self._with_options(self._forward_alone(best))
    except OutOfTime:
      best = self._best()
      self.notes.append(
        "the time was over before the search: with more --minutes it may find a cheaper policy"
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

  def _between_devices(self, best: Trial) -> Trial:
    """Returns the cheapest preset with fewer bytes across devices, by dtypes that all later policies keep.

    It comes first because faster products gain nothing if the links between devices decide. What a dtype adds
    to the squared error is measured with the best preset, and predicted for the other presets that pass.
    """
    adds: list[tuple[dict[str, str], float]] = []
    for fields in _CROSSING if self._devices > 1 else ():
      policy = get_policy({"base": best.policy, **fields})
      if self._cost(policy).cheaper(best.cost, self._objective):
        error = self._crossing(best.label, best.policy, fields).error.total
        adds.append((fields, max(0.0, error**2 - best.error.total**2)))
    both = [(a | b, x + y) for (a, x), (b, y) in itertools.combinations(adds, 2)]
    choices = [
      (label, trial, fields)
      for label, trial in self._presets.items()
      for fields, more in (*adds, *both)
      if trial.passes and (trial.error.total**2 + more) ** 0.5 <= self._tolerance
    ]
    cost = lambda choice: self._cost(get_policy({"base": choice[1].policy, **choice[2]}))
    cheaper = lambda a, b: b if cost(b).cheaper(cost(a), self._objective) else a
    for _ in range(min(_BACK_OFF, len(choices))):
      choice = functools.reduce(cheaper, choices)  # the first of equal ones
      label, trial, fields = choice
      if not cost(choice).cheaper(best.cost, self._objective):
        break
      found = self._crossing(label, trial.policy, fields)
      if found.passes:
        self._across = fields
        return self._presets_across(found)
      choices.remove(choice)
    return best

  def _presets_across(self, best: Trial) -> Trial:
    """Returns the cheapest of the best trial and the presets with the same dtypes across devices."""
    plain, self._presets = self._presets, {}
    for label, trial in plain.items():
      policy = get_policy({"base": trial.policy, **self._across})
      if policy == best.policy or self._cost(policy).cheaper(best.cost, self._objective):
        self._presets[label] = self._crossing(label, trial.policy, self._across)
    for trial in self._presets.values():
      if trial.passes and trial.cost.cheaper(best.cost, self._objective):
        best = trial
    return best

  def _crossing(self, label: str, policy: Policy, fields: dict[str, str]) -> Trial:
    crosses = get_policy({"base": policy, **fields})
    return self.try_policy(crosses, label + _suffix(fields), "option")

  def _with_across(self, policy: Policy) -> Policy:
    return get_policy({"base": policy, **self._across}) if self._across else policy

  def _per_channel(self, best: Trial) -> Trial:
    """Returns a cheaper trial with FP8 scales by channel, if a scale for each tensor is too coarse.

    If it fails, too, but is better, mixed policies have its scales.
    """
    fp8 = self._presets.get("fp8")
    if fp8 is None or fp8.passes or not self._recipe_of(fp8.policy).of_tensors:
      return best
    fields = {"recipe": "per_channel", "forward_dtype": self._recipe_of(fp8.policy).forward_dtype}
    trial = self._fp8_with(best, "fp8.recipe=per_channel", fields)
    if trial is None or trial.passes:
      return trial or best
    if trial.error.total < fp8.error.total:
      self._recipe = fields
    return best

  def _forward_alone(self, best: Trial) -> Trial:
    """Returns a cheaper trial whose backward pass is in half precision, if FP8 in both is too coarse."""
    fp8 = self._presets.get("fp8")
    if fp8 is None or fp8.passes:
      return best
    trial = self._fp8_with(best, "fp8.backward=compute", {**self._recipe, "backward": "compute"})
    return trial if trial is not None and trial.passes else best

  def _fp8_with(self, best: Trial, label: str, fields: dict[str, str]) -> Trial | None:
    """Tries the preset fp8 with other fields of its recipe; `None` if it is not cheaper than the best."""
    self._check_time()
    policy = self._with_across(get_policy({"base": "fp8", "fp8": fields}))
    if not self._cost(policy).cheaper(best.cost, self._objective):
      return None
    return self.try_policy(policy, f"fp8, {label}{_suffix(self._across)}", "option")

  def _by_module(self, best: Trial) -> Trial:
    """Returns a cheaper trial than the best preset, with only some modules at a cheaper level."""
    trials = {name: trial for name, trial in self._presets.items() if name in LEVELS}
    cheaper = [t for t in trials.values() if t.cost.cheaper(best.cost, self._objective)]
    # If bfloat16 as a whole is good enough, only cheaper levels are of interest.
    level = "bf16" if "bf16" in trials and trials["bf16"].passes else "fp32"
    if not cheaper or best not in trials.values():
      return best
    base = trials.get(level) or self._crossing(level, get_policy(level), self._across)
    options = SingleChanges(level, base, self._objective)
    tried = [name for name, trial in trials.items() if trial.cost.cheaper(base.cost, self._objective)]
    self._try_each(options, [(m, name) for name in tried for m in self._modules if name in m.levels])
    chosen = options.choose(self._tolerance)
    apart = [module for module in options.held_back(chosen) if 1 < len(module.paths) <= _LAYERS]
    for i, module in enumerate(apart):
      levels = options.take_apart(module)
      later = sum(len(other.split()) for other in apart[i + 1 :]) * len(tried)
      self._try_each(
        options, [(p, name) for p in module.split() for name in levels if name in p.levels], later
      )
    return self._measure(options, best)

  def _try_each(self, options: SingleChanges, changes: Sequence[tuple[Module, str]], later: int = 0) -> None:
    """Measures single changes one after the other; `later` more will follow."""
    for i, (module, level) in enumerate(changes):
      self._expect(len(changes) - i + later + _BACK_OFF + _ADD)
      self._single(options, module, level)

  def _single(self, options: SingleChanges, module: Module, level: str) -> None:
    """Measures a preset with one module changed, if the change saves something."""
    levels = options.levels(self._everything(options, module), {module: level})
    policy = self._with_across(mixed_policy(levels, self._paths, self._recipe))
    self._check_time()
    saves = options.saves(self._cost(policy), level)
    if saves > 0:
      label = f"{options.level} but {level} in {_names([module])}{_suffix(self._across)}"
      options.add(module, level, saves, self.try_policy(policy, label, "module").error.total)

  def _everything(self, options: SingleChanges, module: Module | None = None) -> list[Module]:
    """Returns all modules, with the layers of modules that are treated separately."""
    found: list[Module] = []
    for each in self._modules:
      apart = each in options.apart or (module is not None and set(module.paths) < set(each.paths))
      found += each.split() if apart else [each]
    return found

  def _measure(self, options: SingleChanges, best: Trial) -> Trial:
    """Measures the best set, makes it smaller while it fails, then larger while it passes."""
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
        f"{trial.label}: the measured error is {trial.error.total:.2g}, but single changes predict "
        f"{predicted:.2g}: made smaller"
      )
      # Below the predicted error of this set, so that the next set is another one.
      allowed = min(allowed, predicted) * 0.7
    if passed is None:
      return best
    for module, level in options.more(passed[1])[:_ADD]:
      trial = self._mixed(options, everything, {**passed[1], module: level})
      if trial.passes and trial.cost.cheaper(passed[0].cost, self._objective):
        passed = (trial, {**passed[1], module: level})
    return passed[0] if passed[0].cost.cheaper(best.cost, self._objective) else best

  def _mixed(self, options: SingleChanges, everything: list[Module], chosen: Mapping[Module, str]) -> Trial:
    reasons = {pattern_of(m, self._paths): why for m, why in options.reasons(chosen, self._objective).items()}
    return self.try_policy(
      self._with_across(mixed_policy(options.levels(everything, chosen), self._paths, self._recipe)),
      _set_label(options.level, everything, chosen) + _suffix(self._across),
      "mixed",
      predicted=options.predicted(chosen),
      reasons=reasons,
    )

  def _with_options(self, best: Trial) -> Trial:
    """Returns a still cheaper trial: with more FP8, and fewer bytes across devices and in memory."""
    plain, taken = best.label, dict[str, str]()
    for i, (applies, label, fields) in enumerate(_OPTIONS):
      self._expect(len(_OPTIONS) - i)
      policy = best.policy
      if applies == "fp8":
        if policy.fp8 is None or not self._applies(policy, fields):
          continue
        recipe = dataclasses.replace(policy.fp8, **fields)
        changed = get_policy({"base": policy, "fp8": recipe})
      elif applies == "devices":
        if self._devices == 1:
          continue
        changed = get_policy({"base": policy, **fields})
      else:
        half = ("bfloat16",) if applies == "masters" else ("bfloat16", "float16")
        if self._objective != "memory" or not self._has_state or policy.compute_dtype.name not in half:
          continue
        changed = get_policy({"base": policy, **fields})
      self._check_time()
      if self._cost(changed).cheaper(best.cost, self._objective):
        # A later choice for the optimiser's state or the master weights replaces an earlier one.
        with_it = taken | {applies if applies in ("state", "masters") else label: label}
        trial = self.try_policy(
          changed, ", ".join([plain, *with_it.values()]), "option", reasons=best.reasons
        )
        if trial.passes:
          best, taken = trial, with_it
    return best

  def _applies(self, policy: Policy, fields: Mapping[str, Any]) -> bool:
    """Returns whether fields may be set in a policy's FP8 recipe on the target."""
    if "saved_activations" in fields:
      return self._recipe_of(policy).of_tensors
    return "recipe" not in fields or runs_on(self._units, fields["recipe"])

  def _with_recompute(self, best: Trial) -> Trial:
    """Returns the trial with recomputation in the backward pass if memory counts; it adds no error."""
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


def _suffix(fields: Mapping[str, str]) -> str:
  """Returns the end of a label for dtypes across devices."""
  return "".join(f" + {key}={dtype}" for key, dtype in fields.items())


def _set_label(best: str, everything: Sequence[Module], chosen: Mapping[Module, str]) -> str:
  """Names a set by the modules at a cheaper level or by the other modules, whichever is shorter."""
  levels = sorted(set(chosen.values()), key=LEVELS.index)
  if len(levels) == 1:
    rest = [m for m in everything if m not in chosen and levels[0] in m.levels]
    if len(rest) < len(chosen):
      return f"{levels[0]} but {best} in {_names(rest)}" if rest else levels[0]
  parts = [f"{level} in {_names([m for m in chosen if chosen[m] == level])}" for level in levels]
  return f"{best} but {', '.join(parts)}"


def _names(modules: Sequence[Module]) -> str:
  """Returns the last parts of modules' names, with the layer's number for a module of one layer."""
  short = []
  for module in modules:
    *parents, last = module.name.split("/")
    number = parents[-1:] if last and parents and parents[-1].isdecimal() else []
    short.append("/".join([*number, last]) or "the rest")
  return ", ".join(short) if len(short) <= 4 else f"{', '.join(short[:3])} and {len(short) - 3} more"
