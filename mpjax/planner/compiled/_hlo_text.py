"""Reads the text of a compiled module: instructions in execution order, with sizes, names and lines."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (\(.*?\)|[^\s(]\S*) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
  r"\b(?:calls|to_apply|body|condition|(?:true|false)_computation|(?:branch|called)_computations)="
  r"(?:\{([^}]*)\}|%([\w.\-]+))"
)
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
_SHAPE = re.compile(r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"(\d+)")
_TILE = re.compile(r"T\(([\d,]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")
_DEPTH = 64
_PLAIN_DTYPE = re.compile(r"(f|bf|s|u|c)(\d+)")
_ALIAS = re.compile(r"\{([\d, ]*)\}: \((\d+), \{([\d, ]*)\}")
_BODY = re.compile(r"\bbody=%([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_NUMBER = re.compile(r"(-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class HloShape:
  """An array of a compiled program.

  Attributes:
    dtype: HLO's name: `f32`, `bf16`, `f8e4m3fn`.
    dims: sizes of its dimensions.
    nbytes: bytes in memory, with the padding of its tiles.
    space: number of its memory space; 0 is the device's main memory.
  """

  dtype: str
  dims: tuple[int, ...]
  nbytes: int
  space: int


@dataclasses.dataclass(eq=False, slots=True)
class HloInstruction:
  """One instruction.

  Attributes:
    name: its name.
    shapes: shape of its result, or shapes of the parts of a tuple.
    op: opcode.
    operands: names of the instructions that it reads.
    called: names of the computations that it runs.
    rest: text of operands and attributes.
    is_root: whether its computation returns it.
  """

  name: str
  shapes: list[HloShape]
  op: str
  operands: list[str]
  called: list[str]
  rest: str
  is_root: bool

  @property
  def op_name(self) -> str:
    """Returns its place in the traced program: `jit(step)/jvp(GPT)/h0/dot_general`."""
    found = _OP_NAME.search(self.rest)
    return found[1].split(";")[0] if found else ""

  @property
  def frame(self) -> int:
    """Number of its stack frame in the module's tables; 0 without one."""
    found = _FRAME.search(self.rest)
    return int(found[1]) if found else 0

  @property
  def trip_count(self) -> int | None:
    """Returns how often a loop runs its body, `None` if the compiler does not say; 1 for other operations."""
    if self.op != "while":
      return 1
    found = _TRIP_COUNT.search(self.rest)
    return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class HloModule:
  """A compiled program.

  Attributes:
    computations: by name, the instructions by name, in execution order.
    entry: name of the main computation.
    aliases: from the position of a result to the position of the argument whose memory it takes.
    lines: from the number of a stack frame to (file, line) of itself and its callers, innermost first.
  """

  computations: dict[str, dict[str, HloInstruction]]
  entry: str
  aliases: dict[int, int]
  lines: dict[int, list[tuple[str, int]]]

  def repetitions(self) -> Iterator[tuple[str, int, list[HloInstruction]]]:
    """Yields (computation, how often it runs, the instructions that call it, outermost first).

    A loop of unknown length counts once.
    """

    def visit(
      name: str, times: int, callers: list[HloInstruction]
    ) -> Iterator[tuple[str, int, list[HloInstruction]]]:
      yield name, times, callers
      scope = self.computations[name]
      for instruction in scope.values():
        if instruction.op in ("async-update", "async-done"):  # they repeat the name of what their start runs
          continue
        runs = self._runs(scope, instruction) or 1
        for called in instruction.called:
          if called in self.computations:
            yield from visit(called, times * runs, [*callers, instruction])

    yield from visit(self.entry, 1, [])

  def loops_of_unknown_length(self) -> list[HloInstruction]:
    """Returns the loops whose number of rounds is not known."""
    scopes = self.computations.values()
    return [i for scope in scopes for i in scope.values() if self._runs(scope, i) is None]

  def _runs(self, scope: Mapping[str, HloInstruction], instruction: HloInstruction) -> int | None:
    """Returns how often an instruction runs what it calls."""
    runs = instruction.trip_count
    return _trips(self.computations, scope, instruction) if runs is None else runs

  def parameters(self) -> list[HloShape]:
    """Returns the arguments of the program, in order."""
    found = [i for i in self.computations[self.entry].values() if i.op == "parameter"]
    return [
      shape for i in sorted(found, key=lambda i: int(i.rest[: i.rest.index(")")])) for shape in i.shapes
    ]

  def results(self) -> list[HloShape]:
    """Returns the results of the program, in order."""
    return next(i for i in self.computations[self.entry].values() if i.is_root).shapes


