"""Orders in which a program's operations may run; a compiler chooses one that needs little memory."""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence

from mpjax.jaxpr import BACKWARD
from mpjax.planner.analytic._graph import GraphOperation, GraphValue


@dataclasses.dataclass(frozen=True)
class Peak:
  """The moment when a program stores the most bytes.

  Attributes:
    nbytes: bytes that are stored then, without arguments.
    at: the operation that runs then.
    live: values that are stored then, without arguments.
    saved: values of the forward pass that the backward pass reads, at the moment of their most bytes.
    extra: bytes inside the operation (a loop's body).
    read_backward: identities of the values that the backward pass reads.
    size: returns the bytes of a value as stored.
    order: the stored operations, in the order in which they run.
    root: returns the value whose memory a value is in.
    fresh: results that do not take an argument's memory.
    inner: the peak of the loop or branch that runs then.
  """

  nbytes: int
  at: GraphOperation | None
  live: list[GraphValue]
  saved: list[GraphValue]
  extra: int
  read_backward: frozenset[int]
  size: Callable[[GraphValue], int]
  order: Sequence[StoredOperation]
  root: Callable[[GraphValue], GraphValue]
  fresh: list[GraphValue]
  inner: Peak | None


@dataclasses.dataclass(eq=False, slots=True)
class StoredOperation:
  """An operation that stores a result, with all values that it reads from memory."""

  operation: GraphOperation
  reads: list[GraphValue]
  writes: list[GraphValue]
  extra: int
  inner: Peak | None = None


def delayed(steps: Sequence[StoredOperation]) -> list[StoredOperation]:
  """Returns the steps in program order, but with recomputed values just before their first read."""
  maker = {id(v): i for i, step in enumerate(steps) for v in step.writes}
  again: set[int] = set()
  for i, step in enumerate(steps):
    before = [maker[id(v)] for v in step.reads if id(v) in maker]
    if step.operation.region and all(j in again or steps[j].operation.phase != BACKWARD for j in before):
      again.add(i)
  first = list(range(len(steps)))
  used: dict[int, int] = {}
  for i in range(len(steps) - 1, -1, -1):
    if i in again:
      first[i] = used.get(i, i)
    for v in steps[i].reads:
      j = maker.get(id(v))
      if j is not None:
        used[j] = min(used.get(j, first[i]), first[i])
  order = sorted(range(len(steps)), key=lambda i: (first[i], i not in again, i))
  return [steps[i] for i in order]


def greedy(
  steps: Sequence[StoredOperation], kept: set[int], size: Callable[[GraphValue], int]
) -> list[StoredOperation]:
  """Returns the steps in an order that frees memory as early as possible.

  Args:
    steps: the steps in program order.
    kept: identities of the values that are never freed.
    size: returns the bytes of a value.
  """
  maker = {id(v): i for i, step in enumerate(steps) for v in step.writes}
  waits = [0] * len(steps)
  unlocks: list[list[int]] = [[] for _ in steps]
  left: dict[int, int] = {}
  for i, step in enumerate(steps):
    for v in step.reads:
      left[id(v)] = left.get(id(v), 0) + 1
      if id(v) in maker and maker[id(v)] != i:
        waits[i] += 1
        unlocks[maker[id(v)]].append(i)

  def gain(i: int) -> int:
    freed = sum(size(v) for v in steps[i].reads if left[id(v)] == 1 and id(v) not in kept)
    return freed - sum(size(v) for v in steps[i].writes if id(v) not in kept)

  readers: dict[int, list[int]] = {}
  for i, step in enumerate(steps):
    for v in step.reads:
      readers.setdefault(id(v), []).append(i)
  # Nothing is recomputed before the end of the forward pass.
  rank = lambda i: (steps[i].operation.phase == BACKWARD, -gain(i), i)
  ready = [rank(i) for i in range(len(steps)) if not waits[i]]
  heapq.heapify(ready)
  done = [False] * len(steps)
  order = []
  while ready:
    *_, i = heapq.heappop(ready)
    if done[i]:
      continue
    done[i] = True
    order.append(steps[i])
    for v in steps[i].reads:
      left[id(v)] -= 1
      if left[id(v)] == 1:
        for j in readers[id(v)]:
          if not done[j] and not waits[j]:
            heapq.heappush(ready, rank(j))
    for j in unlocks[i]:
      waits[j] -= 1
      if not waits[j]:
        heapq.heappush(ready, rank(j))
  return order
