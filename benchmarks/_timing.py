"""Times of what is compared: it takes turns in shuffled order, so that a machine's drift falls on all."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax


class Stepper:
  """Runs a step on its own state; a call makes `inner` steps and waits for them."""

  def __init__(self, step: Any, state: Any, batch: Any, inner: int = 1):
    self.step, self.state, self.batch, self.inner = step, state, batch, inner

  def __call__(self) -> Any:
    for _ in range(self.inner):
      self.state, _ = self.step(self.state, self.batch)
    return jax.block_until_ready(self.state)


def in_turns(
  runs: Mapping[str, Callable[[], Any]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
  """Seconds of each run by round, after one that does not count."""
  times: dict[str, list[float]] = {name: [] for name in runs}
  for number in range(rounds + 1):
    for name in shuffled(runs, number):
      begin = clock()
      jax.block_until_ready(runs[name]())
      times[name].append(clock() - begin)
  return {name: seconds[1:] for name, seconds in times.items()}


def shuffled(names: Iterable[str], seed: int) -> list[str]:
  """The names in an order that only the seed decides."""
  order = list(names)
  random.Random(seed).shuffle(order)
  return order


def compared(what: str, times: list[float], base: list[float]) -> dict[str, float]:
  """Median seconds, and the median and quartiles of the ratios within the rounds."""
  ratios = [a / b for a, b in zip(times, base, strict=True)]
  low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
  return {
    f"{what}_s": statistics.median(times),
    f"{what}_ratio": middle,
    f"{what}_q25": low,
    f"{what}_q75": high,
  }
