"""`mpjax.tune`: the cheapest policy whose gradients are as good as float32's, within their noise."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from mpjax._types import PolicyLike, PyTree
from mpjax.casting import Explanation
from mpjax.casting._casting_rules import RECOMPUTE
from mpjax.dtypes import as_shapes
from mpjax.numerics._batches import listed, rows
from mpjax.planner import Plan, Target, get_target, plan, policy_on_target, presets_of
from mpjax.policy import Policy
from mpjax.step import TrainState, TrainStep, make_train_step
from mpjax.tuning._across_devices import described, on_automatic_axes
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import Module, list_modules
from mpjax.tuning._result import TuneResult
from mpjax.tuning._search import PRESETS, Search
from mpjax.tuning._trials import OBJECTIVES, Trial, TrialFile, as_policy

# The default tolerance, as a share of the gradient's noise.
SHARE_OF_NOISE = 0.1


def tune(
  loss_fn: TrainStep | Callable[..., Any],
  params: PyTree,
  batches: PyTree,
  *,
  target: str | Target | None = "here",
  tolerance: float | str | None = None,
  candidates: Sequence[PolicyLike] | None = None,
  tx: optax.GradientTransformation | None = None,
  objective: str = "time",
  minutes: float | None = None,
  trials: str | os.PathLike[str] | None = None,
  plan_of: Callable[[Policy, str | None], Plan] | None = None,
  recompute: Sequence[str] | None = None,
  progress: Callable[[str], None] | None = None,
  **init: Any,
) -> TuneResult:
  """Finds the cheapest policy whose gradients are as good as float32's.

  ```python
  result = mpjax.tune(loss_fn, params, [batch], target="h200", tx=optax.adamw(1e-3))
  print(result)  # the policy, its cost and error, and why the cheaper ones were dropped
  print(result.table("policies"))  # every policy that was tried
  step = mpjax.make_train_step(loss_fn, tx, result.policy)
  ```

  The error of a policy is the distance of its gradients from float32's on the batches, relative to their
  norm. By default it may be a tenth of the gradient's noise, the difference between the gradients of batches
  of this size. The cost comes from `mpjax.plan` for the target, without its compiler.

  The search tries the presets first. If a cheaper preset than the best one that passes fails, it tries each
  module at that preset's level, one module at a time. To first order the squares of these errors add up, so
  it can choose the set of modules that saves most within the tolerance. It measures the set, and makes it
  smaller while it fails. If FP8 fails as a whole, it also tries scales by channel and a backward pass in half
  precision. The tries and their order depend only on the arguments.

  Give parameters after a little training: initial gradients are large, and say less.

  Args:
    loss_fn: a loss function as `mpjax.make_train_step` takes it, or a `TrainStep`. For a step on a mesh of
      several devices (a `jax.sharding.AbstractMesh` will do), `reduce_dtype` and `gather_dtype` are tried,
      too: their errors are measured by running each device's rows one after the other.
    params: parameters or an `nnx.Module`; for a `TrainStep` its `TrainState`.
    batches: a batch (a tree of arrays), or a list or any iterable of batches of one size.
    target: the device to plan for, as `mpjax.plan` takes it.
    tolerance: the largest error relative to the norm of the gradient, or a share of its noise, such as
      `"0.2 noise"`; by default `"0.1 noise"`.
    candidates: policies to choose from, unchanged; by default the presets that the target has matrix units
      for, and mixtures of them by module.
    tx: the optimiser, whose state counts in the plan. With `objective="memory"` its state is also tried in
      fewer bytes, with the error of its updates.
    objective: `"time"` (shortest possible time) or `"memory"` (peak). The other figure decides between
      equals. A target without published peak rates, such as a CPU, is judged by memory.
    minutes: time after which only presets or candidates are still measured.
    trials: a file for the errors. The same search goes on from it. A search for another target measures only
      policies that are not in the file.
    plan_of: function from (policy, recompute) to the plan, in place of `mpjax.plan` of the step on one
      device. `recompute` is `None` for the step's own choice.
    recompute: what the backward pass may recompute; by default all choices of `mpjax.make_train_step`. It
      does not change numbers. It is planned for the policy that was found, with `objective="memory"` or if
      the policy does not fit the target, but not with `candidates`.
    progress: called with a line of text before each trial.
    init: for a loss function, the other arguments of `TrainStep.init` (`rng`, `model_state`).

  Returns:
    A `TuneResult` with `policy`, `recompute` and `yaml`; `str()` gives the answer, `table(NAME)` one table.

  Raises:
    ValueError: if the loss or a gradient is not finite in float32, the batches are too small for an estimate
      of the noise, no candidate passes, or an argument is wrong.
  """
  if objective not in OBJECTIVES:
    raise ValueError(f"objective={objective!r}: expected one of {', '.join(OBJECTIVES)}")
  is_number = isinstance(minutes, (int, float)) and not isinstance(minutes, bool)
  if minutes is not None and not (is_number and minutes > 0):
    raise ValueError(f"minutes={minutes!r}: expected a positive number")
  began = time.monotonic()
  share, figure = parse_tolerance(tolerance)
  say = progress or (lambda line: None)
  device = get_target(target)
  policies = None if candidates is None else _named(candidates)
  step, state = _step_of(loss_fn, params, tx, init)
  given = list(listed(batches))
  if not given or not min(map(rows, given)):
    raise ValueError("no batch, or a batch without rows: expected a batch, or a list of at least one")
  say("float32")
  with on_automatic_axes(step, (state, given)) as (state, given):
    gradients = Gradients(step, state, given, needs_noise=figure is None)
    allowed = figure if figure is not None else share * _known(gradients.noise).total
    modules, program = modules_of(step, state, given[0])
    search = Search(
      gradients,
      plan_of or _planner(step, state, given[0], device),
      modules,
      allowed,
      objective,
      TrialFile(
        None if trials is None else pathlib.Path(trials),
        gradients.fingerprint() + program,
        described(step.layout, state.arrays),
      ),
      None if minutes is None else began + 60 * minutes,
      say,
      has_state=bool(jax.tree.leaves(jax.eval_shape(step.inner_tx.init, state.arrays))),
      recompute=[c for c in RECOMPUTE if c != step.options.recompute] if recompute is None else recompute,
      devices=1 if step.layout is None else step.layout.shards,
      matrix_units=device.matrix_units,
    )
    size = 1 if step.layout is None else step.layout.mesh.size
    if device.devices > size and not device.is_here:
      search.notes.append(
        f"{device.name} has {device.devices} devices, and the step runs on {size}: a mesh uses the others"
      )
    chosen = search.run(_presets(device)) if policies is None else search.among(policies)
  ended = tuple(dataclasses.replace(t, why=_why(t, chosen, objective)) for t in search.trials)
  return TuneResult(
    policy=chosen.policy,
    chosen=next(t for t in ended if _is_same(t, chosen)),
    trials=ended,
    tolerance=allowed,
    noise=gradients.noise,
    loss=gradients.loss,
    target=device.name,
    objective=objective,
    batches=len(given),
    rows=sum(map(rows, given)),
    notes=tuple(search.notes),
  )


def _named(candidates: Sequence[PolicyLike]) -> list[tuple[str, Policy]]:
  """Returns each candidate with a name."""
  if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
    raise ValueError(f"candidates={candidates!r}: expected a list of policies")
  policies = list(dict.fromkeys(map(as_policy, candidates)))
  if not policies:
    raise ValueError("candidates: expected at least one policy")
  if jax.default_backend() != "gpu" and any(p.matmul_precision == "tensorfloat32" for p in policies):
    raise ValueError("candidates: tf32 can be measured only on a GPU; leave it out here")
  labels = [policy.label for policy in policies]
  alike = lambda i: f"{labels[i]} ({labels[: i + 1].count(labels[i])})"
  return [(label if labels.count(label) == 1 else alike(i), policies[i]) for i, label in enumerate(labels)]


def _known(noise: Any) -> Any:
  assert noise is not None
  return noise


def parse_tolerance(tolerance: float | str | None) -> tuple[float, float | None]:
  """Returns a share of the noise, and the tolerance itself if it is a figure.

  Raises:
    ValueError: if it is neither.
  """
  if tolerance is None:
    return SHARE_OF_NOISE, None
  if isinstance(tolerance, str):
    found = re.fullmatch(r"\s*([0-9.eE+-]+)\s*(noise)?\s*", tolerance)
    try:
      number = float(found[1]) if found else math.nan
    except ValueError:
      number = math.nan
    of_noise = bool(found and found[2])
  else:
    is_number = isinstance(tolerance, (int, float, np.number)) and not isinstance(tolerance, bool)
    number, of_noise = (float(tolerance) if is_number else math.nan), False
  if not 0 < number < math.inf:
    raise ValueError(f"tolerance={tolerance!r}: expected a positive number, or a share such as '0.1 noise'")
  return (number, None) if of_noise else (0.0, number)


def _presets(device: Target) -> list[str]:
  """Returns the presets to try: the target has units for them, and this machine can measure them."""
  names = presets_of(device)
  measurable = [name for name in PRESETS if name != "tf32" or jax.default_backend() == "gpu"]
  return [name for name in measurable if name in names]


def _step_of(
  target: TrainStep | Callable[..., Any], params: PyTree, tx: optax.GradientTransformation | None, init: Any
) -> tuple[TrainStep, TrainState]:
  """Returns the step in float32, and its state."""
  if isinstance(target, TrainStep):
    if tx is not None or init:
      raise ValueError(f"{', '.join(['tx', *init])} with a TrainStep, which has its own")
    if not isinstance(params, TrainState):
      raise ValueError(f"params of type {type(params).__name__}: expected the TrainState of the step")
    step = target.with_policy("fp32")
    return step, step.adopt(params, target, warn=False)
  if not callable(target):
    raise ValueError(f"loss_fn of type {type(target).__name__}: expected a TrainStep or a loss function")
  step = make_train_step(target, optax.identity() if tx is None else tx, "fp32")
  return step, step.init(params, **init)


def modules_of(step: TrainStep, state: TrainState, batch: PyTree) -> tuple[list[Module], str]:
  """Returns a step's modules, and a text that differs between programs that a policy treats differently."""
  alone = step.without_mesh()

  def explained(spec: PolicyLike) -> Explanation:
    other = alone.with_policy(spec)
    return other.explain(jax.eval_shape(lambda state: other.adopt(state, step, warn=False), state), batch)

  half, fp8 = explained("bf16"), explained({"base": "fp8", "fp8": {"emulate": True}})
  rows = [(row.path, row.before, row.after, row.flops) for each in (half, fp8) for row in each.rows]
  versions = (jax.__version__, str(jax.tree.structure(state.opt_state)))
  return list_modules(half, fp8), repr((rows, versions))