def parse(text: str) -> HloModule:
  """Returns the module of an HLO text.

  Raises:
    ValueError: for a text without an entry computation, or a computation's line that is not an instruction.
  """
  computations: dict[str, dict[str, HloInstruction]] = {}
  current: dict[str, HloInstruction] = {}
  entry = ""
  for line in text.splitlines():
    if header := _COMPUTATION.match(line):
      current = computations[header[2]] = {}
      entry = header[2] if header[1] else entry
    elif parsed := _INSTRUCTION.match(line):
      rest = parsed[5]
      current[parsed[2]] = HloInstruction(
        parsed[2], shapes(parsed[3]), parsed[4], _operands(rest), _called(rest), rest, bool(parsed[1])
      )
    elif line.startswith("  ") and " = " in line:
      raise ValueError(f"expected an instruction, not {line.strip()[:80]!r}")
  if not entry:
    raise ValueError("no ENTRY computation: expected the text of an HLO module, as compiled.as_text() gives")
  head = text[: text.find("\n")]
  return HloModule(computations, entry, _aliases(head), _frames(text))


def done_of(start: HloInstruction, scope: Mapping[str, HloInstruction]) -> HloInstruction | None:
  """Returns the instruction that waits for an asynchronous operation; its type is the operation's result.

  Args:
    start: the instruction that begins it, such as `all-gather-start`.
    scope: the instructions of its computation.
  """
  begun = {start.name}
  for instruction in scope.values():
    if begun.intersection(instruction.operands):
      if instruction.op.endswith("-done"):
        return instruction
      if instruction.op in ("async-update", "copy", "optimization-barrier"):
        begun.add(instruction.name)
  return None


@functools.lru_cache(maxsize=4096)
def _shape(dtype: str, dims_text: str, layout: str) -> HloShape:
  dims = tuple(int(d) for d in dims_text.split(",") if d)
  space = _SPACE.search(layout)
  return HloShape(dtype, dims, padded_bytes(dtype, dims, layout), int(space[1]) if space else 0)


def shapes(text: str) -> list[HloShape]:
  """Returns the arrays in HLO's text of a shape or of a tuple of shapes."""
  return [_shape(m[1], m[2], m[3] or "") for m in _SHAPE.finditer(text) if m[1] != "token"]


def numpy_name(dtype: str) -> str:
  """Returns NumPy's name of a dtype: `float32` for `f32`."""
  if dtype == "pred":
    return "bool"
  found = _PLAIN_DTYPE.fullmatch(dtype)
  if found:
    return {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}[found[1]] + found[2]
  return re.sub(r"^f(\d)(e)", r"float\1_\2", dtype)


def bits(dtype: str) -> int:
  """Returns the bits of an element in memory."""
  found = _BITS.search(dtype)
  return 8 if dtype == "pred" else int(found[1]) if found else 0


