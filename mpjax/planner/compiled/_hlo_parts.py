"""Divides a compiled program's peak into the parts that a plan has: activations, gradients, workspace."""

from __future__ import annotations

import collections
import dataclasses
import math

from mpjax.jaxpr import BACKWARD, FORWARD, MARKS, is_library, layer_pattern, parse_scopes, split_scopes
from mpjax.planner._program import Buffer, Program, live_at_peak
from mpjax.planner._results import Compiled, Memory, Saved, add_up_saved
from mpjax.planner.compiled._hlo import HloInstruction, HloModule, numpy_name
from mpjax.planner.compiled._hlo_program import hlo_program

_ORDER = ("compute copies", "gradients", "activations", "workspace", "temporaries")
_PRODUCTS = frozenset({"dot", "scaled-dot", "convolution", "custom-call", "fusion"})
# Parts of a name that lowering adds for loops and calls.
_NOT_MODULES = MARKS | {
  *("body", "call_exported", "closed_call", "cond", "eval_jaxpr", "remat2", "shard_map", "while")
}


def divide_memory(
  module: HloModule, whole: Compiled, weights: set[tuple[int, ...]], known_live: int
) -> tuple[Memory, float]:
  """Returns the parts of a program's peak, and the share of the peak that they account for.

  Args:
    module: the program.
    whole: the compiler's totals, with `temporaries` undivided.
    weights: shapes of the weights on one device.
    known_live: bytes of `temporaries` that are live at the peak, by the compiler; 0 if not known. The rest
      are gaps between buffers.
  """
  program = hlo_program(module.entry)
  sorter = _Sorter(module, program, weights)
  parts: collections.Counter[str] = collections.Counter()
  saved = []
  for buffer in live_at_peak(program).live:
    part = sorter.part(buffer)
    parts[part] += buffer.nbytes
    if part == "activations":
      named = sorter.named(buffer.maker)
      path, operation = layer_pattern(path_of_name(named.op_name)), split_scopes(named.op_name)[-1]
      source, dtype = source_of(module, named), numpy_name(buffer.dtype)
      saved.append(Saved(path, source, operation, dtype, buffer.shape, 1, buffer.nbytes))
  known = whole.temporaries
  listed = sum(parts.values())
  divided = {name: parts[name] * known // max(listed, known, 1) for name in _ORDER}
  gaps = known - known_live if 0 < known_live < known and listed <= known else 0
  missed = max(0, abs(listed - known) - gaps)
  rows, saved_bytes = add_up_saved(saved)
  every = {name: n for name, n in whole.memory.parts.items() if name != "temporaries"} | divided
  every["outputs"] = every.pop("outputs", 0)
  every["allocator"] = known - sum(divided.values())
  memory = dataclasses.replace(
    whole.memory,
    parts={name: n for name, n in every.items() if n},
    saved=rows,
    saved_bytes=saved_bytes,
  )
  return memory, max(0.0, 1 - missed / whole.peak) if whole.peak else 1.0


class _Sorter:
  """Tells the part of a buffer from the names of what makes and reads it, and from its shape."""

  def __init__(self, module: HloModule, program: Program, weights: set[tuple[int, ...]]):
    self._readers = _readers(program)
    self._weights = {_without_ones(shape) for shape in weights}
    self._position = {instruction: i for i, instruction in enumerate(module.entry.instructions)}
    phases = [parse_scopes(instruction.op_name).phase for instruction in module.entry.instructions]
    forward = (i for at, i in self._position.items() if phases[i] == FORWARD and at.op in _PRODUCTS)
    # The position of the last product of the forward pass.
    self._end = max(forward, default=-1) if BACKWARD in phases else -1

  def named(self, instruction: HloInstruction) -> HloInstruction:
    """Returns the instruction, or the nearest one among its operands' makers that has a module's name."""
    at = instruction
    for _ in range(8):
      if path_of_name(at.op_name):
        return at
      if not at.operands or at.operands[0].op == "parameter":
        break
      at = at.operands[0]
    return instruction if instruction.op_name else at

  def part(self, buffer: Buffer) -> str:
    """Returns the part of memory that a buffer belongs to."""
    maker, readers = buffer.maker, self._readers.get(buffer, [])
    raw = buffer.dtype in ("s8", "u8") and len(buffer.shape) == 1
    if maker.op == "custom-call" and raw and len(maker.shapes) > 1:
      return "workspace"
    phase = self._phase(maker)
    if _without_ones(buffer.shape) in self._weights and math.prod(buffer.shape) > 1:
      if phase == BACKWARD:
        return "gradients"
      if self._reads_arguments_only(maker):
        return "compute copies"
    read = (phase == FORWARD and self._phase(reader) == BACKWARD for reader in readers)
    return "activations" if any(read) or self._crosses_forward_end(maker, readers) else "temporaries"

  def _phase(self, instruction: HloInstruction) -> str:
    return parse_scopes(instruction.op_name or self.named(instruction).op_name).phase

  def _reads_arguments_only(self, instruction: HloInstruction) -> bool:
    """Returns whether an instruction reads only arguments of the program, or views of them."""
    for at in instruction.operands:
      while at.op in ("bitcast", "copy"):
        at = at.operands[0]
      if at.op not in ("parameter", "constant") or at not in self._position:
        return False
    return bool(instruction.operands)

  def _crosses_forward_end(self, maker: HloInstruction, readers: list[HloInstruction]) -> bool:
    """Returns whether a buffer is written before the end of the forward pass, and read after it."""
    made = self._position.get(maker, self._end)
    return made < self._end and any(self._position.get(r, -1) > self._end for r in readers)


def _readers(program: Program) -> dict[Buffer, list[HloInstruction]]:
  """Returns the instructions that read each buffer, also in loops and branches."""
  found: dict[Buffer, list[HloInstruction]] = {}
  for operation in program.operations:
    for buffer in operation.reads:
      found.setdefault(buffer, []).append(operation.made)
    for body in operation.bodies:
      found |= _readers(body)
  return found


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns a sorted shape without ones: the same for any order of an array's dimensions."""
  return tuple(sorted(d for d in shape if d != 1))


def path_of_name(op_name: str) -> str:
  """Returns `GPT/blocks/5/down` for `jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general`."""
  return parse_scopes("/".join(split_scopes(op_name)[:-1])).path(_NOT_MODULES)


def source_of(module: HloModule, instruction: HloInstruction) -> str:
  """Returns the file and line of the user's program, `model.py:31`."""
  frames = module.lines.get(instruction.frame, ())
  shown = [f"{file.rpartition('/')[2]}:{line}" for file, line in frames]
  own = (text for text, (file, _) in zip(shown, frames, strict=True) if not is_library(file))
  return next(own, shown[0] if shown else "")
