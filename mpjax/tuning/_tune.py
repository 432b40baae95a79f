"""`mpjax.tune`: the cheapest policy whose gradients are as good as float32's, within their noise."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import optax

from mpjax._calls import refuse_keywords
from mpjax._gone import instead
from mpjax._types import PolicyLike, PyTree
from mpjax.casting import Explanation
from mpjax.dtypes import as_shapes
from mpjax.formats import fp8_time
from mpjax.fp8 import on_units
from mpjax.numerics import listed, on_axes_of, rows, step_of
from mpjax.planner import Target, get_target, plan, presets_of
from mpjax.policy import Policy, get_policy
from mpjax.step import TrainState, TrainStep
from mpjax.tuning._gradient_error import Gradients
from mpjax.tuning._modules import Module, list_modules
from mpjax.tuning._result import OBJECTIVES, Cost, Trial, TuneResult
from mpjax.tuning._search import PRESETS, Search


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

  The search tries the presets first. If FP8 fails as a whole, it tries scales by channel and a backward pass
  in half precision. If a preset that fails is cheaper than the best one that passes, it tries each module at
  that preset's level, one module at a time. To first order the squares of these errors add up: it takes the
  modules with the least error for their saving, while they fit the tolerance. It measures the set, and makes
  it smaller while it fails. The tries and their order depend only on the arguments.

  Give parameters after a little training: initial gradients are large, and say less.

  Args:
    loss_fn: a loss function as `mpjax.make_train_step` takes it, or a `TrainStep`. One on a mesh is planned
      for it (a `jax.sharding.AbstractMesh` will do) and measured without it.
    params: parameters or an `nnx.Module`; for a `TrainStep` its `TrainState`.
    batches: a batch (a tree of arrays), or a list or any iterable of batches of one size.
    target: the device to plan for, as `mpjax.plan` takes it.
    tolerance: the largest error relative to the norm of the gradient, or a share of its noise, such as
      `"0.2 noise"`; by default `"0.1 noise"`.
    candidates: policies to choose from, unchanged; by default the presets that the target has matrix units
      for, and mixtures of them by module.
    tx: the optimiser, whose state counts in the plan. With `objective="memory"` its state is also tried in
      fewer bytes, with the error of its updates.
    objective: `"time"` (shortest estimated time) or `"memory"` (peak). The other figure decides between
      equals. A target without published peak rates, such as a CPU, is judged by memory.
    progress: called with a line of text before each trial.
    init: for a loss function, the other arguments of `TrainStep.init` (`rng`, `model_state`).

  Returns:
    A `TuneResult` with `policy` and `yaml`; `str()` gives the answer, `table(NAME)` one table.

  Raises:
    ValueError: if the loss or a gradient is not finite in float32, the batches are too small for an estimate
      of the noise, no candidate passes, or an argument is wrong.
  """
  unknown = init.keys() - inspect.signature(TrainStep.init).parameters.keys()
  gone = {name: went.removeprefix(": ") for name in unknown if (went := instead(name, "tune"))}
  refuse_keywords(tune, {name: init[name] for name in unknown}, gone)
  if objective not in OBJECTIVES:
    raise ValueError(f"objective={objective!r}: expected one of {', '.join(OBJECTIVES)}")
  share, figure = parse_tolerance(tolerance)
  say = progress or (lambda line: None)
  device = get_target(target)
  policies = None if candidates is None else _named(candidates)
  if isinstance(loss_fn, TrainStep) and not isinstance(params, TrainState):
    raise ValueError(f"params of type {type(params).__name__}: expected the TrainState of the step")
  step, state, _ = step_of(loss_fn, params, "fp32", tx, init)
  given = list(listed(batches))
  if not given or not min(map(rows, given)):
    raise ValueError("no batch, or a batch without rows: expected a batch, or a list of at least one")
  say("float32")
  with on_axes_of(step) as placed:
    state, given = placed(state), placed(given)
    gradients = Gradients(step, state, given, needs_noise=figure is None)
    allowed = figure
    if allowed is None:
      assert gradients.noise is not None, "it was needed"
      allowed = share * gradients.noise.total
    search = Search(
      gradients,
      _costs(step, state, given[0], device),
      modules_of(step, state, given[0]),
      allowed,
      objective,
      device.matrix_units,
      say=say,
    )
    size = 1 if step.layout is None else step.layout.mesh.size
    if device.devices > size and not device.is_here:
      search.notes.append(
        f"{device.name} has {device.devices} devices, and the step runs on {size}: a mesh uses the others"
      )
    # This machine can measure them, and the target has units for them.
    measurable = [name for name in PRESETS if name != "tf32" or jax.default_backend() == "gpu"]
    presets = [name for name in measurable if name in presets_of(device)]
    chosen = search.run(presets) if policies is None else search.among(policies)
  ended = tuple(dataclasses.replace(t, why=_why(t, chosen, objective)) for t in search.trials)
  return TuneResult(
    policy=chosen.policy,
    chosen=ended[search.trials.index(chosen)],
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
  try:
    policies = list(dict.fromkeys(map(get_policy, candidates)))
  except ValueError as error:
    raise ValueError(f"candidates: {error}") from error
  if not policies:
    raise ValueError("candidates: expected at least one policy")
  if any(policy != policy.without_devices() for policy in policies):
    raise ValueError(
      "candidates: errors are measured without a mesh; leave out reduce_dtype and gather_dtype, and see "
      "mpjax.plan for what they save"
    )
  if jax.default_backend() != "gpu" and any(p.matmul_precision == "tensorfloat32" for p in policies):
    raise ValueError("candidates: tf32 can be measured only on a GPU; leave it out here")
  labels = [policy.label for policy in policies]
  number = lambda i: f" ({labels[: i + 1].count(labels[i])})" if labels.count(labels[i]) > 1 else ""
  return [(f"{policy.label}{number(i)}", policy) for i, policy in enumerate(policies)]


def parse_tolerance(tolerance: float | str | None) -> tuple[float, float | None]:
  """Returns a share of the noise, and the tolerance itself if it is a figure.

  Raises:
    ValueError: if it is neither.
  """
  text = "0.1 noise" if tolerance is None else str(tolerance).strip()
  try:
    number = float(text.removesuffix("noise"))
  except ValueError:
    number = math.nan
  if not 0 < number < math.inf:
    raise ValueError(f"tolerance={tolerance!r}: expected a positive number, or a share such as '0.1 noise'")
  return (number, None) if text.endswith("noise") else (0.0, number)


def modules_of(step: TrainStep, state: TrainState, batch: PyTree) -> list[Module]:
  """Returns the modules of a step that a policy can treat separately."""
  alone = step.without_mesh()

  def explained(spec: PolicyLike) -> Explanation:
    other = alone.with_policy(spec)
    return other.explain(jax.eval_shape(lambda state: other.adopt(state, step, warn=False), state), batch)

  return list_modules(explained("bf16"), explained({"base": "fp8", "fp8": {"emulate": True}}))


def _costs(step: TrainStep, state: TrainState, batch: PyTree, device: Target) -> Callable[[Policy], Cost]:
  """Returns a function that gives the cost of a policy, planned only once.

  An FP8 recipe that is slower than bfloat16 by the compiler's figures has the time that they say.
  """
  shapes = as_shapes((state, batch))

  @functools.cache
  def cost(policy: Policy) -> Cost:
    made = plan(step, *shapes, policy=policy, target=device, compile=False)
    seconds = None if made.time is None else made.time.seconds
    recipe = policy.fp8 and on_units(policy.fp8, device.matrix_units)
    slower = fp8_time(device.device, recipe.recipe) if recipe else 0.0
    if slower > 1 and (of_half := cost(dataclasses.replace(policy, fp8=None)).seconds):
      seconds = slower * of_half
    return Cost(seconds, made.peak, made.memory.saved_bytes, not made.room or made.peak <= made.room)

  return cost


def _why(trial: Trial, chosen: Trial, objective: str) -> str:
  what = "update" if trial.error.update > trial.error.gradient else "gradient"
  reasons = {
    "chosen": trial is chosen,
    "not finite": not math.isfinite(trial.error.total),
    f"{what} too far off": not trial.passes,
    "does not fit the target": not trial.cost.fits,
    "dearer": chosen.cost.cheaper(trial.cost, objective),
  }
  return next((reason for reason, holds in reasons.items() if holds), "no cheaper")
