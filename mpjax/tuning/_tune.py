"""`mpjax.tune`: the cheapest policy whose gradients are as good as float32's, for what their noise allows."""

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

# Of the gradient's noise, by default.
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
  step = mpjax.make_train_step(loss_fn, optax.adamw(1e-3), result.policy)
  ```

  The error of a policy is the distance of its gradients from float32's on the batches, relative to their
  norm. It may be a tenth of the gradient's own noise: what gradients of other batches of the size differ by
  anyway. The cost is what `mpjax.plan` says for the target, without its compiler.

  Presets are tried as they are. If one fails that would be cheaper than the best that passes, each module is
  tried at its level by itself; squares of errors of single changes add up to first order, which chooses the
  set that saves most within the tolerance. The set is then measured, and made smaller while it fails. What
  is tried and in which order depends on the arguments alone.

  Parameters that have been trained a little say more than the first ones, whose gradients are large.

  Args:
    loss_fn: a loss function as `mpjax.make_train_step` takes it, or a `TrainStep`. With one on a mesh of
      several devices (a `jax.sharding.AbstractMesh` will do) `reduce_dtype` and `gather_dtype` are tried,
      too, whose errors are found by running each device's rows one after the other.
    params: parameters or an `nnx.Module`; for a `TrainStep` its `TrainState`.
    batches: a batch (a tree of arrays), or a list or any iterable of batches of one size.
    target: the device that the cost is of, as `mpjax.plan` takes it.
    tolerance: the largest error relative to the norm of the gradient, or a share of its noise as in
      `"0.2 noise"`; by default `"0.1 noise"`.
    candidates: policies to choose from, as they are; by default the presets that the target has units for,
      and what lies between them by module.
    tx: the optimiser, whose state counts in the plan; with `objective="memory"` it is also kept in fewer
      bytes, and its updates compared.
    objective: what is to be small: `"time"` (floor) or `"memory"` (peak). The other decides between equals. A
      target without published peaks, such as a CPU, is judged by memory.
    minutes: after which nothing more is measured beyond the presets or candidates.
    trials: a file in which errors are kept, so that the same search goes on from it, and one for another
      target measures only what it tries besides.
    plan_of: (policy, recompute) to the plan, in place of `mpjax.plan` of the step on one device.
    recompute: what the backward pass may compute again; by default what `mpjax.make_train_step` takes. It
      changes no number, and is planned for the policy found with `objective="memory"`, or if that does not
      fit the target; not with `candidates`, which are taken as they are. `None` as an argument of `plan_of`
      is what the step does anyway.
    progress: called with a line before each trial.
    init: for a loss function, what `TrainStep.init` takes besides (`rng`, `model_state`).

  Returns:
    A `TuneResult` with `.policy`, `.recompute`, `.table` and `.yaml`; `str()` of it is the answer.

  Raises:
    ValueError: for a loss or gradient that float32 does not make finite, batches too small to estimate noise,
      candidates of which none passes, or arguments that are none.
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
    raise ValueError("no batch, or one of no rows: expected a batch, or a list of at least one")
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
  """Returns candidates with a name each."""
  if isinstance(candidates, (str, Mapping)) or not isinstance(candidates, Iterable):
    raise ValueError(f"candidates={candidates!r}: expected a list of policies")
  policies = list(dict.fromkeys(map(as_policy, candidates)))
  if not policies:
    raise ValueError("candidates: expected at least one policy")
  if jax.default_backend() != "gpu" and any(p.matmul_precision == "tensorfloat32" for p in policies):
    raise ValueError("candidates: the products of tf32 can be measured on a GPU alone; leave it out here")
  labels = [policy.label for policy in policies]
  alike = lambda i: f"{labels[i]} ({labels[: i + 1].count(labels[i])})"
  return [(label if labels.count(label) == 1 else alike(i), policies[i]) for i, label in enumerate(labels)]


def _known(noise: Any) -> Any:
  assert noise is not None
  return noise


def parse_tolerance(tolerance: float | str | None) -> tuple[float, float | None]:
  """Returns a share of the noise, and the tolerance itself if it is a figure.

  Raises:
    ValueError: for what is neither.
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
  """Returns the presets to try: those that the target has units for, and that this machine can measure."""
  names = presets_of(device)
  measurable = [name for name in PRESETS if name != "tf32" or jax.default_backend() == "gpu"]
  return [name for name in measurable if name in names]


def _step_of(
  target: TrainStep | Callable[..., Any], params: PyTree, tx: optax.GradientTransformation | None, init: Any
) -> tuple[TrainStep, TrainState]:
  """Returns the step in float32, and its state."""
  if isinstance(target, TrainStep):
    if tx is not None or init:
      raise ValueError(f"{', '.join(['tx', *init])} beside a TrainStep, which has its own")
    if not isinstance(params, TrainState):
      raise ValueError(f"params of type {type(params).__name__}: expected the TrainState of the step")
    step = target.with_policy("fp32")
    return step, step.adopt(params, target, warn=False)
  if not callable(target):
    raise ValueError(f"loss_fn of type {type(target).__name__}: expected a TrainStep or a loss function")
  step = make_train_step(target, optax.identity() if tx is None else tx, "fp32")
  return step, step.init(params, **init)


def modules_of(step: TrainStep, state: TrainState, batch: PyTree) -> tuple[list[Module], str]:
  """Returns the modules of a step, and a text that differs for programs that a policy treats otherwise."""
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
