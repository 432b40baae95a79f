"""The memory of a compiled program at its peak, from the compiler's schedule."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import Any

from mpjax.planner.compiled._hlo import HloComputation, HloInstruction, HloShape, start_of
from mpjax.planner.compiled._hlo_opcodes import VIEWS
from mpjax.planner.compiled._proto import TOKEN, TUPLE

# Operations that write over their operand.
_IN_PLACE = frozenset({"all-reduce", "all-reduce-start", "dynamic-update-slice", "scatter"})
_NO_MEMORY = frozenset({"parameter", "constant", "partition-id", "replica-id"})


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
  """A piece of device memory.

  Attributes:
    maker: the instruction that writes it.
    index: index of its part in the maker's result.
    shape: shape of its contents.
    readers: instructions that read it, in order.
  """

  maker: HloInstruction
  index: int
  shape: HloShape
  readers: list[HloInstruction]


def live_at_peak(computation: HloComputation) -> list[Buffer]:
  """Returns the buffers that are live when a computation needs the most memory.

  Those inside a loop, branch or call that runs then are among them. Arguments and results are not: they count
  for the caller. A compiler may put temporaries where a result will be; that is not followed.
  """
  parts = _memory(computation)
  results = set(parts[computation.root])
  position = {instruction: i for i, instruction in enumerate(computation.instructions)}
  for instruction in computation.instructions:
    if instruction.op not in VIEWS:
      for buffer in {b: None for operand in instruction.operands for b in parts[operand] if b is not None}:
        buffer.readers.append(instruction)
  lives = {
    b: [position[b.maker], position[b.readers[-1] if b.readers else b.maker]]
    for own in parts.values()
    for b in own
    if b is not None and b not in results
  }
  for buffer, (first, _) in lives.items():
    if (
      buffer.maker.proto.fusion_kind == "kLoop"
    ):  # writes over what it is the last to read, and no tuple's part
      read = (b for i in buffer.maker.operands for b in parts[i] if b in lives and len(b.maker.shapes) == 1)
      same = (old for old in read if lives[old][1] == first and old.shape == buffer.shape)
      if (over := next(same, None)) is not None:
        lives[over][1] = first - 1
  change: collections.Counter[int] = collections.Counter()
  for buffer, (first, last) in lives.items():
    change[first] += buffer.shape.nbytes
    change[last + 1] -= buffer.shape.nbytes
  total, most, peak, within = 0, 0, 0, list[Buffer]()
  for i, instruction in enumerate(computation.instructions):
    total += change[i]
    runs = instruction.called if instruction.op in ("while", "conditional", "call") else []
    inner = max(map(live_at_peak, runs), key=total_bytes, default=[])
    if total + total_bytes(inner) > most:
      most, peak, within = total + total_bytes(inner), i, inner
  return [*(buffer for buffer, (first, last) in lives.items() if first <= peak <= last), *within]


def total_bytes(buffers: Iterable[Buffer]) -> int:
  """Returns the bytes of some buffers."""
  return sum(buffer.shape.nbytes for buffer in buffers)


def _memory(computation: HloComputation) -> dict[HloInstruction, list[Buffer | None]]:
  """Returns the memory of each leaf of each result; `None` for a leaf without device memory of its own.

  The end of an asynchronous operation has its result, which is written from the start on. The start has what
  is read until then.
  """
  parts: dict[HloInstruction, list[Buffer | None]] = {}
  for instruction in computation.instructions:
    op = instruction.op
    if op == "call" and instruction.called[0].root.op == "while":  # as a CPU's compiler runs loops
      op = "while"
    maker = start_of(instruction) if op.endswith("-done") else instruction
    read = [part for operand in instruction.operands for part in parts[operand]]
    own = [Buffer(maker, k, s, []) if s.space == 0 else None for k, s in enumerate(instruction.shapes)]
    if op in _NO_MEMORY:
      own = [None] * len(own)
    elif op == "get-tuple-element":
      whole, index = instruction.operands[0].proto.shape, instruction.proto.tuple_index
      before = sum(map(_leaves, whole.tuple_shapes[:index]))
      own = read[before : before + len(own)]
    elif op in VIEWS or op in ("while", "async-update") or op.endswith("-start"):
      own = read
    else:
      if maker.op in _IN_PLACE:
        own = [old or new for old, new in zip(read, own, strict=False)]
      for alias in maker.proto.output_operand_aliasing:
        if not alias.operand_shape_index and (written := parts[maker.operands[alias.operand_index]]):
          # The results of an asynchronous operation come after its operands, or are alone.
          at = alias.operand_index if maker is not instruction else next(iter(alias.output_shape_index), 0)
          own[at] = written[0]
    parts[instruction] = own
  return parts


def _leaves(shape: Any) -> int:
  """Returns the number of arrays in a shape."""
  if shape.element_type == TUPLE:
    return sum(map(_leaves, shape.tuple_shapes))
  return int(shape.element_type != TOKEN)
