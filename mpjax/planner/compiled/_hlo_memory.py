"""The memory of a compiled program at its peak, from the compiler's schedule."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from mpjax.planner.compiled._hlo_opcodes import ELEMENTWISE, VIEWS
from mpjax.planner.compiled._hlo_text import HloInstruction, HloModule, HloShape, done_of

_ALIASING = frozenset({"dynamic-update-slice", "scatter"})
_SHARING = frozenset(
  {"fusion", "add", "multiply", "convert", "select", "subtract", "copy", "all-reduce", "all-reduce-start"}
)
_NO_MEMORY = frozenset({"parameter", "constant", "partition-id", "replica-id"})


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
  """A piece of device memory.

  Attributes:
    maker: the instruction that writes it.
    index: index of its part in the maker's result.
    shape: shape of its contents.
    readers: instructions that read it.
  """

  maker: HloInstruction
  index: int
  shape: HloShape
  readers: list[HloInstruction]

  @property
  def nbytes(self) -> int:
    """Returns its size."""
    return self.shape.nbytes


@dataclasses.dataclass(frozen=True)
class LiveBuffers:
  """The moment when a computation needs the most memory.

  Attributes:
    nbytes: bytes that are live then, without arguments and results.
    buffers: the buffers that are live then.
    at: the instruction that runs then.
    inner: the peak inside that instruction, in a loop's body or a branch.
  """

  nbytes: int
  buffers: list[Buffer]
  at: HloInstruction | None
  inner: LiveBuffers | None


def live_at_peak(module: HloModule) -> LiveBuffers:
  """Returns the peak of a module's main computation."""
  return _LiveRanges(module).peak(module.entry)


class _LiveRanges:
  def __init__(self, module: HloModule):
    self._module = module
    self._inner: dict[str, LiveBuffers] = {}

  def peak(self, name: str) -> LiveBuffers:
    """Returns the peak of a computation; its results count for its caller."""
    instructions = list(self._module.computations[name].values())
    parts = _buffers(instructions, self._module)
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
      if instruction.op in VIEWS:
        continue
      for operand in instruction.operands:
        for buffer in parts.get(operand, ()):
          if buffer is not None:
            last[id(buffer)] = i
            buffer.readers.append(instruction)
    root = next(i for i in instructions if i.is_root)
    free = {id(buffer) for buffer in parts[root.name] if buffer is not None}
    position = {instruction.name: i for i, instruction in enumerate(instructions)}
    made = {b for found in parts.values() for b in found if b is not None and id(b) not in free}
    slots = self._slots(name, instructions, parts, root)
    elsewhere = _in_slots([(b, position[b.maker.name], last.get(id(b))) for b in made], slots)
    live: dict[int, Buffer] = {}
    total = 0
    worst = LiveBuffers(0, [], None, None)
    for i, instruction in enumerate(instructions):
      if instruction.op in VIEWS or instruction.op in _NO_MEMORY:
        continue
      own = [b for b in parts[instruction.name] if b is not None and b.maker is instruction]
      dying = [b for b in live.values() if last.get(id(b), -1) == i]
      for buffer in own:
        if id(buffer) in free or id(buffer) in elsewhere:
          continue
        over = self._written_over(instruction, buffer, parts, [b for b in dying if id(b) in live])
        if over is not None:
          del live[id(over)]
          total -= over.nbytes
        live[id(buffer)] = buffer
        total += buffer.nbytes
      inner = self._called(instruction)
      now = total + (inner.nbytes if inner else 0)
      if now > worst.nbytes:
        worst = LiveBuffers(now, list(live.values()), instruction, inner)
      for buffer in (*dying, *(b for b in own if id(b) not in last)):
        if id(buffer) in live:
          del live[id(buffer)]
          total -= buffer.nbytes
    return worst

  def _written_over(
    self,
    instruction: HloInstruction,
    buffer: Buffer,
    parts: dict[str, list[Buffer | None]],
    dying: list[Buffer],
  ) -> Buffer | None:
    """Returns the operand whose memory takes an instruction's result, or `None`."""
    if instruction.op not in _SHARING:
      return None
    for k, name in enumerate(instruction.operands):
      for operand in parts.get(name, ()):
        if operand is None or operand.nbytes != buffer.nbytes or len(operand.maker.shapes) > 1:
          continue  # a part of a tuple is not overwritten
        if any(operand is other for other in dying) and (
          instruction.op != "fusion" or self._elementwise(instruction, k, buffer)
        ):
          return operand
    return None

  def _elementwise(self, fusion: HloInstruction, operand: int, result: Buffer) -> bool:
    """Returns whether each element of a fusion's result needs only the same element of an operand."""
    body = self._module.computations[fusion.called[0]]
    reached: set[str] = set()
    for instruction in body.values():
      if instruction.op == "parameter" and instruction.rest.startswith(f"{operand})"):
        if instruction.shapes[0].dims != fusion.shapes[result.index].dims:
          return False
        reached.add(instruction.name)
      elif reached.intersection(instruction.operands):
        if instruction.op not in ELEMENTWISE | {"bitcast", "tuple"}:
          return False
        reached.add(instruction.name)
    root = next(i for i in body.values() if i.is_root)
    return (root.operands[result.index] if root.op == "tuple" else root.name) in reached

  def _slots(
    self,
    computation: str,
    instructions: list[HloInstruction],
    parts: dict[str, list[Buffer | None]],
    root: HloInstruction,
  ) -> list[_Slot]:
    """Returns the memory of results, free from the last read of its old contents until the result's write.

    The old contents are a donated argument of the program; in a loop's body, the last round's result.
    """
    position = {instruction.name: i for i, instruction in enumerate(instructions)}
    main = computation == self._module.entry
    carried = set() if main else {i.name for i in instructions if i.op == "parameter"}
    origin: dict[str, set[str]] = {}
    last_read: dict[str, int] = {}
    for i, instruction in enumerate(instructions):
      below = {source for name in instruction.operands for source in origin.get(name, ())}
      if instruction.op == "parameter":
        origin[instruction.name] = {instruction.name}
      elif instruction.op == "get-tuple-element" and instruction.operands[0] in carried:
        origin[instruction.name] = {f"{instruction.operands[0]}#{_index(instruction)}"}
      elif instruction.op in VIEWS:
        origin[instruction.name] = below
      for name in below:
        last_read[name] = i
    arguments = {int(i.rest[: i.rest.index(")")]): i.name for i in instructions if i.op == "parameter"}
    slots = []
    for k, buffer in enumerate(parts[root.name]):
      if buffer is None:
        continue
      before = arguments.get(self._module.aliases.get(k, -1), "") if main else f"{arguments.get(0)}#{k}"
      start = last_read.get(before, 0)
      slots.append(_Slot(buffer.nbytes, start, position.get(buffer.maker.name, 0), []))
    return slots

  def _called(self, instruction: HloInstruction) -> LiveBuffers | None:
    if instruction.op not in ("while", "conditional", "call"):
      return None
    found = []
    for name in instruction.called:
      if name in self._module.computations:
        if name not in self._inner:
          self._inner[name] = self.peak(name)
        found.append(self._inner[name])
    return max(found, key=lambda live: live.nbytes, default=None)


