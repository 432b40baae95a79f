"""Folds over a traced step: the bytes at its peak, by part, the host's memory, and a floor for its time."""

from __future__ import annotations

import collections
from collections.abc import Sequence

import jax

from mpjax import _compat
from mpjax.jaxpr import Trait, call_layout, has
from mpjax.planner._arguments import Argument, argument_bytes, argument_parts
from mpjax.planner._from_jaxpr import viewed
from mpjax.planner._products import list_products
from mpjax.planner._program import (
  Operation,
  Program,
  by_part,
  live_at_peak,
  read_backward,
  saved_of,
  total_bytes,
)
from mpjax.planner._results import ARGUMENT_PARTS, TRANSIENT_PARTS, Collective, Floor, HostMemory, Memory
from mpjax.planner._targets import Target

_WORKSPACE = 4 << 20
_IN_PARTS = (jax.lax.dynamic_slice_p, jax.lax.gather_p, jax.lax.slice_p)


def analytic_memory(
  traced: Program, program: Program, arguments: Sequence[Argument], target: Target
) -> Memory:
  """Returns the parts of memory at a step's peak.

  Args:
    traced: the traced step.
    program: what it stores.
    arguments: the leaves of its arguments.
    target: the target whose compiler is modelled.
  """
  peak = live_at_peak(program)
  results = set(program.results)
  transient = by_part([b for b in peak.live if b not in results], read_backward(program))
  transient["outputs"] = total_bytes(results.intersection(peak.live))
  # Negative where a result takes its operand's place.
  transient["temporaries"] += peak.nbytes - total_bytes(peak.live)
  transient["workspace"] += _workspace(traced, target)
  room = target.on_chip
  for name in ("temporaries", "gradients", "compute copies"):  # short-lived, and on a TPU's chip
    moved = min(room, transient[name])
    transient[name] -= moved
    room -= moved
  fresh = total_bytes(results - program.given)
  missing = fresh - sum(transient[name] for name in ("outputs", "gradients", "activations", "temporaries"))
  transient["outputs"] += max(0, missing)
  parts, slots = argument_parts(arguments, target.kind)
  parts |= {name: transient[name] for name in TRANSIENT_PARTS if transient[name]}
  return Memory(parts, slots, *saved_of(peak.saved), sum(parts.values()))


def host_memory(program: Program, arguments: Sequence[Argument], kind: str) -> HostMemory | None:
  """Returns what a step keeps in the host's memory, and what it copies; `None` if it uses none."""
  copies = [(made, times) for copy, times in program.each() if copy.crosses for made in copy.writes]
  held = sum(argument_bytes(a, kind) for a in arguments if a.on_host)
  if not held and not copies:
    return None
  return HostMemory(
    held,
    to_device=sum(made.whole * times for made, times in copies if not made.on_host),
    to_host=sum(made.whole * times for made, times in copies if made.on_host),
  )


def _workspace(program: Program, target: Target) -> int:
  """Returns the bytes of workspace for products; a newer XLA uses all only for slices of a loop's stack."""
  operations = [operation for operation, _ in program.each()]
  if not any(operation.flops for operation in operations):
    return 0
  if _compat.has_newer_xla() and not any(map(_multiplies_slices, operations)):
    return min(target.workspace, _WORKSPACE)
  return target.workspace


def _multiplies_slices(loop: Operation) -> bool:
  """Returns whether a product in a scan directly reads a slice of its input or makes one of its output."""
  layout = call_layout(loop.origin)
  if layout.rows is None:
    return False
  (body,) = loop.bodies
  whole = set(body.arguments[: layout.rows.start])
  products = [operation for operation in body.operations if operation.flops]
  read = [viewed(value) for operation in products for value in operation.operands]
  stacked = {viewed(value) for value in body.results[len(layout.carry) :]}
  return any(value.argument is not None and value not in whole for value in read) or any(
    value in stacked for operation in products for value in operation.writes
  )


def time_floor(
  program: Program,
  arguments: Sequence[Argument],
  memory: Memory,
  collectives: Sequence[Collective],
  target: Target,
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
  if collectives and target.interconnect:
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
      part = i == 0 and operation.origin.primitive in _IN_PARTS
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
  return has(operation.origin, Trait.IN_PLACE) and not operation.bodies
