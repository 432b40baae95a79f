"""How often a loop of a compiled program runs, where its compiler has not written it down, as for TPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
  from mpjax.planner.compiled._hlo import Instruction

_BODY = re.compile(r"\bbody=%([\w.\-]+)")
_CONDITION = re.compile(r"\bcondition=%([\w.\-]+)")
_NUMBER = re.compile(r"(-?\d+)\)")
_INDEX = re.compile(r"\bindex=(\d+)")


def trips(
  computations: Mapping[str, Mapping[str, Instruction]], scope: Mapping[str, Instruction], loop: Instruction
) -> int | None:
  """Runs of the body of a loop that counts up to a number, as that of `lax.scan` does; `None` for others.

  Args:
    computations: of the module.
    scope: the instructions beside the loop.
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


def _step(body: Mapping[str, Instruction], add: Instruction | None, position: int) -> int | None:
  """What a body adds to its counter."""
  if add is None or add.op != "add":
    return None
  old, more = (_source(body, name) for name in add.operands)
  step = _number(more)
  return step if _position(old) == position and step is not None and step > 0 else None


def _source(scope: Mapping[str, Instruction], name: str) -> Instruction | None:
  """An instruction, or what it is a copy of."""
  found = scope.get(name)
  while found is not None and found.op == "copy":
    found = scope.get(found.operands[0])
  return found


def _root(scope: Mapping[str, Instruction]) -> Instruction | None:
  return next((instruction for instruction in scope.values() if instruction.is_root), None)


def _position(part: Instruction | None) -> int | None:
  """The position in a loop's state that an instruction reads."""
  found = _INDEX.search(part.rest) if part is not None and part.op == "get-tuple-element" else None
  return int(found[1]) if found else None


def _number(constant: Instruction | None) -> int | None:
  found = _NUMBER.match(constant.rest) if constant is not None and constant.op == "constant" else None
  return int(found[1]) if found else None
