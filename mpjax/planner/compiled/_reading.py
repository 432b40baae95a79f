"""Reads a compiled program for a plan, and never raises, whatever the compiler wrote."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import NamedTuple

from mpjax._render.plain_text import bytes_text
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._differences import differences
from mpjax.planner._results import Collective, Compiled, Memory
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import Program
from mpjax.planner.compiled._hlo import HOST, HloModule, HloShape, parse, trips
from mpjax.planner.compiled._hlo_opcodes import KNOWN
from mpjax.planner.compiled._hlo_parts import divide_memory
from mpjax.planner.compiled._hlo_products import collectives, counted_flops, kernel_products

# How far the bytes of arguments and results in the program may differ from the compiler's figure.
_NEAR = 0.02
# The same for figures derived from the program: beyond this the compiler's own figure is shown.
_FAR = 0.1


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
  notes: tuple[str, ...]
  module: HloModule | None


def read_program(
  program: Program, arguments: Sequence[Argument], analytic: Memory, target: Target
) -> Reading:
  """Reads a compiled program; if it cannot be read, the totals of the compiler's memory analysis are left.

  Args:
    program: the output of the target's compiler.
    arguments: the leaves of the step's arguments.
    analytic: the plan of memory without a compiler, to compare with.
    target: the target of the compiler.
  """
  try:
    return _read(program, arguments, analytic, target)
  except Exception as error:
    why = str(error).partition("\n")[0]
    reason = f"{type(error).__name__}: {why}" if why else type(error).__name__
    note = (
      f"the compiled program cannot be read ({reason[:200]}): the compiler's totals are shown, without "
      "parts, kernels and collectives"
    )
    return Reading(_totals(program, arguments, target), (), (note,), None)


def _read(program: Program, arguments: Sequence[Argument], analytic: Memory, target: Target) -> Reading:
  module = parse(program.proto)
  results = module.entry.root.shapes
  _near("arguments", [s for i in module.entry.parameters() for s in i.shapes], program.arguments)
  _near("results", results, program.outputs)
  _near("results in the memory of arguments", [results[k] for k in module.aliases], program.aliases)
  whole = _totals(program, arguments, target)
  weights = {a.shape for a in arguments if a.part == "master weights"}
  memory, explained = divide_memory(module, whole, weights, program.live)
  notes = _not_understood(module)
  if explained < 1 - _FAR:
    missed = round((1 - explained) * program.peak)
    notes.append(
      f"temporaries: the buffers in the program do not explain {bytes_text(missed)} of the compiler's "
      f"{bytes_text(program.temporaries)}, which are shown undivided"
    )
    memory = whole.memory
  counts: collections.Counter[str] = collections.Counter()
  for product in kernel_products(module, target.kind):
    counts[f"{product.kernel}: {' x '.join(product.dtypes)}"] += product.flops
  kernels = dict(counts.most_common())
  if (flops := counted_flops(module)) > (1 + _FAR) * program.flops > 0:
    notes.append(
      f"matrix products: those of the compiled program have {flops:.3g} operations, but the compiler counts "
      f"{program.flops:.3g} in all, which are shown undivided"
    )
    kernels = {"undivided": int(program.flops)}
  said = differences(analytic, memory, program.arguments, target)
  compiled = dataclasses.replace(whole, memory=memory, explained=explained, difference=said, kernels=kernels)
  return Reading(compiled, collectives(module), tuple(notes), module)


def _not_understood(module: HloModule) -> list[str]:
  """Returns sentences on the operations and loops that are not understood."""
  every = [i for computation in module.computations.values() for i in computation.instructions]
  unknown = [i for i in every if re.sub(r"-(start|update|done)$", "", i.op) not in KNOWN]
  loops = [i for i in every if i.op == "while" and trips(i) is None]
  notes = []
  if unknown:
    notes.append(
      f"the compiled program has {len(unknown)} instructions that are not understood, the first "
      f"{unknown[0].op} {unknown[0].name}: parts, kernels and collectives may be incomplete"
    )
  if loops:
    notes.append(
      f"the compiled program does not say how often {len(loops)} of its loops run, the first "
      f"{loops[0].name}: their products, collectives and time count once"
    )
  return notes


def _near(what: str, listed: list[HloShape], known: int) -> None:
  """Checks a total of device memory; allows for a table of pointers, and for whole tiles of small arrays.

  Raises:
    ValueError: if the arrays in the program differ from it.
  """
  nbytes = sum(shape.nbytes for shape in listed if shape.space != HOST)
  if abs(nbytes - known) > _NEAR * known + 512 * (len(listed) + 1):
    raise ValueError(f"{what} of {nbytes} B, but the compiler states {known} B")


def _totals(program: Program, arguments: Sequence[Argument], target: Target) -> Compiled:
  """Returns the compiler's own figures: the arguments by part, and all else undivided."""
  named, slots = argument_parts(arguments, target.kind)
  parts = named | {"temporaries": program.temporaries, "outputs": program.outputs - program.aliases}
  memory = Memory({name: n for name, n in parts.items() if n}, slots, (), 0, sum(parts.values()))
  names = ("arguments", "outputs", "aliases", "temporaries", "peak", "seconds")
  same = {name: getattr(program, name) for name in names}
  return Compiled(**same, memory=memory, explained=0.0, difference=(), kernels={})
