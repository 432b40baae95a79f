"""Checks what is read of a program: whether its operations are known, and its FLOPs by XLA's own rule."""

from __future__ import annotations

import math

from mpjax.planner.compiled._hlo import HloComputation, HloInstruction, HloModule
from mpjax.planner.compiled._hlo_opcodes import ARITHMETIC, KNOWN
from mpjax.planner.compiled._hlo_products import product_flops


def unknown_operations(module: HloModule) -> list[HloInstruction]:
  """Returns the instructions whose operation this release does not know."""
  every = (i for computation in module.computations.values() for i in computation.instructions)
  ends = ("", "-start", "-update", "-done")
  return [i for i in every if not any(i.op.removesuffix(end) in KNOWN for end in ends)]


def counted_flops(module: HloModule) -> int:
  """Returns a program's FLOPs by the rule of XLA's cost analysis: a loop's body counts once."""
  counted: dict[HloComputation, int] = {}
  for computation in module.computations.values():  # those that are called come first
    counted[computation] = sum(_own_flops(instruction, counted) for instruction in computation.instructions)
  return counted[module.entry]


def _own_flops(instruction: HloInstruction, counted: dict[HloComputation, int]) -> int:
  op, elements = instruction.op, _elements(instruction)
  if op in ARITHMETIC or op in ("all-reduce", "all-reduce-start"):
    return elements
  if op in ("dot", "scaled-dot", "convolution"):
    return product_flops(instruction)
  inside = [counted[called] for called in instruction.called]
  if op == "reduce":
    return (_elements(instruction.operands[0]) - elements) * max(1, sum(inside))
  if op == "scatter":
    return _elements(instruction.operands[2]) * max(1, sum(inside))
  if op == "conditional":
    return max(inside)
  return sum(inside) if op in ("fusion", "call", "while", "async-start") else 0


def _elements(instruction: HloInstruction) -> int:
  return math.prod(instruction.shapes[0].dims) if instruction.shapes else 0
