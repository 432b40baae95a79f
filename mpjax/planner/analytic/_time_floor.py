"""The shortest time that a step can take at the published peak rates of a target."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax

from mpjax.jaxpr import Trait, has
from mpjax.planner._arguments import Argument, argument_bytes
from mpjax.planner._program import Operation, Program, total_bytes
from mpjax.planner._results import ARGUMENT_PARTS, Collective, Floor, Memory
from mpjax.planner._targets import Target
from mpjax.planner.analytic._products import list_products

_PARTS = (jax.lax.dynamic_slice_p, jax.lax.gather_p, jax.lax.slice_p)


def time_floor(
  program: Program,
  arguments: Sequence[Argument],
  memory: Memory,
  collectives: Sequence[Collective],
  target: Target,
  devices: int,
) -> Floor | None:
  """Returns the shortest time of a step, or `None` if the target has no published peak rates.

  Every step reads its state and its batch from memory, and writes its results there. An array from which it
  only slices or gathers, or that it updates in place, counts by that part. Only activations that wait for
  the backward pass may stay in a cache instead.

  Args:
    program: the traced step.
    arguments: the leaves of its arguments.
    memory: memory of the step, the compiler's if there is one.
    collectives: the collectives of the step.
    target: the target with the peak rates.
    devices: number of devices that share the work.
  """
  if not target.flops or not target.bandwidth:
    return None
  state = sum(memory.parts.get(name, 0) for name in ARGUMENT_PARTS)
  state += _written_bytes(program) - _unread_bytes(program, arguments, target.kind)
  touched = state + 2 * memory.saved_bytes
  moved = state + 2 * max(0, memory.saved_bytes - target.cache)
  # A kernel may state more FLOPs than it runs: the masked half of causal attention.
  products = list_products(program, target, least=True)
  parts = {
    "matrix units": sum(p.flops * p.passes / target.unit_rate(p.dtype)[1] for p in products if not p.kernel),
    "memory": moved / target.bandwidth,
  }
  if collectives and target.interconnect and devices > 1:
    parts["interconnect"] = sum(c.sent for c in collectives) / target.interconnect
  bound = max(parts, key=lambda name: parts[name])
  return Floor(parts[bound], parts, bound, moved, touched, target.cache)


def _unread_bytes(program: Program, arguments: Sequence[Argument], kind: str) -> int:
  """Returns the bytes of arguments, on one device, that a step need not read."""
  used = {value for operation in program.operations for value in operation.operands}
  whole = [0 if a.on_host else argument_bytes(a, kind) for a in arguments]
  read: collections.Counter[int] = collections.Counter()
  for operation in program.operations:
    for i, value in enumerate(operation.operands):
      if value.argument is None:
        continue
      updated = i == 0 and _in_place(operation) and operation.writes[0] not in used
      part = i == 0 and operation.made.primitive in _PARTS
      if not updated:
        read[value.argument] += total_bytes(operation.writes) if part else whole[value.argument]
  return sum(max(0, nbytes - read[i]) for i, nbytes in enumerate(whole))


def _written_bytes(program: Program) -> int:
  """Returns the bytes, on one device, of the results that are not unchanged arguments."""
  total = 0
  for value in set(program.results):
    if value.maker is not None and _in_place(value.maker):
      total += min(value.nbytes, max((v.nbytes for v in value.maker.operands[1:]), default=0))
    elif value.argument is None:
      total += value.nbytes
  return total


def _in_place(operation: Operation) -> bool:
  """Returns whether an operation writes a part of its first operand."""
  return has(operation.made, Trait.IN_PLACE) and not operation.bodies
