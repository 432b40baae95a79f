"""Reads a compiled program for a plan, and never raises, whatever the compiler wrote."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mpjax._render.plain_text import bytes_text
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._results import Collective, Compiled, Memory, Note
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import Program
from mpjax.planner.compiled._hlo import HloModule, parse, trips
from mpjax.planner.compiled._hlo_parts import divide_memory
from mpjax.planner.compiled._hlo_products import collectives, kernel_products

# The share of the peak that the program's buffers must explain to be shown.
_EXPLAINED = 0.9


class Reading(NamedTuple):
  """What is read from a compiled program.

  Attributes:
    compiled: totals, and parts and kernels if the program could be read.
    collectives: the collectives of the program.
    notes: what is not understood in it, and which figures are therefore the compiler's totals.
    module: the program; `None` if it could not be read.
  """

  compiled: Compiled
  collectives: tuple[Collective, ...]
  notes: tuple[Note, ...]
  module: HloModule | None


def read_program(program: Program, arguments: Sequence[Argument], target: Target) -> Reading:
  """Reads a compiled program; if it cannot be read, the totals of the compiler's memory analysis are left.

  Args:
    program: the output of the target's compiler.
    arguments: the leaves of the step's arguments.
    target: the target of the compiler.
  """
  whole = _totals(program, arguments, target)
  try:
    module = parse(program.proto)
    return _read(module, whole, program.live, arguments, target)
  except Exception as error:
    reason = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
    text = (
      f"the compiled program cannot be read ({reason[:200]}): the compiler's totals are shown, without "
      "parts, kernels and collectives"
    )
    return Reading(whole, (), (Note(text, "program"),), None)


def _read(
  module: HloModule, whole: Compiled, live: int, arguments: Sequence[Argument], target: Target
) -> Reading:
  weights = {shape for a in arguments if a.part == "master weights" for shape in (a.shape, a.local)}
  memory, explained = divide_memory(module, whole, weights, live)
  notes = []
  loops = [
    i for c in module.computations.values() for i in c.instructions if i.op == "while" and trips(i) is None
  ]
  if loops:
    text = f"the compiled program does not say how often {len(loops)} of its loops run, the first "
    notes.append(Note(f"{text}{loops[0].name}: their products, collectives and time count once", "loops"))
  if explained < _EXPLAINED:
    missed = bytes_text((1 - explained) * whole.peak)
    text = f"temporaries: the buffers in the program do not explain {missed} of the compiler's "
    notes.append(Note(f"{text}{bytes_text(whole.temporaries)}, which are shown undivided", "program"))
    memory = whole.memory
  counts: collections.Counter[str] = collections.Counter()
  for product in kernel_products(module, target.kind):
    counts[f"{product.kernel}: {' x '.join(product.dtypes)}"] += product.flops
  compiled = dataclasses.replace(
    whole, memory=memory, explained=explained, kernels=dict(counts.most_common())
  )
  return Reading(compiled, collectives(module), tuple(notes), module)


def _totals(program: Program, arguments: Sequence[Argument], target: Target) -> Compiled:
  """Returns the compiler's own figures: the arguments by part, and all else undivided."""
  named, slots = argument_parts(arguments, target.kind)
  parts = named | {"temporaries": program.temporaries, "outputs": program.outputs - program.aliases}
  memory = Memory({name: n for name, n in parts.items() if n}, slots, (), 0, sum(parts.values()))
  names = ("arguments", "outputs", "aliases", "temporaries", "peak", "seconds")
  same = {name: getattr(program, name) for name in names}
  return Compiled(**same, memory=memory, explained=0.0, kernels={})
