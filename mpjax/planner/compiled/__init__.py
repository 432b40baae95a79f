"""A program from a target's own compiler: totals, and the parts and products read from its messages."""

from mpjax.planner.compiled._compile import CompiledProgram, CompileError, compile_step
from mpjax.planner.compiled._from_hlo import from_hlo, traced_kernels
from mpjax.planner.compiled._hlo import HloModule, parse
from mpjax.planner.compiled._reading import read_program
from mpjax.planner.compiled._worker import module_proto

__all__ = [
  "CompileError",
  "CompiledProgram",
  "HloModule",
  "compile_step",
  "from_hlo",
  "module_proto",
  "parse",
  "read_program",
  "traced_kernels",
]
