"""What a training step's parameters and loss function may be: checked when it is traced."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._tree import named_leaves
from mpjax.loss_scale._finite import is_inexact

_METRICS = {"loss", "loss_scale", "grads_finite", "skipped_steps", "consecutive_skips"}


def check_differentiable(params: Any) -> None:
  """Raises `ValueError` for a parameter that has no gradient."""
  for name, leaf in named_leaves(params):
    if not is_inexact(leaf):
      raise ValueError(
        f"parameter {name!r} is {jnp.result_type(leaf)} and cannot be trained: put it "
        "into model_state, or let loss_fn close over it"
      )


def unpack(out: Any, takes_state: bool) -> tuple[jax.Array, dict[str, jax.Array], Any]:
  """Loss, metrics and model state (or `None`) from what a loss function returned."""
  parts = out if isinstance(out, tuple) else (out,)
  expected = "(loss, metrics, model_state)" if takes_state else "loss or (loss, metrics)"
  if len(parts) not in ((3,) if takes_state else (1, 2)):
    raise ValueError(f"loss_fn returned {len(parts)} value(s): expected {expected}")
  loss, metrics, model_state = (*parts, {}, None)[:3] if len(parts) == 1 else (*parts, None)[:3]
  loss = jnp.asarray(loss)
  if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
    raise ValueError(f"loss_fn returned a loss of {loss.dtype}{list(loss.shape)}: expected a floating scalar")
  if not isinstance(metrics, dict):
    raise ValueError(f"loss_fn returned metrics of type {type(metrics).__name__}: expected a dict of arrays")
  taken = _METRICS & metrics.keys()
  if taken:
    raise ValueError(
      f"loss_fn returned a metric named {min(taken)!r}, which the step itself reports: rename it"
    )
  return loss, dict(metrics), model_state