def padded_bytes(dtype: str, dims: tuple[int, ...], layout: str) -> int:
  """Returns the bytes of an array in a layout such as `1,0:T(8,128)(2,1)`, in whole tiles."""
  order, _, tiling = layout.partition(":")
  tile = _TILE.search(tiling)
  if tile is None:
    return math.ceil(math.prod(dims) * bits(dtype) / 8)
  sizes = [int(t) for t in tile[1].split(",") if t]
  minor_to_major = [int(i) for i in order.split(",") if i]
  major_to_minor = [dims[i] for i in reversed(minor_to_major)]
  while len(major_to_minor) < len(sizes):
    major_to_minor.insert(0, 1)
  for i in range(1, len(sizes) + 1):
    major_to_minor[-i] = -(-major_to_minor[-i] // sizes[-i]) * sizes[-i]
  return math.ceil(math.prod(major_to_minor) * bits(dtype) / 8)


def _operands(rest: str) -> list[str]:
  depth = 1
  for end, letter in enumerate(rest):
    depth += (letter == "(") - (letter == ")")
    if depth == 0:
      return re.findall(r"%([\w.\-]+)", rest[:end])
  return []


def _called(rest: str) -> list[str]:
  return [name for several, one in _CALLED.findall(rest) for name in re.findall(r"[\w.\-]+", several or one)]


def _aliases(head: str) -> dict[int, int]:
  start = head.find("input_output_alias=")
  if start < 0:
    return {}
  text = head[start : head.find("entry_computation_layout", start)]
  return {int(out.split(",")[0] or 0): int(argument) for out, argument, _ in _ALIAS.findall(text)}


def _frames(text: str) -> dict[int, list[tuple[str, int]]]:
  """Returns the stack frames from the four tables at the top of a module."""
  start = text.find("\nFileNames")
  if start < 0:
    return {}
  names: dict[int, str] = {}
  locations: dict[int, tuple[int, int]] = {}
  frames: dict[int, tuple[int, int]] = {}
  section = ""
  for line in text[start + 1 :].splitlines():
    if not line.strip():
      continue
    if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
      section = line
    elif not line[0].isdigit():
      break
    elif section == "FileNames":
      number, _, name = line.partition(" ")
      names[int(number)] = name.strip().strip('"')
    elif section == "FileLocations":
      numbers = [int(n) for n in re.findall(r"\d+", line)]
      locations[numbers[0]] = (numbers[1], numbers[3])
    elif section == "StackFrames":
      numbers = [int(n) for n in re.findall(r"\d+", line)]
      # The table numbers frames from one, and states a parent as its number plus one.
      frames[numbers[0]] = (numbers[1], numbers[2] - 1 if len(numbers) > 2 else 0)
  return {number: _chain(number, frames, locations, names) for number in frames}


def _chain(
  number: int,
  frames: dict[int, tuple[int, int]],
  locations: dict[int, tuple[int, int]],
  names: dict[int, str],
) -> list[tuple[str, int]]:
  """Returns (file, line) of a frame and its callers."""
  chain: list[tuple[str, int]] = []
  while number in frames and len(chain) < _DEPTH:
    location, number = frames[number]
    file, line = locations[location]
    chain.append((names[file], line))
  return chain


def _trips(
  computations: Mapping[str, Mapping[str, HloInstruction]],
  scope: Mapping[str, HloInstruction],
  loop: HloInstruction,
) -> int | None:
  """Returns how often a loop that counts up to a number runs, such as `lax.scan`'s; `None` for others.

  Args:
    computations: computations of the module.
    scope: the instructions of the loop's computation.
    loop: a `while`.
  """
  body, condition = (
    computations.get(found[1] if (found := pattern.search(loop.rest)) else "", {})
    for pattern in (_BODY, _CONDITION)
  )
  test, state = _root(condition), _root(body)
  start = scope.get(loop.operands[0]) if loop.operands else None
  if not (test and state and start) or test.op != "compare" or "direction=LT" not in test.rest:
    return None
  counter, limit = (_source(condition, name) for name in test.operands)
  position = _position(counter)
  if position is None or state.op != "tuple" or start.op != "tuple":
    return None
  step = _step(body, _source(body, state.operands[position]), position)
  first, last = _number(_source(scope, start.operands[position])), _number(limit)
  return None if first is None or last is None or step is None else max(0, -((first - last) // step))


def _step(body: Mapping[str, HloInstruction], add: HloInstruction | None, position: int) -> int | None:
  """Returns what a body adds to its counter."""
  if add is None or add.op != "add":
    return None
  old, more = (_source(body, name) for name in add.operands)
  step = _number(more)
  return step if _position(old) == position and step is not None and step > 0 else None


def _source(scope: Mapping[str, HloInstruction], name: str) -> HloInstruction | None:
  """Returns an instruction, or the instruction that it copies."""
  found = scope.get(name)
  while found is not None and found.op == "copy":
    found = scope.get(found.operands[0])
  return found


def _root(scope: Mapping[str, HloInstruction]) -> HloInstruction | None:
  return next((instruction for instruction in scope.values() if instruction.is_root), None)


def _position(part: HloInstruction | None) -> int | None:
  """Returns the position in a loop's state that an instruction reads."""
  found = _INDEX.search(part.rest) if part is not None and part.op == "get-tuple-element" else None
  return int(found[1]) if found else None


def _number(constant: HloInstruction | None) -> int | None:
  found = _NUMBER.match(constant.rest) if constant is not None and constant.op == "constant" else None
  return int(found[1]) if found else None
