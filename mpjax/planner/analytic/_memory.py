"""The analytic plan of memory: the bytes at a step's peak, by part, without a compiler."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from mpjax import _compat
from mpjax.jaxpr import BACKWARD, FORWARD, call_layout, layer_pattern
from mpjax.planner._arguments import Argument, argument_bytes, argument_parts
from mpjax.planner._program import Buffer, Program, live_at_peak, read_backward, total_bytes
from mpjax.planner._results import TRANSIENT_PARTS, HostMemory, Memory, Saved, add_up_saved
from mpjax.planner._targets import Target
from mpjax.planner.analytic._graph import Graph, GraphOperation, viewed

_WORKSPACE = 4 << 20


def analytic_memory(graph: Graph, program: Program, arguments: Sequence[Argument], target: Target) -> Memory:
  """Returns the parts of memory at a step's peak.

  Args:
    graph: graph of the step.
    program: what it stores.
    arguments: the leaves of its arguments.
    target: the target whose compiler is modelled.
  """
  peak = live_at_peak(program)
  results = set(program.results)
  kept = read_backward(program)
  transient: collections.Counter[str] = collections.Counter()
  for value in peak.live:
    transient["outputs" if value in results else _part(value, graph, arguments, kept)] += value.nbytes
  transient["temporaries"] += peak.nbytes - total_bytes(
    peak.live
  )  # negative where a result takes its operand's place
  transient["workspace"] += _workspace(graph, target)
  room = target.on_chip
  for name in (
    "temporaries",
    "gradients",
    "compute copies",
  ):  # a TPU keeps on the chip what lives for a short time
    moved = min(room, transient[name])
    transient[name] -= moved
    room -= moved
  fresh = total_bytes(results - program.given)
  missing = fresh - sum(transient[name] for name in ("outputs", "gradients", "activations", "temporaries"))
  transient["outputs"] += max(0, missing)
  parts, slots = argument_parts(arguments, target.kind)
  parts |= {name: transient[name] for name in TRANSIENT_PARTS if transient[name]}
  saved = add_up_saved(
    Saved(layer_pattern(b.maker.path), b.maker.source, b.maker.name, str(b.dtype), b.shape, 1, b.nbytes)
    for b in peak.saved
  )
  return Memory(parts, slots, *saved, sum(parts.values()))


def _part(value: Buffer, graph: Graph, arguments: Sequence[Argument], kept: set[Buffer]) -> str:
  maker = value.maker
  if maker is None:
    return "temporaries"
  weight = arguments[value.weight] if value.weight is not None else None
  if weight and maker.phase != BACKWARD and value.dtype.itemsize <= weight.dtype.itemsize:
    return "compute copies"
  if value.shape in graph.sizes.weights and maker.phase == BACKWARD:
    return "gradients"
  return "activations" if maker.phase == FORWARD and value in kept else "temporaries"


def host_memory(graph: Graph, arguments: Sequence[Argument], kind: str) -> HostMemory | None:
  """Returns what a step keeps in the host's memory, and what it copies; `None` if it uses none."""
  copies = [(made, times) for copy, times in graph.every_operation() if copy.crosses for made in copy.results]
  held = sum(argument_bytes(a, kind) for a in arguments if a.on_host)
  if not held and not copies:
    return None
  return HostMemory(
    held,
    to_device=sum(made.whole * times for made, times in copies if not made.on_host),
    to_host=sum(made.whole * times for made, times in copies if made.on_host),
  )


def _workspace(graph: Graph, target: Target) -> int:
  """Returns the bytes of workspace for products; a newer XLA uses all only for slices of a loop's stack."""
  operations = [operation for operation, _ in graph.every_operation()]
  if not any(operation.flops for operation in operations):
    return 0
  if _compat.has_newer_xla() and not any(_multiplies_slices(operation) for operation in operations):
    return min(target.workspace, _WORKSPACE)
  return target.workspace


def _multiplies_slices(loop: GraphOperation) -> bool:
  """Returns whether a product in a scan directly reads a slice of its input or makes one of its output."""
  layout = call_layout(loop.equation)
  if layout.rows is None:
    return False
  (body,) = loop.bodies
  whole = set(body.arguments[: layout.rows.start])
  products = [operation for operation in body.operations if operation.flops]
  read = [viewed(value) for operation in products for value in operation.operands]
  stacked = {viewed(value) for value in body.results[len(layout.carry) :]}
  return any(value.argument is not None and value not in whole for value in read) or any(
    value in stacked for operation in products for value in operation.results
  )
