"""Module paths, phases and lines of a compiled program's instructions, from the names that JAX gave them."""

from __future__ import annotations

from mpjax.jaxpr import MARKS, is_library, parse_scopes, split_scopes
from mpjax.planner.compiled._hlo import HloInstruction, HloModule

# Parts of a name that lowering puts in for loops and calls.
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
