"""Checkpoints of a run: asynchronous and atomic (orbax), the last k kept and the best by eval loss."""

from __future__ import annotations

import math
import pathlib
from typing import Any, NamedTuple

import orbax.checkpoint as ocp

from mpjax.step import TrainState


class Restored(NamedTuple):
  """What a checkpoint gives back: the state, the data iterator's state, and the loop's own numbers."""

  state: TrainState
  data: Any
  loop: dict[str, Any]


class Checkpoints:
  """The `checkpoints/` folder of a run directory.

  A checkpoint is written beside its final place and renamed when complete, so a kill at any moment
  leaves the last good one.
  """

  def __init__(self, directory: pathlib.Path, keep: int = 2):
    policy, eval_loss = ocp.checkpoint_managers, lambda metrics: metrics["eval_loss"]
    options = ocp.CheckpointManagerOptions(
      # Both: the newest to resume from, the best to export.
      preservation_policy=policy.AnyPreservationPolicy(
        [
          policy.LatestN(keep),
          policy.BestN(get_metric_fn=eval_loss, reverse=True, n=1),
        ]
      ),
      best_fn=eval_loss,
      best_mode="min",
      cleanup_tmp_directories=True,
    )
    self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

  def save(
    self, step: int, state: TrainState, data: Any, loop: dict[str, Any], eval_loss: float | None
  ) -> None:
    """Starts writing a checkpoint; the arrays are copied before this returns."""
    if step in self.steps():
      return
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_to_tree(state)),
        data=ocp.args.JsonSave(data),
        loop=ocp.args.JsonSave(loop),
      ),
      # One that was not evaluated is never the best.
      metrics={"eval_loss": math.inf if eval_loss is None else eval_loss},
    )

  def steps(self) -> list[int]:
    """Steps of the complete checkpoints, in order."""
    return sorted(self._manager.all_steps())

  def latest(self) -> int | None:
    """Step of the newest complete checkpoint."""
    return self._manager.latest_step()

  def best(self) -> int | None:
    """Step of the checkpoint with the lowest eval loss, or of the newest where none has one."""
    return self._manager.best_step()

  def restore(self, step: int, like: TrainState) -> Restored:
    """The checkpoint of a step, with the structure, dtypes and shardings of `like` (abstract arrays)."""
    parts = self._manager.restore(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardRestore(_to_tree(like)),
        data=ocp.args.JsonRestore(),
        loop=ocp.args.JsonRestore(),
      ),
    )
    return Restored(like.replace(**parts["state"]), parts["data"], parts["loop"])

  def wait(self) -> None:
    """Blocks until what was saved is on disk."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, then releases the threads."""
    self._manager.close()


def _to_tree(state: TrainState) -> dict[str, Any]:
  """The arrays of a state by field; without a state of FP8 scaling where there is none."""
  fields = ("step", "params", "model_state", "opt_state", "rng", "fp8_state")
  tree = {name: getattr(state, name) for name in fields}
  return tree if tree["fp8_state"] else {name: tree[name] for name in fields[:-1]}
