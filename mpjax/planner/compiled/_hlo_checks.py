"""Finds what is unknown or contradictory in a program's text, so that a plan can say so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from mpjax.planner.compiled._hlo_opcodes import (
  ARITHMETIC,
  COLLECTIVES,
  ELEMENTWISE,
  REORDERING,
  SAME_DTYPE,
  is_known,
)
from mpjax.planner.compiled._hlo_products import integers, matrix_flops
from mpjax.planner.compiled._hlo_text import HloInstruction, HloModule, done_of

_Scope = Mapping[str, HloInstruction]
_Types = list[tuple[str, tuple[int, ...]]]
# Element-wise operations whose result may have another dtype than what they read.
_OTHER_DTYPE = frozenset(
  {"bitcast-convert", "compare", "complex", "convert", "imag", "is-finite", "real", "stochastic-convert"}
)


def doubtful(module: HloModule, kind: str) -> list[HloInstruction]:
  """Returns the instructions with an unknown operation, or with a type that contradicts their operands.

  Args:
    module: the program.
    kind: kind of the platform; a TPU's operations widen and round their operands.
  """
  rounding = {"f32", "bf16"} if kind == "tpu" else set[str]()
  return [
    instruction
    for scope in module.computations.values()
    for instruction in scope.values()
    if not is_known(instruction.op) or not _follows(instruction, scope, module, rounding)
  ]


def counted_flops(module: HloModule) -> int:
  """Returns a program's FLOPs by the rule of XLA's cost analysis: a loop's body counts once."""
  return _flops(module, module.entry, {})


def _flops(module: HloModule, name: str, known: dict[str, int]) -> int:
  if name not in known:
    known[name] = 0  # for a computation that calls itself
    scope = module.computations.get(name, {})
    known[name] = sum(_own_flops(instruction, scope, module, known) for instruction in scope.values())
  return known[name]


def _own_flops(instruction: HloInstruction, scope: _Scope, module: HloModule, known: dict[str, int]) -> int:
  elements = _elements(instruction)
  if instruction.op in ARITHMETIC or (
    instruction.op.startswith("all-reduce") and "-done" not in instruction.op
  ):
    return elements
  if instruction.op in ("dot", "scaled-dot", "convolution"):
    return matrix_flops(instruction, scope)
  inside = [_flops(module, called, known) for called in instruction.called]
  if instruction.op == "reduce":
    return (_elements(scope[instruction.operands[0]]) - elements) * max(1, sum(inside))
  if instruction.op == "scatter":
    return _elements(scope[instruction.operands[2]]) * max(1, sum(inside))
  if instruction.op == "conditional":
    return max(inside, default=0)
  return sum(inside) if instruction.op in ("fusion", "call", "while", "async-start") else 0


def _elements(instruction: HloInstruction) -> int:
  return math.prod(instruction.shapes[0].dims) if instruction.shapes else 0


def _follows(instruction: HloInstruction, scope: _Scope, module: HloModule, rounding: set[str]) -> bool:
  """Returns whether the type of an instruction may follow from its operands and computations."""
  if any(name not in module.computations for name in instruction.called):
    return False
  op, own = instruction.op, _types(instruction)
  operands = [_types(scope[name]) for name in instruction.operands if name in scope]
  read = [part for operand in operands for part in operand]
  if op in ELEMENTWISE:
    return bool(own) and _elementwise(op, own, read, rounding)
  if op in SAME_DTYPE:
    same = bool(own and read) and own[0][0] == read[0][0]
    return same and (op not in REORDERING or math.prod(own[0][1]) == math.prod(read[0][1]))
  if op == "get-tuple-element":
    return all(part in read for part in own)
  if op == "tuple":
    return own == read
  if op in ("fusion", "call", "while", "conditional"):
    return _called_for(instruction, own, operands, module)
  if op.removesuffix("-start") in COLLECTIVES:
    done = done_of(instruction, scope) if op.endswith("-start") else instruction
    return done is None or _collective(op.removesuffix("-start"), _types(done), read)
  if op == "dot" and len(operands) == 2:
    shared = math.prod(read[0][1][i] for i in integers("lhs_contracting_dims", instruction.rest))
    batch = math.prod(read[0][1][i] for i in integers("lhs_batch_dims", instruction.rest))
    whole = math.prod(read[0][1]) * math.prod(read[1][1])
    return math.prod(own[0][1]) * shared * shared * batch == whole
  return True


def _elementwise(op: str, own: _Types, read: _Types, rounding: set[str]) -> bool:
  # A predicate or a bound may be one scalar for all elements.
  scalars = op in ("select", "clamp")
  dims = all(part[1] == own[0][1] or (scalars and not part[1]) for part in read)
  dtypes = {part[0] for part in (read[1:] if op == "select" else read)}
  may = op in _OTHER_DTYPE or dtypes <= {own[0][0]} or dtypes | {own[0][0]} <= rounding
  return dims and may


def _called_for(
  instruction: HloInstruction, own: _Types, operands: Sequence[_Types], module: HloModule
) -> bool:
  if not instruction.called:
    return False
  if instruction.op == "while" and [part for operand in operands for part in operand] != own:
    return False
  for name in instruction.called:
    body = module.computations[name]
    root = next((i for i in body.values() if i.is_root), None)
    returned = _types(root) if root is not None else []
    if returned != own and not (instruction.op == "while" and [part[0] for part in returned] == ["pred"]):
      return False
    if instruction.op in ("fusion", "call"):
      taken = {int(i.rest[: i.rest.index(")")]): _types(i) for i in body.values() if i.op == "parameter"}
      if [taken[k] for k in sorted(taken)] != list(operands):
        return False
  return True


def _collective(op: str, own: _Types, read: _Types) -> bool:
  """Returns whether a collective's result has the dtypes of its operands, and a possible size."""
  if [dtype for dtype, _ in own] != [dtype for dtype, _ in read[: len(own)]]:
    return False
  made, given = (sum(math.prod(dims) for _, dims in parts) for parts in (own, read))
  if op == "all-gather":
    return bool(given) and made % given == 0
  if op == "reduce-scatter":
    return bool(made) and given % made == 0
  return made == given or op == "ragged-all-to-all"


def _types(instruction: HloInstruction) -> _Types:
  return [(shape.dtype, shape.dims) for shape in instruction.shapes]
