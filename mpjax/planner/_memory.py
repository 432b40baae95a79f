"""Folds over a traced step: the bytes at its peak, by part, the host's memory, and a floor for its time."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mpjax import _compat
from mpjax.jaxpr import Trait, has, layer_pattern
from mpjax.planner._arguments import Argument, argument_bytes, argument_parts
from mpjax.planner._products import list_products
from mpjax.planner._program import (
  Operation,
  Program,
  by_part,
  live_at_peak,
  read_backward,
  total_bytes,
)
from mpjax.planner._results import TRANSIENT_PARTS, Collective, Floor, HostMemory, Memory, Saved, add_up
from mpjax.planner._targets import Target

_WORKSPACE = 4 << 20
_MOST_SAVED = 20
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
  if any(operation.flops for operation, _ in traced.each()):
    most = _WORKSPACE if _compat.has_newer_xla() else target.workspace
    transient["workspace"] += min(most, target.workspace)
  room = target.on_chip
  for name in ("temporaries", "gradients", "compute copies"):  # short-lived, and on a TPU's chip
    moved = min(room, transient[name])
    transient[name] -= moved
    room -= moved
  fresh = total_bytes(results - program.given)
  missing = fresh - sum(transient[name] for name in ("outputs", "gradients", "activations", "temporaries"))
  transient["outputs"] += max(0, missing)
  saved = [
    Saved(layer_pattern(b.maker.path), b.maker.source, b.maker.name, str(b.dtype), b.shape, 1, b.nbytes)
    for b in peak.saved
    if b.maker is not None
  ]
  parts, slots = argument_parts(arguments, target.kind)
  parts |= {name: transient[name] for name in TRANSIENT_PARTS if transient[name]}
  rows = tuple(add_up(saved, "count", "nbytes")[:_MOST_SAVED])
  return Memory(parts, slots, rows, total_bytes(peak.saved), sum(parts.values()))


def host_memory(program: Program, arguments: Sequence[Argument], kind: str) -> HostMemory | None:
  """Returns what a step keeps in the host's memory, and what it copies; `None` if it uses none."""
  copies = [(made, times) for copy, times in program.each() if copy.part == "host" for made in copy.writes]
  held = sum(argument_bytes(a, kind) for a in arguments if a.on_host)
  if not held and not copies:
    return None
  return HostMemory(
    held,
    to_device=sum(made.whole * times for made, times in copies if not made.on_host),
    to_host=sum(made.whole * times for made, times in copies if made.on_host),
  )


def time_floor(
  program: Program,
  arguments: Sequence[Argument],
  memory: Memory,
  collectives: Sequence[Collective],
  target: Target,
) -> Floor | None:
  """Returns the shortest time of a step, or `None` if the target has no published peak rates.

  Every step reads its state and its batch from memory, and writes its results there. Arrays of which it reads
  or writes only a part do not count. Only activations that wait for the backward pass may stay in a cache
  instead.

  Args:
    program: the traced step.
    arguments: the leaves of its arguments.
    memory: memory of the step, the compiler's if there is one.
    collectives: the collectives of the step.
    target: the target with the peak rates.
  """
  if not target.flops or not target.bandwidth:
    return None
  read = {
    value.argument
    for operation in program.operations
    for i, value in enumerate(operation.operands)
    if i or not (_in_place(operation) or operation.origin.primitive in _IN_PARTS)
  }
  moved = sum(argument_bytes(a, target.kind) for i, a in enumerate(arguments) if i in read and not a.on_host)
  written = [value for value in set(program.results) if value.argument is None]
  moved += total_bytes([value for value in written if value.maker is None or not _in_place(value.maker)])
  moved += 2 * max(0, memory.saved_bytes - target.cache)
  # A kernel may state more FLOPs than it runs: the masked half of causal attention.
  products = list_products(program, target, least=True)
  parts = {
    "matrix units": sum(p.flops * p.passes / target.unit_rate(p.dtype)[1] for p in products if not p.kernel),
    "memory": moved / target.bandwidth,
  }
  if collectives and target.interconnect:
    parts["interconnect"] = sum(c.sent for c in collectives) / target.interconnect
  bound = max(parts, key=lambda name: parts[name])
  return Floor(parts[bound], parts, bound, moved)


def _in_place(operation: Operation) -> bool:
  """Returns whether an operation writes a part of its first operand."""
  return has(operation.origin, Trait.IN_PLACE) and not operation.bodies
