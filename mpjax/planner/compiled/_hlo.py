"""Reads a compiled module: instructions in execution order, with sizes, names and lines."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from mpjax.jaxpr import MARKS, parse_scopes, split_scopes
from mpjax.planner.compiled._proto import BUFFER, DTYPES, TOKEN, TUPLE, module_class

# Operations whose result is the memory of their operands, and that do not read it.
VIEWS = frozenset({"add-dependency", "after-all", "bitcast", "get-tuple-element", "opt-barrier", "tuple"})
COLLECTIVES = frozenset(
  {"all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"}
  | {"ragged-all-to-all", "reduce-scatter"}
)
_MOST_UNNAMED = 8
# Parts of a name that lowering adds for loops and calls.
_NOT_MODULES = MARKS | {
  *("body", "call_exported", "closed_call", "cond", "eval_jaxpr", "remat2", "shard_map", "while")
}
HOST = 5  # the number of the memory space of a host
_LOCAL = (1 << 32) - 1  # the low bits of an identity are unique in a computation
_PLAIN_DTYPE = re.compile(r"(f|bf|s|u|c)(\d+)")


@dataclasses.dataclass(frozen=True, slots=True)
class HloShape:
  """An array of a compiled program.

  Attributes:
    dtype: HLO's name: `f32`, `bf16`, `f8e4m3fn`.
    dims: sizes of its dimensions.
    nbytes: bytes in memory, with the padding of its tiles.
    space: number of its memory space: 0 is the device's main memory, `HOST` the host's.
  """

  dtype: str
  dims: tuple[int, ...]
  nbytes: int
  space: int


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class HloInstruction:
  """One instruction.

  Attributes:
    op: opcode.
    shapes: shape of its result, or shapes of the leaves of a tuple, without tokens.
    operands: the instructions that it reads.
    called: the computations that it runs.
    proto: the message with its other fields, by the names in `_proto.py`.
  """

  op: str
  shapes: list[HloShape]
  operands: list[HloInstruction]
  called: list[HloComputation]
  proto: Any

  @property
  def op_name(self) -> str:
    """Returns its place in the traced program: `jit(step)/jvp(GPT)/h0/dot_general`."""
    return str(self.proto.metadata.op_name).split(";")[0]

  @property
  def named(self) -> HloInstruction:
    """The instruction, or the nearest one among its operands' makers that has a module's name."""
    at = self
    for _ in range(_MOST_UNNAMED):
      if path_of_name(at.op_name):
        return at
      if not at.operands or at.operands[0].op == "parameter":
        break
      at = at.operands[0]
    return self if self.op_name else at

  @property
  def phase(self) -> str:
    """FORWARD or BACKWARD in a derivative, else OTHER; without a name, that of the nearest one with one."""
    return parse_scopes(self.op_name or self.named.op_name).phase

  @property
  def config(self) -> dict[str, Any]:
    """Returns what the compiler notes for its own back end; empty if that is not JSON."""
    try:
      found = json.loads(self.proto.backend_config or b"{}")
    except ValueError:
      return {}
    return found if isinstance(found, dict) else {}


@dataclasses.dataclass(eq=False, slots=True, repr=False)
class HloComputation:
  """A function of the program: the main one, a loop's body, a fusion.

  Attributes:
    instructions: in execution order.
    root: the instruction that it returns.
  """

  instructions: list[HloInstruction]
  root: HloInstruction

  def parameters(self) -> list[HloInstruction]:
    """Returns its parameters, in order."""
    found = (i for i in self.instructions if i.op == "parameter")
    return sorted(found, key=lambda i: int(i.proto.parameter_number))


def parse(proto: bytes) -> HloComputation:
  """Returns the main computation of a serialised `HloModuleProto`.

  Raises:
    ImportError: if `google.protobuf` is not installed.
    ValueError: if there are no bytes.
    google.protobuf.message.DecodeError: if the bytes are not a message.
    KeyError: if an instruction reads what is not computed before it, or there is no main computation.
  """
  if not proto:
    raise ValueError("JAX does not give the compiler's program")
  message = module_class().FromString(proto)
  order = {entry.key: entry.value.instruction_ids for entry in message.schedule.sequences}
  known: dict[bytes, list[HloShape]] = {}
  computations: dict[int, HloComputation] = {}
  for made in message.computations:
    computations[made.id] = _computation(made, order.get(made.id), computations, known)
  return computations[message.entry_computation_id]


def _computation(
  message: Any, order: Any, computations: Mapping[int, HloComputation], known: dict[bytes, list[HloShape]]
) -> HloComputation:
  protos = {proto.id & _LOCAL: proto for proto in message.instructions}
  made: dict[int, HloInstruction] = {}
  for number in protos if order is None else [number & _LOCAL for number in order]:
    proto = protos[number]
    operands = [made[i & _LOCAL] for i in proto.operand_ids]
    called = [computations[i] for i in proto.called_computation_ids]
    shapes = _shapes(proto.shape, known)
    made[number] = HloInstruction(proto.opcode, shapes, operands, called, proto)
  return HloComputation(list(made.values()), made[message.root_id & _LOCAL])


def _shapes(proto: Any, known: dict[bytes, list[HloShape]]) -> list[HloShape]:
  """Returns the arrays of a shape or of a tuple of shapes; `known` has those that were read before."""
  key = proto.SerializeToString()
  if key not in known:
    if proto.element_type in (TUPLE, BUFFER):
      known[key] = [shape for part in proto.tuple_shapes for shape in _shapes(part, known)]
    else:
      known[key] = [] if proto.element_type == TOKEN else [_array(proto)]
  return known[key]


def _array(proto: Any) -> HloShape:
  dtype, dims, layout = DTYPES.get(proto.element_type, "unknown"), tuple(proto.dimensions), proto.layout
  in_memory = [dims[i] for i in reversed(layout.minor_to_major)] if layout.tiles else list(dims)
  for tile in layout.tiles[:1]:  # those after the first divide it
    in_memory = [1] * (len(tile.dimensions) - len(dims)) + in_memory
    for i, size in enumerate(reversed(tile.dimensions), 1):
      in_memory[-i] = -(-in_memory[-i] // size) * size
  return HloShape(dtype, dims, math.ceil(math.prod(in_memory) * bits(dtype) / 8), layout.memory_space)


def start_of(done: HloInstruction) -> HloInstruction:
  """Returns the instruction that begins what a `-done` waits for, such as `all-gather-start`."""
  start = done.operands[0]
  while start.op in ("async-update", "bitcast", "copy", "opt-barrier"):
    start = start.operands[0]
  return start


def chain_id(instruction: HloInstruction) -> str:
  """Returns the chain of a collective that several fusions repeat while they compute; empty without one."""
  return next((e.value for e in instruction.proto.frontend_attributes.map if e.key == "chain_id"), "")


def path_of_name(op_name: str) -> str:
  """Returns `GPT/blocks/5/down` for `jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general`."""
  return parse_scopes("/".join(split_scopes(op_name)[:-1])).path(_NOT_MODULES)


def numpy_name(dtype: str) -> str:
  """Returns NumPy's name of a dtype: `float32` for `f32`."""
  if found := _PLAIN_DTYPE.fullmatch(dtype):
    return {"f": "float", "bf": "bfloat", "s": "int", "u": "uint", "c": "complex"}[found[1]] + found[2]
  return "bool" if dtype == "pred" else re.sub(r"^f(\d)(e)", r"float\1_\2", dtype)


