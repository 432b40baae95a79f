"""The records of a run: one mapping for each step, the summary, the time by part; and what they show."""

from __future__ import annotations

import contextlib
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from mpjax._render.plain_text import plain_data
from mpjax._types import Metrics, PyTree
from mpjax.fp8 import in_force
from mpjax.numerics import find_nonfinite
from mpjax.policy import LossScaling
from mpjax.step import TrainState, TrainStep
from mpjax.train._errors import one_line
from mpjax.train.loop._sinks import LOGGER, goes_on_without
from mpjax.train.setup._experiment import Setup

_AVERAGED = 20  # steps over which time and speed are averaged


class Records:
  """The records of one run's steps, in order.

  `start` is the step that the run resumes from. `last` has the last recorded value of each name, up to that
  step; checkpoints have it.
  """

  def __init__(self, setup: Setup, start: int, last: dict[str, Any]):
    self._setup, self.start, self.last = setup, start, last
    unit, per_row = setup.task.units
    self._speed, self._per_step = f"{unit}_per_s", setup.config.data.batch_size * per_row
    self._times: list[float] = []  # of every step but the first of this process, which compiles
    self._clock = time.perf_counter()

  def restart_clock(self) -> None:
    """Leaves the time since the last step out of the next step's time."""
    self._clock = time.perf_counter()

  def of(self, step: int, metrics: Metrics) -> dict[str, Any]:
    """Returns the record of a step; waits for its metrics."""
    values = plain_data({name: np.asarray(value).item() for name, value in metrics.items()})
    if step > self.start + 1:
      now = time.perf_counter()
      self._times.append(now - self._clock)
      self._clock = now
    step_time = self._step_time(_AVERAGED)
    return {
      "step": step,
      "loss": values.pop("loss"),
      # Without a loss scale the loss is not scaled.
      "loss_scale": values.pop("loss_scale", 1.0),
      "skipped_steps": values.pop("skipped_steps", 0),
      "grads_finite": values.pop("grads_finite", None),
      "step_time_s": step_time,
      self._speed: None if step_time is None else self._per_step / step_time,
      **values,
    }

  def is_best(self, eval_loss: float) -> bool:
    """Returns whether an evaluation's loss is the lowest so far, and if so records it."""
    if not eval_loss < self.last.get("best_eval_loss", np.inf):  # nor if it is NaN
      return False
    self.last["best_eval_loss"] = eval_loss
    return True

  def summary(self, state: TrainState, seconds: Mapping[str, float]) -> dict[str, Any]:
    """Returns the summary of a run that has ended with `state`; `seconds` is its time by part."""
    step_time = self._step_time(len(self._times))
    config, policy = self._setup.config, self._setup.policy
    return {
      "policy": config.policy if isinstance(config.policy, str) else str(policy),
      **({} if policy.fp8 is None else {"fp8": in_force(policy.fp8)}),
      "backend": jax.default_backend(),
      "steps": config.train.steps,
      "skipped_steps": self.last["skipped_steps"],
      **({} if policy.loss_scaling is None else {"loss_scale": self.last["loss_scale"]}),
      "learning_rate": self.last.get("learning_rate"),
      "grad_norm": self.last.get("grad_norm"),
      "final_loss": self.last["loss"],
      **{name: value for name, value in self.last.items() if name.startswith("eval_")},
      "best_eval_loss": self.last.get("best_eval_loss"),
      "steps_per_s": None if step_time is None else 1 / step_time,
      "time_s": dict(seconds),
      **({"time_s_from_step": self.start} if self.start else {}),
      "peak_memory_bytes": peak_memory(),
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.arrays)),
      "resolved_policy": policy.to_dict(),
    }

  def _step_time(self, steps: int) -> float | None:
    """Returns the mean time of the last `steps` steps, in seconds; `None` before this process's second step.

    A single step's time would be wrong: the host sees the end of a step two steps late, and of some at once.
    """
    return float(np.mean(self._times[-steps:])) if self._times else None


def peak_memory() -> int | None:
  """Returns the peak bytes in use on the first device, or on a CPU by this process."""
  if jax.default_backend() != "cpu" or sys.platform == "win32":
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
  import resource

  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextlib.contextmanager
def profiled(folder: pathlib.Path) -> Iterator[None]:
  """Traces the steps of its block with JAX's profiler. If that fails, the run goes on."""
  has_begun = False
  with goes_on_without("a profile"):
    jax.profiler.start_trace(folder)
    has_begun = True
  try:
    yield
  finally:
    with goes_on_without("a profile"):
      if has_begun:
        jax.profiler.stop_trace()
        LOGGER.info(f"a profile is in {folder}: open it with xprof --logdir {folder}, or in Perfetto")


def step_report(step: TrainStep, state: TrainState, batch: PyTree) -> str:
  """Returns which tensors of a step are not finite, the first operation to blame, and what to try."""
  try:
    return "\n".join(find_nonfinite(step, state, batch)._answer())
  except (RuntimeError, MemoryError) as error:  # JAX raises RuntimeError if a device is out of memory
    return f"the operation that began it was not found: {one_line(str(error))}"


def why_stuck(record: Mapping[str, Any], scaling: LossScaling | None, max_skips: int) -> str | None:
  """Returns why the last `max_skips` steps, up to a record's, were skipped; `None` if a run may recover."""
  if record.get("consecutive_skips", 0) < max_skips:
    return None
  if record.get("grads_finite", False) and not record.get("updates_finite", True):  # no scale mends these
    return "had finite gradients, and an update, model state or parameters that are not finite"
  if scaling is None:
    return "had non-finite gradients"
  if scaling.kind != "static" and record["loss_scale"] * scaling.backoff_factor >= scaling.min_scale:
    return None
  return f"had non-finite gradients, and the loss scale of {record['loss_scale']:g} cannot fall further"