@dataclasses.dataclass(slots=True)
class _Slot:
  """Memory of a result that is free between two positions of the schedule."""

  nbytes: int
  start: int
  end: int
  taken: list[tuple[int, int]]  # first and last position of each buffer put there

  def fits(self, nbytes: int, made: int, last: int) -> bool:
    return (
      nbytes <= self.nbytes
      and self.start < made
      and last < self.end
      and all(last < first or end < made for first, end in self.taken)
    )


def _index(instruction: HloInstruction) -> int:
  """Returns the index of the part that an instruction takes out of a tuple."""
  return int(instruction.rest.partition("index=")[2].split(",")[0])


def _in_slots(buffers: list[tuple[Buffer, int, int | None]], slots: list[_Slot]) -> set[int]:
  """Puts buffers into slots that hold them all their life, the largest first as a compiler does.

  Args:
    buffers: each with the positions of its write and of its last read.
    slots: the free memory.

  Returns:
    The identities of the buffers that found a slot.
  """
  found = set()
  for buffer, made, read in sorted(buffers, key=lambda item: (-item[0].nbytes, item[1], item[0].index)):
    last = made if read is None else read
    fitting = [slot for slot in slots if slot.fits(buffer.nbytes, made, last)]
    if fitting:
      min(fitting, key=lambda slot: slot.nbytes).taken.append((made, last))
      found.add(id(buffer))
  return found