def bits(dtype: str) -> int:
  """Returns the bits of an element in memory."""
  found = re.search(r"\d+", dtype)
  return int(found[0]) if found else 8 * (dtype == "pred")


def trips(loop: HloInstruction) -> int | None:
  """Returns how often a `while` runs its body; `None` if neither the compiler nor a counter says it.

  A counter is a part of the state that the body adds a constant to, and the condition compares with a
  constant, as `lax.scan` makes it.
  """
  if (stated := loop.config.get("known_trip_count", {}).get("n")) is not None:
    return int(stated)
  (body, condition), start = loop.called, loop.operands[0]
  if condition.root.proto.comparison_direction != "LT" or {body.root.op, start.op} != {"tuple"}:
    return None
  counter, limit = map(_source, condition.root.operands)
  position = counter.proto.tuple_index
  add = _source(body.root.operands[position])
  if add.op != "add" or counter.op != "get-tuple-element":
    return None
  old, more = map(_source, add.operands)
  if old.op != "get-tuple-element" or old.proto.tuple_index != position:
    return None
  first, last, step = (_number(i) for i in (_source(start.operands[position]), limit, more))
  if first is None or last is None or step is None or step <= 0:
    return None
  return max(0, -((first - last) // step))


def _source(instruction: HloInstruction) -> HloInstruction:
  """Returns an instruction, or the instruction that it copies."""
  while instruction.op == "copy":
    instruction = instruction.operands[0]
  return instruction


def _number(constant: HloInstruction) -> int | None:
  """Returns the value of an integer constant."""
  literal = constant.proto.literal
  found = [*literal.s32s, *literal.s64s, *literal.u32s, *literal.u64s]
  return found[0] if len(found) == 1 else None
