"""Reads a compiled program for a plan: never an error, whatever the compiler wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._results import Collective, Compiled, Memory
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import Program
from mpjax.planner.compiled._differences import differences
from mpjax.planner.compiled._hlo import HloModule, parse
from mpjax.planner.compiled._hlo_parts import divide_memory
from mpjax.planner.compiled._hlo_products import by_dtypes, collectives, kernel_products

# Of the arguments' bytes, how far the program's text may be from what its compiler says.
_NEAR = 0.02


class Reading(NamedTuple):
  """The figures that are read from a compiled program.

  Attributes:
    compiled: totals, and parts and kernels where its text could be read.
    collectives: what crosses devices.
    note: says why there are totals alone; empty if there is more.
  """

  compiled: Compiled
  collectives: tuple[Collective, ...]
  note: str


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
    return Reading(_totals(program, arguments, target), (), note)


def _read(program: Program, arguments: Sequence[Argument], analytic: Memory, target: Target) -> Reading:
  module = parse(program.text)
  _check(module, program)
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
  kernels = by_dtypes(kernel_products(module, target.kind))
  compiled = Compiled(
    arguments=program.arguments,
    outputs=program.outputs,
    aliases=program.aliases,
    temporaries=program.temporaries,
    peak=program.peak,
    memory=memory,
    explained=explained,
    difference=differences(analytic, memory, program, sum(named.values()), target),
    kernels={name: row["flops"] for name, row in kernels.items()},
    seconds=program.seconds,
  )
  return Reading(compiled, collectives(module), "")


def _check(module: HloModule, program: Program) -> None:
  """Checks that a text was read whole.

  Raises:
    ValueError: if an instruction reads what no instruction before it computes, or the arguments are not as
      large as the compiler says they are.
  """
  for instructions in module.computations.values():
    known: set[str] = set()
    for instruction in instructions.values():
      if lacking := set(instruction.operands) - known:
        raise ValueError(f"{instruction.name} reads {min(lacking)}, which is not computed before it")
      known.add(instruction.name)
  listed = sum(shape.nbytes for shape in module.parameters())
  if abs(listed - program.arguments) > _NEAR * program.arguments + 512 * len(module.parameters()):
    raise ValueError(f"arguments of {listed} B, and the compiler says {program.arguments} B")


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
