"""Values that an island computes itself instead of reading them: a mask of positions, a one-hot of labels.

The inputs of an island are kept for the backward pass. A value that is cheap, and larger than what it is
computed from, is not worth its memory: a compiler fuses its computation into the reader. The same holds for a
half-precision copy of an argument, which exists anyway (`making_operands_again`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mpjax._types import Var
from mpjax.casting._cast_plan import Island, Mode, Node
from mpjax.casting._kinds import FLOAT32, Held, Kind, castable, size
from mpjax.casting._reasons import EXACT
from mpjax.jaxpr import Trait, bodies_of, dtype_of, has, variables_of

_KEEPS_NONE = Trait.NO_RESIDUAL | Trait.CHOICE
_MOST = 8  # sources of one value: a value with more is considered as large as they are


class Copies:
  """The cheap equations of a program, which any island may compute itself.

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

  def instead_of(self, inputs: Sequence[Var], free: Collection[Var] = ()) -> tuple[Node, ...]:
    """Returns the equations for those inputs of an island that it should compute instead of reading.

    These inputs take at least twice the memory of their sources, without those that are read anyway.

    Args:
      inputs: the island's inputs.
      free: variables that cost nothing to keep.
    """
    read: dict[Var, None] = dict.fromkeys(v for v in inputs if v not in self._makers)
    made = []
    for v in inputs:
      if v in self._makers:
        further = [source for source in self._sources[v] if source not in read]
        if 2 * sum(self._bytes(source) for source in further if source not in free) <= self._bytes(v):
          made.append(v)
          read.update(dict.fromkeys(further))
        else:
          read[v] = None
    return self._back_to(made, read)

  def _bytes(self, v: Var) -> int:
    return size(v) * getattr(held_dtype(v, self._held), "itemsize", 4)

  def _back_to(self, made: Sequence[Var], read: Mapping[Var, None]) -> tuple[Node, ...]:
    """Returns the equations from the variables that are read to some others."""
    found: set[int] = set()
    waiting = list(made)
    while waiting:
      v = waiting.pop()
      i = self._makers.get(v)
      if i is not None and i not in found and v not in read:
        found.add(i)
        waiting += variables_of(self._nodes[i].equation.invars)
    return tuple(self._nodes[i] for i in sorted(found))


def making_operands_again(
  node: Node, copies: Copies, arguments: Collection[Var], held: Mapping[Var, Held]
) -> Island | None:
  """Returns an equation as an island whose backward pass makes copies of parameters again, if it reads any.

  A copy is a cast or broadcast, or another cheap value from arguments only. In one program a compiler
  shares it between the two passes; from one loop to another it is not kept.

  Args:
    node: a decision about an equation that is in no island.
    copies: the cheap equations of its program.
    arguments: variables that exist anyway.
    held: how each variable is held.

  Returns:
    The island; `None` without a copy, or if the backward pass reads none.
  """
  equation = node.equation
  if node.half is None or node.fp8 is not None or not (node.mode is Mode.HALF or is_exact_product(node)):
    return None
  dtype = node.half if node.mode is Mode.HALF else FLOAT32
  if bodies_of(equation) or has(equation, _KEEPS_NONE):
    return None
  read = dict.fromkeys(variables_of(equation.invars))
  flexible = [v for v in read if castable(v.aval) and held[v].kind is Kind.FLEXIBLE and size(v) > 1]
  widened = {equation.invars[i] for i in node.widened}
  wide = {v for v in flexible if v in widened or v in arguments}
  made = copies.instead_of([v for v in flexible if v not in wide], arguments)
  if not wide and not made:
    return None
  own = {v for one in made for v in one.equation.outvars}
  inputs = {v: held_dtype(v, held) for one in made for v in variables_of(one.equation.invars) if v not in own}
  for v in read:
    if v not in own:
      inputs.setdefault(v, dtype if castable(v.aval) and v not in wide else held_dtype(v, held))
  outputs = tuple((v, held_dtype(v, held)) for v in equation.outvars)
  pairs = list(inputs.items())
  # A product's gradient goes to the float32 value, which is not kept for it.
  pairs += [(v, FLOAT32) for v in node.originals() if inputs.get(v, FLOAT32) != FLOAT32]
  return Island((node,), tuple(pairs), outputs, copies=made, fenced=False)


def is_exact_product(node: Node) -> bool:
  """Returns whether a node is a product that keeps float32 operands, such as positions or constants."""
  return node.code in EXACT


def held_dtype(v: Var, held: Mapping[Var, Held]) -> np.dtype:
  """Returns the dtype that a variable is held in."""
  return held[v].dtype if castable(v.aval) else dtype_of(v)
