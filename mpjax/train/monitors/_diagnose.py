"""Diagnosis of a run that cannot go on: which tensors of a step are not finite, and what to try."""

from __future__ import annotations

import numpy as np

from mpjax._types import PyTree
from mpjax.loss_scale import get_loss_scale, nonfinite_leaves
from mpjax.numerics import find_nonfinite
from mpjax.step import TrainState, TrainStep


def nonfinite_report(step: TrainStep, state: TrainState, batch: PyTree, limit: int = 8) -> str:
  """Recomputes the step's gradients and lists every non-finite tensor, inputs first.

  Args:
    step: the training step; its gradients are computed once more, at the state's loss scale.
    state: state before the step.
    batch: the batch of the step.
    limit: tensors listed of each kind.

  Returns:
    Several lines: counts of NaN, +inf and -inf by tensor path, then what to try.
  """
  loss, grads = step.gradients(state, batch)
  lines: list[str] = []
  guilty = None
  for name, tree in (
    ("batch", batch),
    ("parameters", state.params),
    ("model state", state.model_state),
    ("loss", loss),
    ("gradients", grads),
  ):
    rows = [f"{path} ({counts})" for path, counts in nonfinite_leaves(tree).items()]
    if rows:
      guilty = guilty or name
      lines.append(f"non-finite {name}: " + "; ".join(rows[:limit]))
      if len(rows) > limit:
        lines[-1] += f"; and {len(rows) - limit} more"
  if guilty is None:
    return "every tensor is finite when the step is computed again: the failure does not repeat on this batch"
  return "\n".join([*lines, f"try: {_advice(guilty, step, state)}"])


def first_nonfinite(step: TrainStep, state: TrainState, batch: PyTree) -> str:
  """Returns a line on the first operation that made NaN or infinity, or on why it was not found."""
  try:
    return str(find_nonfinite(step, state, batch)).partition("\n")[0]
  except (RuntimeError, MemoryError) as error:  # JAX's own for a device without memory is a RuntimeError
    first = str(error).strip().partition("\n")[0]
    return f"the operation that began it was not found: {first}"


def _advice(guilty: str, step: TrainStep, state: TrainState) -> str:
  if guilty == "batch":
    return "mend the data: the batch itself holds NaN or infinity"
  if guilty in ("parameters", "model state"):
    return "start from an earlier checkpoint, or with a lower optimizer.learning_rate"
  scale = float(get_loss_scale(state.opt_state).scale)
  half = step.policy.compute_dtype.itemsize < 4
  options = ["policy=fp32 to see whether the model itself diverges"] if half else []
  if step.policy.compute_dtype == np.float16:
    options.append("policy=bf16, which has float32's range")
    if guilty == "gradients" and scale > 2.0**-20:
      options.append("a smaller policy.loss_scaling.min_scale")
  return ", ".join([*options, "a lower optimizer.learning_rate", "optimizer.clip_norm=1.0"])
