"""A program from a target's own compiler: totals, and the parts and products read from its messages."""

from mpjax.planner.compiled._compile import CompileError, Program, compile_step
from mpjax.planner.compiled._hlo import HloModule, parse
from mpjax.planner.compiled._hlo_products import KernelProduct, collectives, kernel_products
from mpjax.planner.compiled._reading import Reading, read_program
from mpjax.planner.compiled._worker import module_proto

__all__ = [
  "CompileError",
  "HloModule",
  "KernelProduct",
  "Program",
  "Reading",
  "collectives",
  "compile_step",
  "kernel_products",
  "module_proto",
  "parse",
  "read_program",
]
