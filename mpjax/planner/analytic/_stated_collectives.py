"""Collectives that a program states itself, as a step with a mesh does; not those that a compiler adds."""

from __future__ import annotations

import collections

import numpy as np

from mpjax.jaxpr import facts
from mpjax.planner._results import Collective
from mpjax.planner.analytic._graph import Graph

_MOST_SOURCES = 3


def stated_collectives(graph: Graph) -> tuple[Collective, ...]:
  """Returns what crosses devices in one step by the program: the bytes of the results on each device."""
  moved: collections.Counter[tuple[str, str, int]] = collections.Counter()
  counts: collections.Counter[tuple[str, str, int]] = collections.Counter()
  sources: dict[tuple[str, str, int], collections.Counter[str]] = collections.defaultdict(collections.Counter)
  for operation, times in graph.every_operation():
    name = facts(operation.equation).collective
    if not name or operation.group == 1:
      continue
    for value in operation.results:
      key = (name, np.dtype(value.dtype).name, operation.group)
      moved[key] += value.nbytes * times
      counts[key] += times
      sources[key][operation.path] += value.nbytes * times
  return tuple(
    Collective(
      operation=name,
      dtype=dtype,
      nbytes=nbytes,
      count=counts[name, dtype, group],
      sources=tuple(p for p, _ in sources[name, dtype, group].most_common(_MOST_SOURCES) if p),
      group=group,
    )
    for (name, dtype, group), nbytes in moved.most_common()
  )
