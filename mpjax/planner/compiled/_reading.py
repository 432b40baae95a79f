"""Reads a compiled program for a plan: never an error, whatever the compiler wrote."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from mpjax._render.plain_text import bytes_text
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._results import Collective, Compiled, Memory
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import Program
from mpjax.planner.compiled._differences import differences
from mpjax.planner.compiled._hlo import HloModule, HloShape, parse
from mpjax.planner.compiled._hlo_checks import counted_flops, doubtful
from mpjax.planner.compiled._hlo_parts import divide_memory
from mpjax.planner.compiled._hlo_products import (
  by_dtypes,
  collectives,
  kernel_products,
  unplaced_collectives,
)

# Of the bytes of arguments and results, how far the program's text may be from what its compiler says.
_NEAR = 0.02
# The same of all that is derived from the text: beyond that the compiler's own figure is shown.
_FAR = 0.1


class Reading(NamedTuple):
  """The figures that are read from a compiled program.

  Attributes:
    compiled: totals, and parts and kernels where its text could be read.
    collectives: what crosses devices.
    notes: what in its text is not understood, and which figures are the compiler's totals for that.
  """

  compiled: Compiled
  collectives: tuple[Collective, ...]
  notes: tuple[str, ...]


def read_program(
  program: Program, arguments: Sequence[Argument], analytic: Memory, target: Target
) -> Reading:
  """Reads a compiled program.

  Its text follows no specification, and each release of a compiler may write another: where the text cannot
  be read, what is left are the totals of the compiler's own memory analysis.

  Args:
    program: that the target's compiler made.
    arguments: the leaves of the step's arguments.
    analytic: the plan of memory without a compiler, to compare with.
    target: of the compiler.
  """
  try:
    return _read(program, arguments, analytic, target)
  except Exception as error:
    why = str(error).partition("\n")[0]
    reason = f"{type(error).__name__}: {why}" if why else type(error).__name__
    note = (
      f"the compiled program cannot be read ({reason[:200]}): its compiler's totals stand, without parts, "
      "kernels and collectives"
    )
    return Reading(_totals(program, arguments, target), (), (note,))


def _read(program: Program, arguments: Sequence[Argument], analytic: Memory, target: Target) -> Reading:
  module = parse(program.text)
  _check(module, program)
  whole = _totals(program, arguments, target)
  named, slots = argument_parts(arguments, target.kind)
  memory, explained = divide_memory(
    module,
    named,
    slots,
    {a.shape for a in arguments if a.part == "master weights"},
    temporaries=program.temporaries,
    outputs=program.outputs - program.aliases,
    known_live=program.live,
  )
  notes = _not_understood(module, target.kind)
  if explained < 1 - _FAR:
    missed = round((1 - explained) * program.peak)
    notes.append(
      f"temporaries: {bytes_text(missed)} of the compiler's {bytes_text(program.temporaries)} are not "
      "explained by the buffers in its program, which stand undivided"
    )
    memory = whole.memory
  kernels = {name: row["flops"] for name, row in by_dtypes(kernel_products(module, target.kind)).items()}
  flops = counted_flops(module)
  if program.flops and abs(flops - program.flops) > _FAR * program.flops:
    notes.append(
      f"matrix products: the compiled program's text has {flops:.3g} operations where its compiler counts "
      f"{program.flops:.3g}, which stand undivided"
    )
    kernels = {"undivided": int(program.flops)}
  compiled = dataclasses.replace(
    whole,
    memory=memory,
    explained=explained,
    difference=differences(analytic, memory, program, sum(named.values()), target),
    kernels=kernels,
  )
  return Reading(compiled, collectives(module), tuple(notes))


def _not_understood(module: HloModule, kind: str) -> list[str]:
  """Returns a sentence each on instructions, collectives and loops that the readers cannot place."""
  notes = []
  if doubts := doubtful(module, kind):
    notes.append(
      f"the compiled program has {len(doubts)} instructions that are not understood, the first "
      f"{doubts[0].op} {doubts[0].name}: parts, kernels and collectives may lack what they do"
    )
  if begun := unplaced_collectives(module):
    notes.append(
      f"collectives: {len(begun)} begin in the compiled program and do not end in it, the first {begun[0]}: "
      "their bytes are not known and not counted"
    )
  if loops := module.loops_of_unknown_length():
    notes.append(
      f"the compiled program does not say how often {len(loops)} of its loops run, the first "
      f"{loops[0].name}: their products and collectives count once"
    )
  return notes


def _check(module: HloModule, program: Program) -> None:
  """Checks that a text was read whole.

  Raises:
    ValueError: if an instruction reads what no instruction before it computes, or arguments or results are
      not as large as the compiler says they are.
  """
  for instructions in module.computations.values():
    known: set[str] = set()
    for instruction in instructions.values():
      if lacking := set(instruction.operands) - known:
        raise ValueError(f"{instruction.name} reads {min(lacking)}, which is not computed before it")
      known.add(instruction.name)
  _near("arguments", module.parameters(), program.arguments)
  _near("results", module.results(), program.outputs)
  aliased = [shape for k, shape in enumerate(module.results()) if k in module.aliases]
  _near("results in the memory of arguments", aliased, program.aliases)


def _near(what: str, listed: list[HloShape], known: int) -> None:
  # Room for a table of pointers, and for whole tiles of what is small.
  nbytes = sum(shape.nbytes for shape in listed)
  if abs(nbytes - known) > _NEAR * known + 512 * (len(listed) + 1):
    raise ValueError(f"{what} of {nbytes} B, and the compiler says {known} B")


def _totals(program: Program, arguments: Sequence[Argument], target: Target) -> Compiled:
  """Returns the compiler's own figures, with the arguments by part and all else undivided."""
  named, slots = argument_parts(arguments, target.kind)
  parts = named | {"temporaries": program.temporaries, "outputs": program.outputs - program.aliases}
  memory = Memory({name: n for name, n in parts.items() if n}, slots, (), 0, sum(parts.values()))
  return Compiled(
    arguments=program.arguments,
    outputs=program.outputs,
    aliases=program.aliases,
    temporaries=program.temporaries,
    peak=program.peak,
    memory=memory,
    explained=0.0,
    difference=(),
    kernels={},
    seconds=program.seconds,
  )
