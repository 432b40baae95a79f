"""Turns SIGTERM, SIGHUP and Ctrl-C into a flag between steps; several processes stop after the same step."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


class Interrupt:
  """Within its `with` block, the first SIGTERM, SIGHUP or SIGINT sets `signum`; a second acts as usual.

  A SIGHUP that the process ignores (`nohup`) stays ignored.

  Attributes:
    signum: the signal that was received, or `None`.
  """

  def __init__(self) -> None:
    self.signum: int | None = None
    self._before: dict[int, Any] = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():
      hangup = getattr(signal, "SIGHUP", None)
      signals = [signal.SIGTERM, signal.SIGINT]
      if hangup is not None and signal.getsignal(hangup) != signal.SIG_IGN:
        signals.append(hangup)
      self._before = {signum: signal.signal(signum, self._receive) for signum in signals}
    return self

  def __exit__(self, *_: object) -> None:
    for signum, handler in self._before.items():
      signal.signal(signum, handler)

  def _receive(self, signum: int, _: FrameType | None) -> None:
    self.signum = signum
    signal.signal(signum, self._before[signum])


class Poll:
  """Tells all processes that one of them got a signal, so that they stop after the same step.

  Every process asks before each step, and after it reads the answer to the question of the step before. That
  answer is there by then, so nothing waits. One number crosses the devices.

  Args:
    several: whether there are other processes.
  """

  def __init__(self, several: bool):
    self._several = several
    self._answers: list[Any] = []
    if several:
      devices = np.array(jax.devices())
      mesh = jax.sharding.Mesh(devices, ("everywhere",), axis_types=(AxisType.Auto,))
      self._sharding = NamedSharding(mesh, PartitionSpec("everywhere"))
      self._latest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))
      self._quiet = self._everywhere(0)

  def ask(self, signum: int | None) -> None:
    """Tells the others, before a step, whether this process got a signal."""
    if self._several:
      word = self._quiet if signum is None else self._everywhere(signum)
      self._answers.append(self._latest(word))

  def answer(self, signum: int | None) -> int | None:
    """Returns the signal that any process reported one step ago; in a single process, its own at once."""
    if not self._several:
      return signum
    if len(self._answers) < 2:
      return None
    return int(self._answers.pop(0)) or None

  def _everywhere(self, signum: int) -> jax.Array:
    word = np.full((1,), signum, np.int32)
    return jax.make_array_from_callback((self._sharding.num_devices,), self._sharding, lambda _: word)
