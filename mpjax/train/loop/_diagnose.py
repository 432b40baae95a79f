"""Diagnosis of a run that cannot go on: why its steps are skipped, what is not finite, and what to try."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

from mpjax._types import PyTree
from mpjax.numerics import find_nonfinite
from mpjax.policy import LossScaling
from mpjax.sharding._checksums import NonFiniteLeaves
from mpjax.step import TrainState, TrainStep
from mpjax.train.checkpoints import nonfinite_text


def state_report(nonfinite: NonFiniteLeaves) -> str:
  """Returns which leaves of a state that is not saved hold NaN or infinity, on one line."""
  return f"the state is not finite, and no checkpoint of it was saved: {nonfinite_text(nonfinite)}"


def step_report(step: TrainStep, state: TrainState, batch: PyTree) -> str:
  """Returns which tensors of a step are not finite, the first operation to blame, and what to try."""
  try:
    return "\n".join(find_nonfinite(step, state, batch)._answer())
  except (RuntimeError, MemoryError) as error:  # JAX raises RuntimeError if a device is out of memory
    return f"the operation that began it was not found: {str(error).strip().partition(chr(10))[0]}"


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


def why_skipped(record: Mapping[str, Any], scaling: LossScaling | None) -> str:
  """Returns why the steps up to a record's were skipped, as the end of a sentence."""
  if is_update_bad(record):
    return "had finite gradients, and an update, model state or parameters that are not finite"
  if scaling is None:
    return "had non-finite gradients"
  return f"had non-finite gradients, and the loss scale of {record['loss_scale']:g} cannot fall further"


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
