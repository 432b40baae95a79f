"""The memory of a compiled program at its peak, by the schedule that the compiler chose."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from mpjax.planner.compiled._hlo import HloInstruction, HloModule

_VIEWS = frozenset(
  {"bitcast", "get-tuple-element", "tuple", "optimization-barrier", "after-all", "add-dependency"}
)
_ALIASING = frozenset({"while", "dynamic-update-slice", "scatter"})
_SHARING = frozenset({"fusion", "add", "multiply", "convert", "select", "subtract", "copy", "call"})
_ELEMENTWISE = frozenset(
  {
    *(
      "abs",
      "add",
      "and",
      "bitcast",
      "bitcast-convert",
      "cbrt",
      "ceil",
      "clamp",
      "compare",
      "convert",
      "copy",
    ),
    *("cosine", "divide", "erf", "exponential", "exponential-minus-one", "floor", "is-finite", "log"),
    *("log-plus-one", "logistic", "maximum", "minimum", "multiply", "negate", "not", "or", "power"),
    *("reduce-precision", "remainder", "round-nearest-afz", "round-nearest-even", "rsqrt", "select", "sign"),
    *("sine", "sqrt", "subtract", "tan", "tanh", "tuple", "xor"),
  }
)
_NO_MEMORY = frozenset({"parameter", "constant", "partition-id", "replica-id"})


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
  """A piece of device memory.

  Attributes:
    maker: the instruction that writes it.
    index: which part of its result it is.
    nbytes: its size.
    readers: instructions that read it.
  """

  maker: HloInstruction
  index: int
  nbytes: int
  readers: list[HloInstruction]


@dataclasses.dataclass(frozen=True)
class Live:
  """The worst moment of a computation.

  Attributes:
    nbytes: sum of what is live then, arguments and results apart.
    buffers: what is live then.
    at: the instruction that runs.
    inner: the worst moment of what runs inside of that, a loop's body or a branch.
  """

  nbytes: int
  buffers: list[Buffer]
  at: HloInstruction | None
  inner: Live | None


def live_at_peak(module: HloModule) -> Live:
  """Returns the worst moment of a module's main computation."""
  return _LiveRanges(module).peak(module.entry)


