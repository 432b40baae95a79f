"""Reads a compiled program for a plan, and never raises, whatever the compiler wrote."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from mpjax._render.plain_text import bytes_text
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._program import Program, by_part, live_at_peak, loops_of
from mpjax.planner._results import TRANSIENT_PARTS, Compiled, Memory, Note
from mpjax.planner._targets import Target
from mpjax.planner.compiled._compile import CompiledProgram
from mpjax.planner.compiled._from_hlo import Kernels, from_hlo, kept_of
from mpjax.planner.compiled._hlo import parse

# The share of the peak that the program's buffers must explain to be shown.
_EXPLAINED = 0.9


def read_program(
  made: CompiledProgram, arguments: Sequence[Argument], target: Target, kernels: Kernels
) -> tuple[Compiled, Program | None, tuple[Note, ...]]:
  """Reads a compiled program; if it cannot be read, the totals of the compiler's memory analysis are left.

  Args:
    made: the output of the target's compiler.
    arguments: the leaves of the step's arguments.
    target: the target of the compiler.
    kernels: FLOPs of fused kernels, as `traced_kernels` returns them.

  Returns:
    Totals, with parts and kernels if the program could be read; the program; and what is not understood in
    it.
  """
  whole = _totals(made, arguments, target)
  weights = {shape for a in arguments if a.part == "master weights" for shape in (a.shape, a.local)}
  try:
    program = from_hlo(parse(made.proto), target.kind, weights, kernels)
    memory, explained = _divided(program, whole, made.live)
    counts: collections.Counter[str] = collections.Counter()
    for operation, times in program.each():
      for product in operation.products:
        if product.operands:
          counts[f"{product.kernel}: {' x '.join(product.operands)}"] += int(product.flops * times)
    kernels_by_flops = {name: n for name, n in counts.most_common() if n}
    notes = [*loops_of(program, "the compiled program")]
  except Exception as error:
    reason = ": ".join(filter(None, (type(error).__name__, str(error).partition("\n")[0])))
    text = (
      f"the compiled program cannot be read ({reason[:200]}): the compiler's totals are shown, without "
      "parts and kernels, and the collectives that the step states"
    )
    return whole, None, (Note(text, "program"),)
  if explained < _EXPLAINED:
    missed = bytes_text((1 - explained) * whole.peak)
    text = f"temporaries: the buffers in the program do not explain {missed} of the compiler's "
    notes.append(Note(f"{text}{bytes_text(whole.temporaries)}, which are shown undivided", "program"))
    memory = whole.memory
  compiled = dataclasses.replace(whole, memory=memory, explained=explained, kernels=kernels_by_flops)
  return compiled, program, tuple(notes)


def _divided(program: Program, whole: Compiled, known_live: int) -> tuple[Memory, float]:
  """Returns the parts of a program's peak, and the share of the peak that they account for.

  Args:
    program: the program.
    whole: the compiler's totals, with `temporaries` undivided.
    known_live: bytes of `temporaries` that are live at the peak, by the compiler; 0 if not known. The rest
      are gaps between buffers.
  """
  parts = by_part(live_at_peak(program).live, kept_of(program))
  known, listed = whole.temporaries, parts.total()
  divided = {name: parts[name] * known // max(listed, known, 1) for name in TRANSIENT_PARTS}
  gaps = known - known_live if 0 < known_live < known and listed <= known else 0
  missed = max(0, abs(listed - known) - gaps)
  every = whole.memory.parts | divided
  every["outputs"] = whole.memory.parts.get("outputs", 0)
  every["allocator"] = known - sum(divided.values())
  sized = {name: n for name, n in every.items() if n}
  memory = dataclasses.replace(whole.memory, parts=sized, saved_bytes=parts["activations"])
  return memory, max(0.0, 1 - missed / whole.peak) if whole.peak else 1.0


def _totals(made: CompiledProgram, arguments: Sequence[Argument], target: Target) -> Compiled:
  """Returns the compiler's own figures: the arguments by part, and all else undivided."""
  named, slots = argument_parts(arguments, target.kind)
  parts = named | {"temporaries": made.temporaries, "outputs": made.outputs - made.aliases}
  memory = Memory({name: n for name, n in parts.items() if n}, slots, (), 0, sum(parts.values()))
  names = ("arguments", "outputs", "aliases", "temporaries", "peak", "seconds")
  same = {name: getattr(made, name) for name in names}
  return Compiled(**same, memory=memory, explained=0.0, kernels={})
