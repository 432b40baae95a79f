"""The analytic plan of memory: the bytes at a step's peak, by part, without a compiler."""

from __future__ import annotations

from collections.abc import Sequence

from mpjax import _compat
from mpjax.jaxpr import call_layout
from mpjax.planner._arguments import Argument, argument_bytes, argument_parts
from mpjax.planner._program import (
  Operation,
  Program,
  by_part,
  live_at_peak,
  read_backward,
  saved_of,
  total_bytes,
)
from mpjax.planner._results import TRANSIENT_PARTS, HostMemory, Memory
from mpjax.planner._targets import Target
from mpjax.planner.analytic._from_jaxpr import viewed

_WORKSPACE = 4 << 20


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
  layout = call_layout(loop.made)
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
