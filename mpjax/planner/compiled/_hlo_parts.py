"""Divides a compiled program's peak into the parts that a plan has: activations, gradients, workspace."""

from __future__ import annotations

import collections
import dataclasses
import math

from mpjax.jaxpr import BACKWARD, FORWARD, is_library, layer_pattern, split_scopes
from mpjax.planner._program import Buffer, Program, live_at_peak, read_backward
from mpjax.planner._results import Compiled, Memory, Saved, add_up_saved
from mpjax.planner.compiled._hlo import HloInstruction, HloModule, numpy_name, path_of_name
from mpjax.planner.compiled._hlo_program import hlo_program

_PRODUCTS = frozenset({"dot", "scaled-dot", "convolution", "custom-call", "fusion"})
_ORDER = ("compute copies", "gradients", "activations", "workspace", "temporaries")


def divide_memory(
  module: HloModule, whole: Compiled, weights: set[tuple[int, ...]], known_live: int
) -> tuple[Memory, float]:
  """Returns the parts of a program's peak, and the share of the peak that they account for.

  Args:
    module: the program.
    whole: the compiler's totals, with `temporaries` undivided.
    weights: shapes of the weights, whole and on one device.
    known_live: bytes of `temporaries` that are live at the peak, by the compiler; 0 if not known. The rest
      are gaps between buffers.
  """
  program = hlo_program(module.entry)
  kept, shapes = read_backward(program) | _across(program), set(map(_without_ones, weights))
  parts: collections.Counter[str] = collections.Counter()
  saved = []
  for buffer in live_at_peak(program).live:
    part = _part(buffer, shapes, kept)
    parts[part] += buffer.nbytes
    if part == "activations":
      named = buffer.maker.named
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


def _part(buffer: Buffer, weights: set[tuple[int, ...]], kept: set[Buffer]) -> str:
  """Returns the part of memory that a buffer belongs to, by the names of what makes and reads it.

  Args:
    buffer: a buffer of the program.
    weights: shapes of the weights, as `_without_ones` returns them.
    kept: what waits for the backward pass.
  """
  maker = buffer.maker
  raw = buffer.dtype in ("s8", "u8") and len(buffer.shape) == 1
  if maker.op == "custom-call" and raw and len(maker.shapes) > 1:
    return "workspace"
  if _without_ones(buffer.shape) in weights and math.prod(buffer.shape) > 1:
    if maker.phase == BACKWARD:
      return "gradients"
    if _reads_arguments_only(maker):
      return "compute copies"
  return "activations" if buffer in kept else "temporaries"


def _across(program: Program) -> set[Buffer]:
  """Returns what is written before the last product of the forward pass, and read after it: loops' stacks."""
  operations = program.operations
  if not any(operation.phase == BACKWARD for operation in operations):
    return set()
  named = ((i, o) for i, o in enumerate(operations) if o.made.op_name and o.made.op in _PRODUCTS)
  end = max((i for i, o in named if o.phase == FORWARD), default=0)
  before = {b for operation in operations[:end] for b in operation.writes}
  return before & {b for operation in operations[end + 1 :] for b in operation.reads}


def _reads_arguments_only(instruction: HloInstruction) -> bool:
  """Returns whether an instruction reads only parameters, or views of them."""
  for at in instruction.operands:
    while at.op in ("bitcast", "copy"):
      at = at.operands[0]
    if at.op not in ("parameter", "constant"):
      return False
  return bool(instruction.operands)


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns a sorted shape without ones: the same for any order of an array's dimensions."""
  return tuple(sorted(d for d in shape if d != 1))


def source_of(module: HloModule, instruction: HloInstruction) -> str:
  """Returns the file and line of the user's program, `model.py:31`."""
  frames = module.lines.get(instruction.proto.metadata.stack_frame_id, ())
  shown = [f"{file.rpartition('/')[2]}:{line}" for file, line in frames]
  own = (text for text, (file, _) in zip(shown, frames, strict=True) if not is_library(file))
  return next(own, shown[0] if shown else "")
