"""A compiled program as operations on buffers, by the compiler's schedule."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from mpjax.jaxpr import BACKWARD, FORWARD
from mpjax.planner._program import Buffer, Operation, Program, read_backward
from mpjax.planner.compiled._hlo import (
  VIEWS,
  HloComputation,
  HloInstruction,
  HloShape,
  chain_id,
  numpy_name,
  path_of_name,
  start_of,
  trips,
)
from mpjax.planner.compiled._proto import TOKEN, TUPLE
from mpjax.planner.compiled._work import set_work

# Operations that write over their operand.
_IN_PLACE = frozenset({"all-reduce", "all-reduce-start", "dynamic-update-slice", "scatter"})
_NO_MEMORY = frozenset({"parameter", "constant", "partition-id", "replica-id"})
_CONTROL = frozenset({"while", "conditional", "call"})
_PRODUCTS = frozenset({"dot", "scaled-dot", "convolution", "custom-call", "fusion"})


def from_hlo(main: HloComputation, kind: str = "gpu", weights: Collection[tuple[int, ...]] = ()) -> Program:
  """Returns the program of a compiled module. Arguments and results count for its caller.

  A compiler may put temporaries where a result will be; that is not followed.

  Args:
    main: its main computation, as `parse` returns it.
    kind: kind of the platform that it is compiled for.
    weights: shapes of the weights, whole and on one device.
  """
  return _Reader(kind, {_without_ones(shape) for shape in weights}).program(main)


class _Reader:
  def __init__(self, kind: str, weights: set[tuple[int, ...]]):
    self._kind, self._weights = kind, weights
    self._known: dict[HloComputation, Program] = {}

  def program(self, computation: HloComputation) -> Program:
    """Returns the program of a computation, which several may call."""
    if computation not in self._known:
      self._known[computation] = self._read(computation)
    return self._known[computation]

  def _read(self, computation: HloComputation) -> Program:
    operations = {instruction: Operation(instruction) for instruction in computation.instructions}
    parts = self._memory(computation, operations)
    results = {b for b in parts[computation.root] if b is not None}
    written: dict[Operation | None, dict[Buffer, None]] = {}
    for own in parts.values():
      for b in own:
        if b is not None:
          written.setdefault(b.maker, {})[b] = None
    starts: dict[HloInstruction | str, Operation] = {}
    ends = {start_of(i): i for i in computation.instructions if i.op.endswith("-done")}
    chains: set[str] = set()
    for instruction, operation in operations.items():
      if instruction.op in VIEWS:
        continue
      operation.phase = instruction.phase
      operation.reads = {b: float(b.nbytes) for i in instruction.operands for b in parts[i] if b is not None}
      operation.writes = list(written.get(operation, ()))
      speaker = instruction
      if instruction.proto.fusion_kind == "kLoop":  # writes over what it is the last to read
        made = {(b.shape, b.dtype) for b in operation.writes if b not in results}
        alone = [b for b in operation.reads if b.maker is not None and len(b.maker.origin.shapes) == 1]
        operation.spare = [b for b in alone if (b.shape, b.dtype) in made]
      if instruction.op in _CONTROL:
        operation.bodies = [self.program(called) for called in instruction.called]
        operation.times = trips(instruction) if instruction.op == "while" else 1
        operation.chooses = instruction.op == "conditional"
      else:
        key = _asynchronous(instruction, "Start")
        speaker = set_work(operation, self._kind, key is not None, ends.get(instruction, instruction), chains)
        if key is not None:
          starts[key] = operation
        elif (awaited := _asynchronous(instruction, "Done")) in starts:
          operation.awaits = starts.pop(awaited)
      operation.path = path_of_name(speaker.named.op_name)
    return Program([o for i, o in operations.items() if i.op not in VIEWS], [], results)

  def _part(self, shape: HloShape, maker: HloInstruction) -> str:
    """Returns the part of memory that a result belongs to whoever reads it; empty if that decides."""
    is_raw = shape.dtype in ("s8", "u8") and len(shape.dims) == 1
    if is_raw and maker.op == "custom-call" and len(maker.shapes) > 1:
      return "workspace"
    if _without_ones(shape.dims) in self._weights and math.prod(shape.dims) > 1:
      if maker.phase == BACKWARD:
        return "gradients"
      if _reads_arguments_only(maker):
        return "compute copies"
    return ""

  def _memory(
    self, computation: HloComputation, operations: dict[HloInstruction, Operation]
  ) -> dict[HloInstruction, list[Buffer | None]]:
    """Returns the memory of each leaf of each result; `None` for a leaf without device memory of its own.

    The end of an asynchronous operation has its result, which is written from the start on. The start has
    what is read until then.
    """
    parts: dict[HloInstruction, list[Buffer | None]] = {}
    for instruction in computation.instructions:
      op = instruction.op
      if op == "call" and instruction.called[0].root.op == "while":  # as a CPU's compiler runs loops
        op = "while"
      maker = start_of(instruction) if op.endswith("-done") else instruction
      read = [part for operand in instruction.operands for part in parts[operand]]
      own: list[Buffer | None] = [None] * len(instruction.shapes)
      if op == "get-tuple-element":
        whole, index = instruction.operands[0].proto.shape, instruction.proto.tuple_index
        before = sum(map(_leaves, whole.tuple_shapes[:index]))
        own = read[before : before + len(own)]
      elif op in VIEWS or op in ("while", "async-update") or op.endswith("-start"):
        own = read
      elif op not in _NO_MEMORY:
        for i, s in enumerate(instruction.shapes):
          if s.space == 0:
            dtype, part = numpy_name(s.dtype), self._part(s, maker)
            own[i] = Buffer(s.dims, dtype, s.nbytes, operations[maker], part=part)
        if maker.op in _IN_PLACE:
          own = [old or new for old, new in zip(read, own, strict=False)]
        for alias in maker.proto.output_operand_aliasing:
          if not alias.operand_shape_index and (written := parts[maker.operands[alias.operand_index]]):
            # The results of an asynchronous operation come after its operands, or are alone.
            at = alias.operand_index if maker is not instruction else next(iter(alias.output_shape_index), 0)
            own[at] = written[0]
      parts[instruction] = own
    return parts


def kept_of(program: Program) -> set[Buffer]:
  """Returns what waits for the backward pass, and what is written before and read after the forward pass.

  The latter are loops' stacks: the end of the forward pass is its last product.
  """
  operations = program.operations
  kept = read_backward(program)
  if not any(operation.phase == BACKWARD for operation in operations):
    return kept
  named = ((i, o) for i, o in enumerate(operations) if o.origin.op_name and o.origin.op in _PRODUCTS)
  end = max((i for i, o in named if o.phase == FORWARD), default=0)
  before = {b for operation in operations[:end] for b in operation.writes}
  return kept | before & {b for operation in operations[end + 1 :] for b in operation.reads}


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


def _asynchronous(instruction: HloInstruction, end: str) -> HloInstruction | str | None:
  """Returns what names the asynchronous work that an instruction begins (`Start`) or awaits (`Done`).

  That is the instruction that starts it, or the chain of a TPU's collective, which a fusion starts or ends
  while others compute.
  """
  if instruction.op.endswith(f"-{end.lower()}"):
    return instruction if end == "Start" else start_of(instruction)
  inner = instruction.called[0].instructions if instruction.op == "fusion" else []
  if not any(one.proto.custom_call_target == f"AsyncCollective{end}" for one in inner):
    return None
  return next((chain for one in inner if (chain := chain_id(one))), None)


def _leaves(shape: Any) -> int:
  """Returns the number of arrays in a shape."""
  if shape.element_type == TUPLE:
    return sum(map(_leaves, shape.tuple_shapes))
  return int(shape.element_type != TOKEN)
