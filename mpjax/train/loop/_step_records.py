"""Makes the records of steps: metrics, learning rate and speed."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mpjax._types import Metrics
from mpjax.loss_scale._state_access import find_scaler, find_states
from mpjax.step import TrainState
from mpjax.train.loop._metrics_file import plain
from mpjax.train.setup._setup import Setup

_SHOWN = 20  # steps over which time and speed are averaged
_RATES = 2**16  # learning rates computed at once


class Records:
  """The records of one run's steps, in order.

  Attributes:
    last: the last recorded value of each name; saved in checkpoints.
    next_update: the number of the next update, as the schedule counts.
  """

  def __init__(self, setup: Setup):
    self._setup = setup
    self._has_scale = setup.policy.loss_scaling is not None
    unit, per_row = setup.task.units
    self._speed, self._per_step = f"{unit}_per_s", setup.config.data.batch_size * per_row
    self._times: list[float] = []  # of every step but the first of this process, which compiles
    self._clock = time.perf_counter()
    self.last: dict[str, Any] = {}
    self.next_update = 0

  def begin(self, state: TrainState, start: int) -> None:
    """Sets the state and step that the next steps start from.

    Computes many learning rates at once, because each alone would wait for the device.
    """
    scaler = find_scaler(state.opt_state)
    skipped = 0 if scaler is None else int(np.asarray(scaler.skipped_steps))
    count = updates_taken(state)
    self.next_update = start - skipped if count is None else count
    self._steps_before, self._skipped_before = start, skipped
    self._first_update, self._rates_from = self.next_update, 0
    self._rates = np.zeros(0, np.float32)
    self._rate(self._first_update)

  def wait_for_compilation(self, step: int, metrics: Metrics) -> None:
    """Waits for the first step of this process, so that no later step's time includes compilation."""
    if step == self._steps_before + 1:
      jax.block_until_ready(metrics)
      self.restart_clock()

  def restart_clock(self) -> None:
    """Leaves the time since the last step out of the next step's time."""
    self._clock = time.perf_counter()

  def of(self, step: int, metrics: Metrics) -> dict[str, Any]:
    """Returns the record of a step; waits for its metrics."""
    values = {name: plain(value) for name, value in metrics.items()}
    if step > self._steps_before + 1:
      now = time.perf_counter()
      self._times.append(now - self._clock)
      self._clock = now
    step_time = self._step_time(_SHOWN)
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

  def scalars(self, record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record for TensorBoard, without the loss scale if the policy has none."""
    hidden = {"step"} if self._has_scale else {"step", "loss_scale"}
    return {
      name: value for name, value in record.items() if name not in hidden and isinstance(value, (int, float))
    }

  def summary(self) -> dict[str, Any]:
    """Returns the records' part of a run's summary."""
    step_time = self._step_time(len(self._times))
    return {
      "skipped_steps": self.last["skipped_steps"],
      **({"loss_scale": self.last["loss_scale"]} if self._has_scale else {}),
      "learning_rate": self.last.get("learning_rate"),
      "grad_norm": self.last.get("grad_norm"),
      "final_loss": self.last["loss"],
      **{name: value for name, value in self.last.items() if name.startswith("eval_")},
      "best_eval_loss": self.last.get("best_eval_loss"),
      "steps_per_s": None if step_time is None else 1 / step_time,
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
      self._rates = learning_rates(self._setup.schedule, update, _RATES)
    return float(self._rates[update - self._rates_from])


def updates_taken(state: TrainState) -> int | None:
  """Returns the number of updates that an optax schedule has counted; `None` without such a schedule."""
  counts = find_states(state.opt_state, optax.ScaleByScheduleState).values()
  return next((int(np.asarray(found.count)) for found in counts), None)


def learning_rates(schedule: optax.Schedule, first: int, count: int) -> np.ndarray:
  """Returns the learning rates of `count` updates from number `first` on: float32[count]."""
  rate = lambda update: jnp.asarray(schedule(update), jnp.float32)
  return np.asarray(jax.jit(jax.vmap(rate))(jnp.arange(first, first + max(count, 1))))
