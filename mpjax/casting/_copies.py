"""What an island makes itself rather than read: a mask of positions, a one-hot of labels.

What an island reads is kept for the backward pass. A value that is cheap to make, and larger than what it is
made of, is not worth its memory: a compiler fuses the making into the reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from mpjax._types import Var
from mpjax.casting._cast_plan import Node
from mpjax.casting._kinds import Held, castable, size
from mpjax.jaxpr import dtype_of, variables_of

_MOST = 8  # sources of one value: a value of more is taken to be as large as they are


class Copies:
  """The cheap equations of a program, which any island may carry out itself.

  Args:
    nodes: the decisions, in the order of the program.
    cheap: which of them are cheap, and in no island, whose inside nothing else can read.
    held: how each variable is held.
  """

  def __init__(self, nodes: Sequence[Node], cheap: Sequence[bool], held: Mapping[Var, Held]):
    self._nodes = nodes
    self._held = held
    self._makers: dict[Var, int] = {}
    self._sources: dict[Var, tuple[Var, ...]] = {}
    for i, (node, is_cheap) in enumerate(zip(nodes, cheap, strict=True)):
      operands = variables_of(node.equation.invars)
      sources = tuple(dict.fromkeys(s for a in operands for s in self._sources.get(a, (a,))))
      if is_cheap and len(sources) <= _MOST:
        self._makers.update(dict.fromkeys(node.equation.outvars, i))
        self._sources.update(dict.fromkeys(node.equation.outvars, sources))

  def instead_of(self, inputs: Sequence[Var]) -> tuple[Node, ...]:
    """Returns the equations that make those of an island's inputs that had better be made than read.

    They take at least twice the memory of what they are made of, beside what is read anyway.
    """
    read: dict[Var, None] = dict.fromkeys(v for v in inputs if v not in self._makers)
    made = []
    for v in inputs:
      if v in self._makers:
        further = [source for source in self._sources[v] if source not in read]
        if 2 * sum(map(self._bytes, further)) <= self._bytes(v):
          made.append(v)
          read.update(dict.fromkeys(further))
        else:
          read[v] = None
    return self._back_to(made, read)

  def _bytes(self, v: Var) -> int:
    return size(v) * getattr(held_dtype(v, self._held), "itemsize", 4)

  def _back_to(self, made: Sequence[Var], read: Mapping[Var, None]) -> tuple[Node, ...]:
    """Returns the equations that make some variables of those that are read."""
    found: set[int] = set()
    waiting = list(made)
    while waiting:
      v = waiting.pop()
      i = self._makers.get(v)
      if i is not None and i not in found and v not in read:
        found.add(i)
        waiting += variables_of(self._nodes[i].equation.invars)
    return tuple(self._nodes[i] for i in sorted(found))


def held_dtype(v: Var, held: Mapping[Var, Held]) -> np.dtype:
  """Returns the dtype that a variable is held in."""
  return held[v].dtype if castable(v.aval) else dtype_of(v)
