"""Measures a run: records of steps, evaluation, time by part, memory, and a profile of chosen steps."""

from __future__ import annotations

import contextlib
import pathlib
import shutil
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._types import Metrics, PyTree
from mpjax.fp8._hardware import in_force
from mpjax.loss_scale import find_scaler, find_states
from mpjax.step import TrainState
from mpjax.train.loop._metrics_file import plain
from mpjax.train.loop._output import LOGGER, goes_on_without
from mpjax.train.setup._setup import Setup

# Number of newest steps whose metrics the host does not wait for.
LAG = 2
_AVERAGED = 20  # steps over which time and speed are averaged
_RATES = 2**16  # learning rates computed at once, since each alone would wait for the device
# The parts of a run's time.
_PARTS = ("start", "compile", "data", "step", "evaluation", "checkpoint")


class Records:
  """The records of one run's steps, in order.

  Attributes:
    last: the last recorded value of each name; saved in checkpoints.
    next_update: the number of the next update, as the schedule counts.

  Args:
    setup: the setup of the run.
    began: when the run began, as `time.perf_counter` counts.
  """

  def __init__(self, setup: Setup, began: float):
    self._setup = setup
    self._has_scale = setup.policy.loss_scaling is not None
    unit, per_row = setup.task.units
    self._speed, self._per_step = f"{unit}_per_s", setup.config.data.batch_size * per_row
    self._times: list[float] = []  # of every step but the first of this process, which compiles
    self._clock = time.perf_counter()
    self._seconds, self._part, self._since = dict.fromkeys(_PARTS, 0.0), "start", began
    self.last: dict[str, Any] = {}
    self.next_update = 0

  def enter(self, part: str) -> None:
    """Ends a part of the run's time and begins another. The host's time: devices work on meanwhile."""
    now = time.perf_counter()
    self._seconds[self._part] += now - self._since
    self._part, self._since = part, now

  def begin(self, state: TrainState, start: int) -> None:
    """Sets the state and step that the next steps start from."""
    scaler = find_scaler(state.opt_state)
    skipped = 0 if scaler is None else int(np.asarray(scaler.skipped_steps))
    counts = find_states(state.opt_state, optax.ScaleByScheduleState).values()
    counted = next((int(np.asarray(found.count)) for found in counts), start - skipped)
    self._first_update = self.next_update = counted
    self._steps_before, self._skipped_before = start, skipped
    self._rates_from, self._rates = 0, np.zeros(0, np.float32)
    self._rate(counted)

  def is_first(self, step: int) -> bool:
    """Returns whether a step is the first of this process."""
    return step == self._steps_before + 1

  def wait_for_compilation(self, step: int, metrics: Metrics) -> None:
    """Waits for the first step of this process, so that no later step's time includes compilation."""
    if self.is_first(step):
      jax.block_until_ready(metrics)
      self.enter("step")
      self.restart_clock()

  def restart_clock(self) -> None:
    """Leaves the time since the last step out of the next step's time."""
    self._clock = time.perf_counter()

  def of(self, step: int, metrics: Metrics) -> dict[str, Any]:
    """Returns the record of a step; waits for its metrics."""
    values = {name: plain(value) for name, value in metrics.items()}
    if not self.is_first(step):
      now = time.perf_counter()
      self._times.append(now - self._clock)
      self._clock = now
    step_time = self._step_time(_AVERAGED)
    record = {
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
    # A plug-in's optimiser may report its own rate in its state.
    return record if "learning_rate" in record else record | {"learning_rate": self._learning_rate(record)}

  def is_best(self, eval_loss: float) -> bool:
    """Returns whether an evaluation's loss is the lowest so far, and if so records it."""
    best = self.last.get("best_eval_loss")
    if not np.isfinite(eval_loss) or (best is not None and eval_loss >= best):
      return False
    self.last["best_eval_loss"] = eval_loss
    return True

  def scalars(self, record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record for the trackers, without the loss scale if the policy has none."""
    hidden = {"step"} if self._has_scale else {"step", "loss_scale"}
    return {
      name: value for name, value in record.items() if name not in hidden and isinstance(value, (int, float))
    }

  def summary(self, state: TrainState) -> dict[str, Any]:
    """Returns the summary of a run that has ended with `state`."""
    step_time = self._step_time(len(self._times))
    self.enter(self._part)
    config, policy = self._setup.config, self._setup.policy
    return {
      "policy": config.policy if isinstance(config.policy, str) else str(policy),
      **({} if policy.fp8 is None else {"fp8": in_force(policy.fp8)}),
      "backend": jax.default_backend(),
      "steps": config.train.steps,
      "skipped_steps": self.last["skipped_steps"],
      **({"loss_scale": self.last["loss_scale"]} if self._has_scale else {}),
      "learning_rate": self.last.get("learning_rate"),
      "grad_norm": self.last.get("grad_norm"),
      "final_loss": self.last["loss"],
      **{name: value for name, value in self.last.items() if name.startswith("eval_")},
      "best_eval_loss": self.last.get("best_eval_loss"),
      "steps_per_s": None if step_time is None else 1 / step_time,
      "time_s": self._seconds,
      **({"time_s_from_step": self._steps_before} if self._steps_before else {}),
      "peak_memory_bytes": peak_memory(),
      "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.arrays)),
      "resolved_policy": policy.to_dict(),
    }

  def _step_time(self, steps: int) -> float | None:
    """Returns the mean time of the last `steps` steps, in seconds; `None` before this process's second step.

    A single step's time would be wrong: the host sees the end of a step two steps late, and of some at once.
    """
    return float(np.mean(self._times[-steps:])) if self._times else None

  def _learning_rate(self, record: dict[str, Any]) -> float:
    """Returns the learning rate of a step, or the rate that a skipped step would have had."""
    was_skipped = record["grads_finite"] is False or record.get("updates_finite") is False
    skipped = record["skipped_steps"] - self._skipped_before - was_skipped
    return self._rate(self._first_update + record["step"] - 1 - self._steps_before - skipped)

  def _rate(self, update: int) -> float:
    """Returns the learning rate of an update."""
    if not 0 <= update - self._rates_from < len(self._rates):
      self._rates_from = update
      rate = lambda number: jnp.asarray(self._setup.schedule(number), jnp.float32)
      self._rates = np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(update, update + _RATES)))
    return float(self._rates[update - self._rates_from])


def peak_memory() -> int | None:
  """Returns the peak bytes in use on the first device, or on a CPU by this process."""
  stats = jax.local_devices()[0].memory_stats()
  if stats and "peak_bytes_in_use" in stats:
    return stats["peak_bytes_in_use"]
  if jax.default_backend() != "cpu":
    return None
  try:
    import resource
  except ImportError:  # not on Windows
    return None
  unit = 1 if sys.platform == "darwin" else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class Profile:
  """Traces chosen steps with JAX's profiler, and waits for the last of them. If it fails, the run goes on.

  Args:
    steps: the first and the last step, from 1; `None` for no profile.
    start: the step that the run resumes from; earlier steps are left out.
    folder: the folder of the trace; made if needed.
  """

  def __init__(self, steps: tuple[int, ...] | None, start: int, folder: pathlib.Path):
    first, self._last = steps or (0, 0)
    self._first, self._folder = max(first, start + 1), folder
    self._is_on = False

  def before(self, step: int) -> None:
    """Starts the trace if this step is the first."""
    if step == self._first <= self._last:
      self._is_on = self._try(lambda: jax.profiler.start_trace(self._folder))

  def after(self, step: int, state: PyTree) -> None:
    """Waits for the state after this step and ends the trace, if this step was the last."""
    if self._is_on and step == self._last:
      jax.block_until_ready(state)
      self.stop(step)

  def stop(self, step: int, *, keep: bool = True) -> None:
    """Ends and writes the trace, if there is one, after a step; deletes it again unless `keep`."""
    is_written, self._is_on = self._is_on and self._try(jax.profiler.stop_trace), False
    if is_written and keep:
      LOGGER.info(
        f"a profile of steps {self._first} to {step} is in {self._folder}: open it with xprof --logdir "
        f"{self._folder}, or its trace.json.gz in Perfetto"
      )
    elif is_written:
      shutil.rmtree(self._folder, ignore_errors=True)
      for parent in list(self._folder.parents)[:2]:  # of a run directory that was moved
        with contextlib.suppress(OSError):
          parent.rmdir()

  def _try(self, action: Callable[[], object]) -> bool:
    try:
      action()
    except Exception as error:  # no error of a profiler is worth a run
      goes_on_without("a profile", error)
      return False
    return True