class _LiveRanges:
  def __init__(self, module: HloModule):
    self._module = module
    self._inner: dict[str, Live] = {}

  def peak(self, name: str) -> Live:
    """Returns the worst moment of a computation, whose results are its caller's."""
    instructions = list(self._module.computations[name].values())
    parts = _buffers(instructions, self._module)
    last: dict[int, int] = {}
    for i, instruction in enumerate(instructions):
      if instruction.op in _VIEWS:
        continue
      for operand in instruction.operands:
        for buffer in parts.get(operand, ()):
          if buffer is not None:
            last[id(buffer)] = i
            buffer.readers.append(instruction)
    root = next(i for i in instructions if i.is_root)
    free = {id(buffer) for buffer in parts[root.name] if buffer is not None}
    slots = self._slots(name, instructions, parts, root)
    live: dict[int, Buffer] = {}
    total = 0
    worst = Live(0, [], None, None)
    for i, instruction in enumerate(instructions):
      if instruction.op in _VIEWS or instruction.op in _NO_MEMORY:
        continue
      own = [b for b in parts[instruction.name] if b is not None and b.maker is instruction]
      dying = [b for b in live.values() if last.get(id(b), -1) == i]
      for buffer in own:
        if id(buffer) in free or _in_slot(buffer, i, last.get(id(buffer), i), slots):
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
        worst = Live(now, list(live.values()), instruction, inner)
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
    """Returns the operand that dies at an instruction and in whose memory its result is written, if any."""
    if instruction.op not in _SHARING:
      return None
    for k, name in enumerate(instruction.operands):
      for operand in parts.get(name, ()):
        if operand is None or operand.nbytes != buffer.nbytes or len(operand.maker.shapes) > 1:
          continue  # a part of a tuple is not written over
        if any(operand is other for other in dying) and (
          instruction.op != "fusion" or self._elementwise(instruction, k, buffer)
        ):
          return operand
    return None

  def _elementwise(self, fusion: HloInstruction, operand: int, result: Buffer) -> bool:
    """Returns whether each element of a fusion's result needs the same element of an operand alone."""
    body = self._module.computations[fusion.called[0]]
    reached: set[str] = set()
    for instruction in body.values():
      if instruction.op == "parameter" and instruction.rest.startswith(f"{operand})"):
        if instruction.shapes[0].dims != fusion.shapes[result.index].dims:
          return False
        reached.add(instruction.name)
      elif reached.intersection(instruction.operands):
        if instruction.op not in _ELEMENTWISE:
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
    """Returns the memory of results, free from the last read of what was there until they are written.

    That is a donated argument of the program; in a loop's body, what the last round left.
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
      elif instruction.op in _VIEWS:
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
      slots.append(_Slot(buffer.nbytes, start, position.get(buffer.maker.name, 0)))
    return slots

  def _called(self, instruction: HloInstruction) -> Live | None:
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
  """Memory of a result in which nothing lies between two positions of the schedule."""

  nbytes: int
  start: int
  end: int


def _index(instruction: HloInstruction) -> int:
  """Returns which part of a tuple an instruction takes out."""
  return int(instruction.rest.partition("index=")[2].split(",")[0])


def _in_slot(buffer: Buffer, made: int, last: int, slots: list[_Slot]) -> bool:
  """Puts a buffer into the smallest slot that holds it all its life, if there is one."""
  fitting = [s for s in slots if s.nbytes >= buffer.nbytes and s.start < made and last < s.end]
  if not fitting:
    return False
  min(fitting, key=lambda slot: slot.nbytes).start = last
  return True


def _updated_in_place(fusion: HloInstruction, module: HloModule) -> dict[int, int]:
  """Returns which results of a fusion are an operand of it with a slice written anew: result to operand."""
  body = module.computations.get(fusion.called[0], {}) if fusion.called else {}
  root = next((i for i in body.values() if i.is_root), None)
  if root is None:
    return {}
  found = {}
  for k, name in enumerate(root.operands if root.op == "tuple" else [root.name]):
    at = body.get(name)
    while at is not None and at.op in ("bitcast", "dynamic-update-slice") and at.operands:
      if at.op == "dynamic-update-slice":
        found[k] = -1
      at = body.get(at.operands[0])
    if k in found and at is not None and at.op == "parameter":
      found[k] = int(at.rest[: at.rest.index(")")])
  return {k: operand for k, operand in found.items() if operand >= 0}


def _buffers(instructions: list[HloInstruction], module: HloModule) -> dict[str, list[Buffer | None]]:
  """Returns each instruction's parts, as the memory that they are in; `None` for what has none of its own."""
  parts: dict[str, list[Buffer | None]] = {}
  for instruction in instructions:
    own: list[Buffer | None] = [
      Buffer(instruction, k, shape.nbytes, []) if shape.space == 0 else None
      for k, shape in enumerate(instruction.shapes)
    ]
    operands = [parts.get(name, [None]) for name in instruction.operands]
    if instruction.op in _NO_MEMORY:
      own = [None] * len(own)
    elif instruction.op == "copy-start":
      own[1] = operands[0][0]
    elif instruction.op.endswith("-start"):
      sources = [part for operand in operands for part in operand]
      own[: len(sources)] = sources if len(own) > len(sources) else own
    elif instruction.op == "copy-done":
      own = operands[0][:1]
    elif instruction.op.endswith("-done"):
      own = _written(operands[0], instruction, own)
    elif instruction.op == "get-tuple-element":
      index = _index(instruction)
      own = [operands[0][index] if index < len(operands[0]) else None]
    elif instruction.op == "tuple":
      own = [part for operand in operands for part in operand]
    elif instruction.op in _VIEWS:
      own = list(operands[0]) if operands else own
    elif instruction.op in _ALIASING and operands:
      source = operands[0]
      own = [s if s is not None else o for s, o in zip(source, own, strict=False)] + own[len(source) :]
    else:
      for k, operand in _updated_in_place(instruction, module).items() if instruction.op == "fusion" else ():
        if operand < len(operands) and len(operands[operand]) == 1:
          own[k] = operands[operand][0]
      for k, operand in _aliased_operands(instruction):
        if operand < len(operands) and k < len(own) and operands[operand]:
          own[k] = operands[operand][0]
    parts[instruction.name] = own
  return parts


def _written(
  started: list[Buffer | None], done: HloInstruction, own: list[Buffer | None]
) -> list[Buffer | None]:
  """Returns the parts that an asynchronous operation wrote, of all that its start returned."""
  mine = [part for part in started if part is not None and part.maker.op.endswith("-start")]
  wanted = [part.nbytes if part is not None else None for part in own]
  found: list[Buffer | None] = []
  for nbytes in wanted:
    match = next((part for part in mine if part.nbytes == nbytes), None)
    if match is not None:
      mine.remove(match)
    found.append(match)
  return found


def _aliased_operands(instruction: HloInstruction) -> Iterator[tuple[int, int]]:
  text = instruction.rest.partition("output_to_operand_aliasing={")[2]
  if not text:
    return
  text = text[: text.find(", metadata") if ", metadata" in text else None]
  for out, operand in re.findall(r"\{([\d, ]*)\}: \((\d+),", text):
    yield int(out or 0), int(operand)
