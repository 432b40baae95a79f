"""Decides which checkpoints to keep: the newest, the best, and the newest whose step was not skipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orbax.checkpoint as ocp

# The metric for the number of steps in a row, up to the checkpoint's, that were skipped.
SKIPS = "skips"


def preservation(
  keep: int, eval_loss: Callable[[dict[str, Any]], float]
) -> ocp.checkpoint_managers.PreservationPolicy:
  """Returns a policy that keeps the newest `keep`, the best, and the newest whose step was not skipped."""
  policy = ocp.checkpoint_managers
  best = policy.BestN(get_metric_fn=eval_loss, reverse=True, n=1, keep_checkpoints_without_metrics=False)
  return policy.AnyPreservationPolicy([policy.LatestN(keep), best, _LatestTaken()])


class _LatestTaken(ocp.checkpoint_managers.PreservationPolicy):
  """Keeps the newest checkpoint whose step was not skipped. Otherwise a run that is stuck would delete it."""

  def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
    taken = [not (checkpoint.metrics or {}).get(SKIPS) for checkpoint in checkpoints]
    newest = max((i for i, each in enumerate(taken) if each), default=None)
    return [i == newest for i in range(len(taken))]
