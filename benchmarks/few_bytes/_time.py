"""Time of an update that does nothing else, on this machine."""

from __future__ import annotations

import functools
import gc
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax

from benchmarks._record import origin
from benchmarks._worker import Worker
from benchmarks.few_bytes._variants import VARIANTS, update_of

LEAVES, SHAPE = 8, (1024, 2048)
COUNT = LEAVES * SHAPE[0] * SHAPE[1]
PEERS = (
  "torch.optim.AdamW",
  "torch.optim.AdamW, fused",
  "torchao.optim.AdamW8bit",
  "torchao.optim.AdamWFp8",
  "bitsandbytes.optim.AdamW8bit",
)
WAIT = 300.0  # seconds for a peer's answer; one compiles first


class Ours:
  """A variant with its parameters and state, which each round moves on."""

  def __init__(self, name: str, grads: Any):
    tx, dtype = VARIANTS[name]
    self.grads = grads
    self.params = jax.tree.map(lambda g: (1e3 * g).astype(dtype), grads)
    self.state = tx.init(self.params)
    self.update = jax.jit(update_of(tx), donate_argnums=(0, 1))
    self()

  def __call__(self) -> float:
    """Returns the seconds that an update takes."""
    begin = time.perf_counter()
    self.params, self.state = self.update(self.params, self.state, self.grads)
    jax.block_until_ready((self.params, self.state))
    return time.perf_counter() - begin


def measure(rounds: int, torch_python: str | None) -> dict[str, Any]:
  """Returns the seconds of each variant and of the peers that there are, taken in turns."""
  report = origin(f"few_bytes time --rounds {rounds}", "jaxlib", "optax") | {"parameters": COUNT}
  keys = jax.random.split(jax.random.key(0), LEAVES)
  grads = {f"layer{i}": 1e-3 * jax.random.normal(key, SHAPE) for i, key in enumerate(keys)}
  timers: dict[str, Callable[[], float]] = {name: Ours(name, grads) for name in VARIANTS}
  workers = _peers(torch_python, report) if torch_python else {}
  timers |= {name: functools.partial(_ask, worker) for name, worker in workers.items()}
  seconds: dict[str, list[float]] = {name: [] for name in timers}
  gc.collect()
  for i in range(rounds):
    for name in random.Random(i).sample(list(timers), len(timers)):
      seconds[name].append(timers[name]())
  for worker in workers.values():
    worker.close()
  report["rows"] = rows = []
  for name, times in seconds.items():
    base = PEERS[0] if name in PEERS else next(iter(VARIANTS))
    pairs = zip(times, seconds[base], strict=True)
    row: dict[str, Any] = {
      "name": name,
      "beside": base,
      "least_s": min(times),  # what others on the machine disturb least
      "median_s": statistics.median(times),
      "least_ratio": min(times) / min(seconds[base]),
      "median_ratio": statistics.median(mine / theirs for mine, theirs in pairs),
    }
    rows.append(row)
    print(
      f"{name:34}{row['least_s'] / COUNT * 1e9:8.2f} ns a parameter{row['least_ratio']:8.2f} of {base} "
      f"(medians: {row['median_ratio']:.2f})"
    )
  return report


def _ask(worker: Worker) -> float:
  """Returns the seconds that a peer's update takes."""
  return worker.ask(WAIT)["seconds"]


def _peers(python: str, report: dict[str, Any]) -> dict[str, Worker]:
  """Starts a process for each peer; those that cannot be are named, and left out."""
  workers = {}
  for name in PEERS:
    task = {"name": name, "leaves": LEAVES, "shape": SHAPE}
    worker = Worker(python, "benchmarks.few_bytes._torch_rows", task, {})
    ready = worker.read(WAIT)
    if "error" in ready or "error" in (first := worker.ask(WAIT)):
      print(f"{name}: left out: {ready.get('error') or first['error']}")
      worker.close()
      continue
    workers[name] = worker
    report["versions"] |= ready["versions"]
  return workers
