"""A compiled program as operations on buffers, by the compiler's schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpjax.planner._program import Buffer, Operation, Program
from mpjax.planner.compiled._hlo import VIEWS, HloComputation, HloInstruction, start_of, trips
from mpjax.planner.compiled._proto import TOKEN, TUPLE

# Operations that write over their operand.
_IN_PLACE = frozenset({"all-reduce", "all-reduce-start", "dynamic-update-slice", "scatter"})
_NO_MEMORY = frozenset({"parameter", "constant", "partition-id", "replica-id"})
_CONTROL = frozenset({"while", "conditional", "call"})


def hlo_program(
  computation: HloComputation,
  price: Callable[[Operation, HloComputation], None] | None = None,
  known: dict[HloComputation, Program] | None = None,
) -> Program:
  """Returns the program of a computation. Arguments and results count for its caller.

  A compiler may put temporaries where a result will be; that is not followed.

  Args:
    computation: the main computation, or another.
    price: sets the part, path, seconds and queue of an operation; without it, none takes time.
    known: programs of computations that are made already.
  """
  known = {} if known is None else known
  parts = _memory(computation)
  results = {b for b in parts[computation.root] if b is not None}
  written: dict[HloInstruction, dict[Buffer, None]] = {}
  for own in parts.values():
    for b in own:
      if b is not None:
        written.setdefault(b.maker, {})[b] = None
  operations = []
  starts: dict[HloInstruction | str, Operation] = {}
  for instruction in computation.instructions:
    if instruction.op in VIEWS:
      continue
    reads = {b: float(b.nbytes) for i in instruction.operands for b in parts[i] if b is not None}
    writes = list(written.get(instruction, ()))
    operation = Operation(instruction, instruction.phase, reads, writes)
    if (
      instruction.proto.fusion_kind == "kLoop"
    ):  # writes over what it is the last to read, and no tuple's part
      made = {(b.shape, b.dtype) for b in writes if b not in results}
      operation.spare = [b for b in reads if len(b.maker.shapes) == 1 and (b.shape, b.dtype) in made]
    if instruction.op in _CONTROL:
      for called in instruction.called:
        if called not in known:
          known[called] = hlo_program(called, price, known)
      operation.bodies = [known[called] for called in instruction.called]
      operation.times = trips(instruction) or 1 if instruction.op == "while" else 1
      operation.chooses = instruction.op == "conditional"
    elif price is not None:
      key = begins(instruction)
      if key is None and (awaited := _awaits(instruction)) in starts:
        operation.awaits = starts.pop(awaited)
      else:
        price(operation, computation)
      if key is not None:
        operation.starts = True
        starts[key] = operation
    operations.append(operation)
  return Program(operations, [], results)


def begins(instruction: HloInstruction) -> HloInstruction | str | None:
  """Returns what names the asynchronous work that an instruction starts."""
  if instruction.op.endswith("-start"):
    return instruction
  return _chain_of(instruction, "AsyncCollectiveStart") or None


def _awaits(instruction: HloInstruction) -> HloInstruction | str | None:
  """Returns what names the asynchronous work that an instruction waits for."""
  if instruction.op.endswith("-done"):
    found = start_of(instruction)
    while found.op == "async-update":  # one that brings the operands
      found = start_of(found)
    return found
  return _chain_of(instruction, "AsyncCollectiveDone") or None


def _chain_of(instruction: HloInstruction, target: str) -> str:
  """Returns the chain of a TPU's collective that a fusion starts or ends; others compute meanwhile."""
  if instruction.op != "fusion":
    return ""
  scope = instruction.called[0].instructions
  if not any(one.proto.custom_call_target == target for one in scope):
    return ""
  return next((chain for one in scope if (chain := chain_id(one))), "")


def chain_id(instruction: HloInstruction) -> str:
  """Returns the chain of a collective that several fusions repeat while they compute; empty without one."""
  return next((e.value for e in instruction.proto.frontend_attributes.map if e.key == "chain_id"), "")


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
    own = [Buffer(s.dims, s.dtype, s.nbytes, maker) if s.space == 0 else None for s in instruction.shapes]
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
