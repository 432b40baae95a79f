"""Values that an island computes itself instead of reading them: a mask of positions, a one-hot of labels.

The inputs of an island are kept for the backward pass. A value that is cheap, and larger than what it is
computed from, is not worth its memory: a compiler fuses its computation into the reader. The same holds for a
half-precision copy of an argument, which exists anyway.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from mpjax._types import Var
from mpjax.casting._cast_plan import Node
from mpjax.casting._kinds import Held, castable, size
from mpjax.jaxpr import dtype_of, variables_of

_MOST = 8  # sources of one value: a value with more is considered as large as they are


class Copies:
  """The cheap equations of a program, which any island may compute itself.

  Args:
    cheap: those in no island, whose inside nothing else can read, in the order of the program.
    held: how each variable is held.
  """

  def __init__(self, cheap: Iterable[Node], held: Mapping[Var, Held]):
    self._held = held
    self._makers: dict[Var, tuple[int, Node]] = {}
    self._sources: dict[Var, tuple[Var, ...]] = {}
    for i, node in enumerate(cheap):
      operands = variables_of(node.equation.invars)
      sources = tuple(dict.fromkeys(s for a in operands for s in self._sources.get(a, (a,))))
      if len(sources) <= _MOST:
        self._makers.update(dict.fromkeys(node.equation.outvars, (i, node)))
        self._sources.update(dict.fromkeys(node.equation.outvars, sources))

  def instead_of(self, inputs: Sequence[Var], free: Collection[Var] = ()) -> tuple[Node, ...]:
    """Returns the equations for those inputs of an island that it should compute instead of reading.

    These inputs take at least twice the memory of their sources, without those that are read anyway.

    Args:
      inputs: the island's inputs.
      free: variables that cost nothing to keep.
    """
    read = dict.fromkeys(v for v in inputs if v not in self._makers)
    waiting = []
    for v in (v for v in inputs if v in self._makers):
      further = [source for source in self._sources[v] if source not in read]
      if 2 * sum(self._bytes(source) for source in further if source not in free) <= self._bytes(v):
        waiting.append(v)
        read.update(dict.fromkeys(further))
      else:
        read[v] = None
    made: set[Var] = set()
    while waiting:
      v = waiting.pop()
      if v in self._makers and v not in read and v not in made:
        made.add(v)
        waiting += variables_of(self._makers[v][1].equation.invars)
    return tuple(node for _, node in sorted({self._makers[v] for v in made}))

  def _bytes(self, v: Var) -> int:
    return size(v) * getattr(held_dtype(v, self._held), "itemsize", 4)


def held_dtype(v: Var, held: Mapping[Var, Held]) -> np.dtype:
  """Returns the dtype that a variable is held in."""
  return held[v].dtype if castable(v.aval) else dtype_of(v)