def _handed_on(caller: HloInstruction, module: HloModule) -> dict[int, tuple[int, int]]:
  """Returns which results of a fusion or call are in an operand's memory: result to (operand, part of it).

  A call's unchanged operands are, and operands of both of which only slices are overwritten.
  """
  body = module.computations.get(caller.called[0], {}) if caller.called else {}
  root = next((i for i in body.values() if i.is_root), None)
  if root is None or caller.op not in ("fusion", "call"):
    return {}
  origins: dict[str, list[tuple[int, int, bool] | None]] = {}  # parameter, part, whether overwritten
  for instruction in body.values():
    above = [origins[name] for name in instruction.operands if name in origins]
    first = list(above[0]) if above else []
    if instruction.op == "parameter":
      number = int(instruction.rest[: instruction.rest.index(")")])
      found: list[tuple[int, int, bool] | None] = [(number, k, False) for k in range(len(instruction.shapes))]
    elif instruction.op == "get-tuple-element":
      found = [first[_index(instruction)]] if _index(instruction) < len(first) else [None]
    elif instruction.op == "tuple":
      found = [part for operand in above for part in operand]
    elif instruction.op in ("bitcast", "while"):
      found = first
    elif instruction.op == "dynamic-update-slice":
      found = [part and (part[0], part[1], True) for part in first]
    else:
      found = [None] * len(instruction.shapes)
    origins[instruction.name] = found
  results = enumerate(origins[root.name])
  return {k: found[:2] for k, found in results if found and (found[2] or caller.op == "call")}


def _buffers(instructions: list[HloInstruction], module: HloModule) -> dict[str, list[Buffer | None]]:
  """Returns the memory of each part of each instruction; `None` for a part without its own memory."""
  parts: dict[str, list[Buffer | None]] = {}
  scope = {instruction.name: instruction for instruction in instructions}
  for instruction in instructions:
    own = _new(instruction, instruction.shapes)
    operands = [parts.get(name, [None]) for name in instruction.operands]
    if instruction.op in _NO_MEMORY:
      own = [None] * len(own)
    elif instruction.op.endswith("-start") and (done := done_of(instruction, scope)) is not None:
      own = _started(instruction, done, operands)
    elif instruction.op == "custom-call-update" and (done := done_of(instruction, scope)) is not None:
      own = _started(instruction, done, operands[1:])  # a TPU's SparseCore: the start only prepares
    elif instruction.op == "async-update" and operands:
      own = list(operands[0])
    elif instruction.op.endswith("-done") and operands:
      own = operands[0][len(operands[0]) - len(own) :]
    elif instruction.op == "get-tuple-element":
      index = _index(instruction)
      own = [operands[0][index] if index < len(operands[0]) else None]
    elif instruction.op == "tuple":
      own = [part for operand in operands for part in operand]
    elif instruction.op in VIEWS:
      own = list(operands[0]) if operands else own
    elif instruction.op == "while" and operands and len(operands[0]) == len(own):
      own = list(operands[0])  # its state stays in place, also in an argument's memory
    elif instruction.op in _ALIASING and operands:
      source = operands[0]
      own = [s if s is not None else o for s, o in zip(source, own, strict=False)] + own[len(source) :]
    else:
      for k, (operand, index) in _handed_on(instruction, module).items():
        if operand < len(operands) and index < len(operands[operand]) and k < len(own):
          own[k] = operands[operand][index]
      for k, operand in _aliased_operands(instruction):
        if operand < len(operands) and k < len(own) and operands[operand]:
          own[k] = operands[operand][0]
    parts[instruction.name] = own
  return parts


def _new(maker: HloInstruction, shapes: list[HloShape]) -> list[Buffer | None]:
  """Returns memory for arrays; `None` for arrays on the chip."""
  return [Buffer(maker, k, shape, []) if shape.space == 0 else None for k, shape in enumerate(shapes)]


def _started(
  start: HloInstruction, done: HloInstruction, operands: list[list[Buffer | None]]
) -> list[Buffer | None]:
  """Returns the buffers that an asynchronous operation reads until it is done, and then those that it writes.

  The type of the start differs between releases and operations; the type of the end is what was written.
  """
  read = [part for operand in operands for part in operand]
  written = _new(start, done.shapes)
  aliased = list(_aliased_operands(start))
  for _, operand in aliased:  # the results come after the operands, or are alone
    if operand < len(read) and operand < len(written):
      written[operand] = read[operand]
  if start.op == "all-reduce-start" and not aliased:
    read = []  # it overwrites its operand if that is the operand's last read
  return read + written


def _aliased_operands(instruction: HloInstruction) -> Iterator[tuple[int, int]]:
  text = instruction.rest.partition("output_to_operand_aliasing={")[2]
  if not text:
    return
  text = text[: text.find(", metadata") if ", metadata" in text else None]
  for out, operand in re.findall(r"\{(\d*)\}: \((\d+),", text):  # no parts of parts
    yield int(out or 0), int(operand)
