"""Diagnosis of a run that cannot go on: which tensors of a step or state are not finite, and what to try."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax._types import PyTree
from mpjax.loss_scale import get_loss_scale, nonfinite_leaves
from mpjax.numerics import find_nonfinite
from mpjax.policy import LossScaling
from mpjax.step import TrainState, TrainStep

# The names of a state's fields in reports.
_FIELDS = {"params": "parameters", "model_state": "model state", "opt_state": "optimizer state"}


def state_report(nonfinite: Mapping[str, Sequence[str]], limit: int = 4) -> str:
  """Returns which leaves of a state that is not saved hold NaN or infinity, on one line.

  Args:
    nonfinite: "NaN", "inf" or both by path, as `Checkpoints.save` returns it.
    limit: how many leaves of each field to list.
  """
  parts = []
  for field, name in _FIELDS.items():
    rows = [
      f"{path.removeprefix(field).lstrip('/') or 'the whole'} ({' and '.join(kinds)})"
      for path, kinds in nonfinite.items()
      if path.split("/")[0] == field
    ]
    if rows:
      parts.append(f"{name} " + _listed(rows, limit, ", "))
  return f"the state is not finite, and no checkpoint of it was saved: {'; '.join(parts)}"


def nonfinite_report(
  step: TrainStep,
  state: TrainState,
  batch: PyTree,
  begun_with: Collection[str] = (),
  *,
  bad_update: bool = False,
  limit: int = 8,
) -> str:
  """Recomputes the step's gradients and lists every non-finite tensor, inputs first.

  Args:
    step: the training step; its gradients are computed once more, at the state's loss scale.
    state: state before the step.
    batch: the batch of the step.
    begun_with: paths in the state that may hold infinity, since they did when the run began.
    bad_update: whether the step was skipped for what the optimiser made of finite gradients.
    limit: how many tensors of each kind to list.

  Returns:
    Several lines: counts of NaN, +inf and -inf by tensor path, then what to try.
  """
  loss, grads = step.gradients(state, batch)
  lines: list[str] = []
  guilty = None
  for field, name, tree in (
    ("", "batch", batch),
    *((field, name, getattr(state, field)) for field, name in _FIELDS.items()),
    ("", "loss", loss),
    ("", "gradients", grads),
  ):
    rows = [
      f"{path} ({counts})"
      for path, counts in nonfinite_leaves(tree).items()
      if f"{field}/{path}".rstrip("/") not in begun_with
    ]
    if rows:
      guilty = guilty or name
      lines.append(f"non-finite {name}: " + _listed(rows, limit, "; "))
  if guilty is None and bad_update:
    guilty = "update"
    lines.append(
      "batch, state, loss and gradients are finite: the optimizer's update, or the parameters or model state "
      "that it gives, is not"
    )
  if guilty is None:
    return "every tensor is finite when the step is computed again: the failure does not repeat on this batch"
  return "\n".join([*lines, f"try: {_advice(guilty, step, state)}"])


def step_report(
  step: TrainStep, state: TrainState, batch: PyTree, metrics: Mapping[str, Any], begun_with: Collection[str]
) -> str:
  """Returns `nonfinite_report`, and a line on the first operation that made NaN or infinity."""
  report = nonfinite_report(step, state, batch, begun_with, bad_update=is_update_bad(metrics))
  try:
    return f"{report}\n{find_nonfinite(step, state, batch).verdict}"
  except (RuntimeError, MemoryError) as error:  # JAX raises RuntimeError if a device is out of memory
    first = str(error).strip().partition("\n")[0]
    return f"{report}\nthe operation that began it was not found: {first}"


def _listed(rows: list[str], limit: int, separator: str) -> str:
  more = [f"and {len(rows) - limit} more"] if len(rows) > limit else []
  return separator.join([*rows[:limit], *more])


def _advice(guilty: str, step: TrainStep, state: TrainState) -> str:
  if guilty == "batch":
    return "fix the data: the batch itself holds NaN or infinity"
  if guilty in _FIELDS.values():
    return "start from the last finite checkpoint, with a lower optimizer.learning_rate"
  if guilty == "update":
    return "a larger eps in optimizer.options, a lower optimizer.learning_rate, another optimizer"
  scale = float(get_loss_scale(state.opt_state).scale)
  half = step.policy.compute_dtype.itemsize < 4
  options = ["policy=fp32 to see whether the model itself diverges"] if half else []
  if step.policy.compute_dtype == np.float16:
    options.append("policy=bf16, which has float32's range")
    if guilty == "gradients" and scale > 2.0**-20:
      options.append("a smaller policy.loss_scaling.min_scale")
  return ", ".join([*options, "a lower optimizer.learning_rate", "optimizer.clip_norm=1.0"])


def is_update_bad(metrics: Mapping[str, Any]) -> bool:
  """Returns whether a step with finite gradients was skipped because its update is not finite."""
  return bool(metrics.get("grads_finite", False)) and not bool(metrics.get("updates_finite", True))


def cannot_recover(record: Mapping[str, Any], scaling: LossScaling | None, max_skips: int) -> bool:
  """Returns whether the last `max_skips` steps, up to a record's, were skipped at the lowest loss scale."""
  if record.get("consecutive_skips", 0) < max_skips:
    return False
  if scaling is None or scaling.kind == "static" or is_update_bad(record):  # no scale fixes an update
    return True
  return record["loss_scale"] * scaling.backoff_factor < scaling.min_scale


def why_skipped(metrics: Mapping[str, Any], scaling: LossScaling | None, scale: float | None) -> str:
  """Returns why a run's last steps were skipped, as the end of a sentence; `scale` is the last loss scale."""
  if is_update_bad(metrics):
    return "had finite gradients, and an update, model state or parameters that are not finite"
  if scaling is None:
    return "had non-finite gradients"
  return f"had non-finite gradients, and the loss scale of {scale:g} cannot fall further"


def way_on(step: int | None, directory: pathlib.Path, skips: bool) -> str:
  """Returns which checkpoint is the last, and how to start from it. Every checkpoint is finite.

  Args:
    step: its step; `None` without a checkpoint.
    directory: the run directory.
    skips: whether the run skips steps that are not finite.
  """
  change = "a lower optimizer.learning_rate" if skips else "train.skip_nonfinite=true"
  if step is None:
    return f"no finite checkpoint was saved: start over with another out= and, for example, {change}"
  return (
    f"the last finite checkpoint is of step {step}: train.init_from={directory} with another out= starts "
    f"from it, for example with {change}; the same command resumes there and takes the same steps again"
  )
