"""Divides a compiled program's peak into the parts that a plan has: activations, gradients, workspace."""

from __future__ import annotations

import collections
import functools
import math

from mpjax.jaxpr import BACKWARD, FORWARD, MARKS, is_library, layer_pattern, parse_scopes, split_scopes
from mpjax.planner._results import Memory, Saved
from mpjax.planner.compiled._hlo_memory import Buffer, LiveBuffers, live_at_peak
from mpjax.planner.compiled._hlo_text import HloInstruction, HloModule, numpy_name

LISTED = 20
_PRODUCTS = frozenset({"dot", "scaled-dot", "convolution", "custom-call", "fusion"})


def divide_memory(
  module: HloModule,
  arguments: dict[str, int],
  optimizer: dict[str, int],
  weights: set[tuple[int, ...]],
  *,
  temporaries: int,
  outputs: int,
  known_live: int = 0,
) -> tuple[Memory, float]:
  """Returns the parts of a program's peak, and the share of the peak that they account for.

  Args:
    module: the program.
    arguments: bytes of its arguments by part, on one device and with padding.
    optimizer: bytes of the optimiser's arguments by slot.
    weights: shapes of the weights on one device.
    temporaries: bytes that the program needs in addition to arguments and results, by its compiler.
    outputs: bytes of results that do not take an argument's memory.
    known_live: bytes of `temporaries` that are live at the peak, by the compiler; 0 if not known. The rest
      are gaps between buffers.
  """
  live = live_at_peak(module)
  names = _Names(module)
  elements = {_without_ones(shape) for shape in weights}
  parts: collections.Counter[str] = collections.Counter()
  for buffer in _all(live):
    parts[_part(buffer, names, elements)] += buffer.nbytes
  listed = sum(parts.values())
  if listed > temporaries:
    parts = collections.Counter({name: n * temporaries // listed for name, n in parts.items()})
  allocator = temporaries - sum(parts.values())
  gaps = max(0, temporaries - known_live) if known_live else 0
  missed = max(0, abs(listed - temporaries) - (gaps if listed <= temporaries else 0))
  total = sum(arguments.values()) + outputs + temporaries
  everything = {name: n for name, n in arguments.items() if n}
  order = ("compute copies", "gradients", "activations", "workspace", "temporaries")
  everything |= {name: parts[name] for name in order if parts[name]}
  if outputs:
    everything["outputs"] = outputs
  if allocator:
    everything["allocator"] = allocator
  saved = _saved(live, names, elements)
  memory = Memory(everything, optimizer, saved[:LISTED], sum(s.nbytes for s in saved), total)
  return memory, max(0.0, 1 - missed / total) if total else 1.0


class _Names:
  """Phases and modules of instructions; an instruction without a name takes those of its operand."""

  def __init__(self, module: HloModule):
    self.module = module
    self._by_name = {i.name: i for c in module.computations.values() for i in c.values()}

  def named(self, instruction: HloInstruction) -> HloInstruction:
    """Returns the instruction, or the nearest one among its operands' makers that has a module's name."""
    at = instruction
    for _ in range(8):
      if path_of_name(at.op_name):
        return at
      above = self._by_name.get(at.operands[0]) if at.operands else None
      if above is None or above.op == "parameter":
        break
      at = above
    return instruction if instruction.op_name else at

  def phase(self, instruction: HloInstruction) -> str:
    """Returns the phase of an instruction in the derivative."""
    return phase_of_name(instruction.op_name or self.named(instruction).op_name)

  def reads_arguments_only(self, instruction: HloInstruction) -> bool:
    """Returns whether an instruction reads only arguments of the program, or views of them."""
    entry = self.module.computations[self.module.entry]
    for name in instruction.operands:
      at = entry.get(name)
      while at is not None and at.op in ("bitcast", "copy") and at.operands:
        at = entry.get(at.operands[0])
      if at is None or at.op not in ("parameter", "constant"):
        return False
    return bool(instruction.operands)

  @functools.cached_property
  def forward_end(self) -> int:
    """Returns the position of the last product of the forward pass; -1 without a backward pass."""
    entry = self.module.computations[self.module.entry]
    last, backward = -1, False
    for i, instruction in enumerate(entry.values()):
      phase = phase_of_name(instruction.op_name)
      backward |= phase == BACKWARD
      if phase == FORWARD and instruction.op in _PRODUCTS:
        last = i
    return last if backward else -1

  @functools.cached_property
  def positions(self) -> dict[str, int]:
    """Returns the position of each instruction of the main computation."""
    return {name: i for i, name in enumerate(self.module.computations[self.module.entry])}

  def crosses_forward_end(self, buffer: Buffer) -> bool:
    """Returns whether a buffer is written before the end of the forward pass, and read after it."""
    made = self.positions.get(buffer.maker.name, self.forward_end)
    return made < self.forward_end and any(
      self.positions.get(r.name, -1) > self.forward_end for r in buffer.readers
    )


def _all(live: LiveBuffers) -> list[Buffer]:
  inner = _all(live.inner) if live.inner else []
  return [*live.buffers, *inner]


def _part(buffer: Buffer, names: _Names, weights: set[tuple[int, ...]]) -> str:
  maker = buffer.maker
  shape = buffer.shape
  if maker.op == "custom-call" and shape.dtype in ("s8", "u8") and len(shape.dims) == 1 and buffer.index:
    return "workspace"
  like_weight = _without_ones(shape.dims) in weights
  phase = names.phase(maker)
  if like_weight and math.prod(shape.dims) > 1:
    if phase != BACKWARD and names.reads_arguments_only(maker):
      return "compute copies"
    if phase == BACKWARD:
      return "gradients"
  if phase == FORWARD and any(names.phase(reader) == BACKWARD for reader in buffer.readers):
    return "activations"
  return "activations" if names.crosses_forward_end(buffer) else "temporaries"


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
  """Returns a sorted shape without ones: the same for any order of an array's dimensions."""
  return tuple(sorted(d for d in shape if d != 1))


def _saved(live: LiveBuffers, names: _Names, weights: set[tuple[int, ...]]) -> tuple[Saved, ...]:
  groups: dict[tuple[str, str, str, str, tuple[int, ...]], list[int]] = {}
  for buffer in live.buffers:
    if _part(buffer, names, weights) != "activations":
      continue
    named = names.named(buffer.maker)
    shape = buffer.shape
    key = (
      layer_pattern(path_of_name(named.op_name)),
      source_of(names.module, named),
      operation_of(named.op_name),
      numpy_name(shape.dtype),
      shape.dims,
    )
    row = groups.setdefault(key, [0, 0])
    row[0] += 1
    row[1] += buffer.nbytes
  rows = [Saved(*key, count=count, nbytes=nbytes) for key, (count, nbytes) in groups.items()]
  return tuple(sorted(rows, key=lambda row: -row.nbytes))


# Parts of a name that lowering adds for loops and calls.
_NOT_MODULES = MARKS | {"call_exported", "while", "body", "cond", "closed_call", "remat2"}


def phase_of_name(op_name: str) -> str:
  """Returns FORWARD or BACKWARD for the passes of a derivative, else OTHER."""
  return parse_scopes(op_name).phase


def path_of_name(op_name: str) -> str:
  """Returns `GPT/blocks/5/down` for `jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general`."""
  return parse_scopes("/".join(split_scopes(op_name)[:-1])).path(_NOT_MODULES)


def operation_of(op_name: str) -> str:
  """Returns the primitive: the last part of a name."""
  return split_scopes(op_name)[-1] if op_name else ""


def source_of(module: HloModule, instruction: HloInstruction) -> str:
  """Returns the file and line of the user's program, `model.py:31`."""
  first = ""
  for file, line in module.lines.get(instruction.frame, ()):
    shown = f"{file.rpartition('/')[2]}:{line}"
    if not is_library(file):
      return shown
    first = first or shown
  return first