def _planner(
  step: TrainStep, state: TrainState, batch: PyTree, device: Target
) -> Callable[[Policy, str | None], Plan]:
  shapes = as_shapes(batch)

  def plan_of(policy: Policy, recompute: str | None) -> Plan:
    there, _ = policy_on_target(policy.without_histories(), device)
    options = dataclasses.replace(step.options, policy=there, recompute=recompute or step.options.recompute)
    other = TrainStep(step.fun, step.inner_tx, options)
    abstract = jax.eval_shape(lambda s: other.adopt(s, step, warn=False), state)
    laid = (abstract, shapes) if other.layout is None else other.layout.shapes(abstract, shapes)
    return plan(other, *laid, target=device, compile=False)

  return plan_of


def _is_same(trial: Trial, other: Trial) -> bool:
  return (trial.policy, trial.recompute) == (other.policy, other.recompute)


def _why(trial: Trial, chosen: Trial, objective: str) -> str:
  if _is_same(trial, chosen):
    return "chosen"
  if not math.isfinite(trial.error.total):
    return "not finite"
  if not trial.passes:
    what = "update" if trial.error.update > trial.error.gradient else "gradient"
    return f"{what} too far off"
  if not trial.cost.fits:
    return "does not fit the target"
  if chosen.cost.cheaper(trial.cost, objective):
    return "dearer"
  return "no cheaper"
