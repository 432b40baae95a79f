"""Module paths, phases and lines of a compiled program's instructions, from the names that JAX gave them."""

from __future__ import annotations

import re

from mpjax import _compat
from mpjax.planner._figures import BACKWARD, FORWARD, OTHER
from mpjax.planner.compiled._hlo import HloInstruction, HloModule

_WRAPPED = re.compile(r"^(?:transpose|jvp|vmap|checkpoint|remat|custom_jvp|custom_vjp)\((.*)\)$")
_NOT_MODULES = frozenset(
  {"checkpoint", "rematted_computation", "call_exported", "while", "body", "cond", "closed_call", "remat2"}
)


def phase_of(op_name: str) -> str:
  """Returns FORWARD or BACKWARD for the passes of a derivative, else OTHER."""
  if "transpose(" in op_name:
    return BACKWARD
  return FORWARD if "jvp(" in op_name else OTHER


def module_path(op_name: str) -> str:
  """Returns `GPT/blocks/5/down` for `jit(step)/transpose(jvp(GPT))/blocks/5/down/dot_general`."""
  kept = []
  for part in _split(op_name)[:-1]:
    while found := _WRAPPED.match(part):
      part = found[1]
    if part and not part.startswith(("jit(", "pjit(")) and part not in _NOT_MODULES and "->" not in part:
      kept.append(part)
  return "/".join(kept)


def operation_of(op_name: str) -> str:
  """Returns the primitive: the last part of a name."""
  return _split(op_name)[-1] if op_name else ""


def source_of(module: HloModule, instruction: HloInstruction) -> str:
  """Returns the file and line of the user's program, `model.py:31`."""
  first = ""
  for file, line in module.lines.get(instruction.frame, ()):
    shown = f"{file.rpartition('/')[2]}:{line}"
    if not _compat.is_library(file):
      return shown
    first = first or shown
  return first


def _split(op_name: str) -> list[str]:
  """Returns the parts of a name, which may have slashes inside of parentheses."""
  parts, depth, current = [], 0, ""
  for letter in op_name:
    depth += (letter == "(") - (letter == ")")
    if letter == "/" and depth == 0:
      parts.append(current)
      current = ""
    else:
      current += letter
  return [*parts, current]
