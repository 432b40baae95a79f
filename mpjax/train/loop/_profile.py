"""A profile of chosen steps of a run."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import jax

from mpjax._types import PyTree
from mpjax.train.loop._output import LOGGER, goes_on_without


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
    self._is_on, self._step = False, start

  def before(self, step: int) -> None:
    """Starts the trace if this step is the first."""
    if step == self._first <= self._last:
      self._is_on = self._try(lambda: jax.profiler.start_trace(self._folder))

  def after(self, step: int, state: PyTree) -> None:
    """Waits for the state after this step and ends the trace, if this step was the last."""
    self._step = step
    if self._is_on and step == self._last:
      jax.block_until_ready(state)
      self.close()

  def close(self) -> None:
    """Ends and writes the trace, if there is one."""
    if self._is_on and self._try(jax.profiler.stop_trace):
      LOGGER.info(
        f"a profile of steps {self._first} to {self._step} is in {self._folder}: open it with xprof --logdir "
        f"{self._folder}, or its trace.json.gz in Perfetto"
      )
    self._is_on = False

  def _try(self, action: Callable[[], object]) -> bool:
    try:
      action()
    except Exception as error:  # no error of a profiler is worth a run
      goes_on_without("a profile", error)
      return False
    return True
