"""The analytic plan of memory: the bytes at a step's peak, by part, without a compiler."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Sequence

import jax

from mpjax import _compat
from mpjax.jaxpr import BACKWARD, FORWARD, Trait, call_layout, has, layer_pattern
from mpjax.planner._arguments import Argument, argument_bytes, argument_parts
from mpjax.planner._array_bytes import tiled_bytes
from mpjax.planner._results import HostMemory, Memory, Saved
from mpjax.planner._targets import Target
from mpjax.planner.analytic._divided_weights import DividedWeights, like_weight
from mpjax.planner.analytic._graph import Graph, GraphOperation, GraphValue, merged
from mpjax.planner.analytic._held_at_once import from_arguments, held_at_once
from mpjax.planner.analytic._liveness import Peak, peak, traits_of

LISTED = 20
_WORKSPACE = 4 << 20


@dataclasses.dataclass(frozen=True)
class DeviceSizes:
  """Bytes of the values of a program on one device.

  Attributes:
    batch_share: one device's share of values that depend on the batch.
    weights: one device's share, with padding, of an array with a weight's shape (also transposed, or one
      layer of a stack).
    kind: kind of the platform; a TPU pads.
  """

  batch_share: float
  weights: dict[tuple[int, ...], float]
  kind: str

  def of(self, value: GraphValue) -> int:
    """Returns the bytes of a value on a device; 0 for one in the host's memory."""
    return 0 if value.on_host else self.whole(value)

  def whole(self, value: GraphValue) -> int:
    """Returns the bytes of a value, wherever it is."""
    if value.local:
      return tiled_bytes(value.shape, value.dtype) if self.kind == "tpu" and value.shape else value.nbytes
    if value.shape in self.weights:
      return int(value.nbytes * self.weights[value.shape])
    whole = tiled_bytes(value.shape, value.dtype) if self.kind == "tpu" and value.shape else value.nbytes
    return int(whole * self.batch_share)


def table_bytes(results: int, kind: str) -> int:
  """Returns the bytes of the pointer table with which a compiled program returns several results."""
  if results < 2:
    return 0
  return -(-4 * results // 512) * 512 if kind == "tpu" else 8 * results


def analytic_memory(
  graph: Graph, arguments: Sequence[Argument], donated: Sequence[bool], target: Target, results: int
) -> Memory:
  """Returns the parts of memory at a step's peak.

  Args:
    graph: graph of the step.
    arguments: the leaves of its arguments.
    donated: for each leaf, whether the results may take its memory.
    target: the target whose compiler is modelled.
    results: number of leaves that the step returns.
  """
  sizes = device_sizes(arguments, target.kind)
  traits = traits_of(target.kind)
  program = merged(graph, through_regions=traits.merges_through_barriers)
  reusable = [value for value, given in zip(program.arguments, donated, strict=True) if given]
  passing = _passing(program) if target.kind == "gpu" else set()
  size = lambda value: 0 if id(value) in passing else sizes.of(value)
  worst = peak(
    program, traits, size=size, weights=DividedWeights(program, arguments, target.kind), reusable=reusable
  )
  weights = {a.shape for a in arguments if a.part == "master weights"}
  results_in = {id(v) for v in program.results}
  transient: collections.Counter[str] = collections.Counter()
  moment: Peak | None = worst
  while moment is not None:  # also inside the loop or branch that runs then
    for value in moment.live:
      transient[_part(value, weights, moment, results_in)] += moment.size(value)
    moment = moment.inner
  known = sum(transient.values())
  transient["temporaries"] += max(0, worst.nbytes - known)
  transient["temporaries"] -= min(transient["temporaries"], max(0, known - worst.nbytes))
  transient["workspace"] += _workspace(program, target)
  transient["outputs"] += (
    table_bytes(results, target.kind)
    + program.literal_bytes
    + _returned_again(program, worst, donated, sizes)
  )
  _move_on_chip(transient, target.on_chip)
  # Results are in the device's memory at the end, even if they were on the chip.
  fresh = sum(worst.size(value) for value in {id(v): v for v in worst.fresh}.values())
  missing = fresh - sum(transient[name] for name in ("outputs", "gradients", "activations", "temporaries"))
  transient["outputs"] += max(0, missing)
  parts, slots = argument_parts(arguments, target.kind)
  order = ("compute copies", "gradients", "activations", "workspace", "temporaries", "outputs")
  parts |= {name: transient[name] for name in order if transient[name]}
  inner = [step.inner for step in worst.order if step.inner is not None]
  saved = max((_saved(moment) for moment in (worst, *inner)), key=_total)
  state: dict[str, int] = {n: parts[n] for n in ("master weights", "optimizer state") if n in parts}
  shapes = [a.shape for a in arguments if a.part == "master weights"]
  state |= held_at_once(program, worst, shapes, sizes.of)
  gathered = gathered_at_once(graph, sizes.of)
  return Memory(parts, slots, saved[:LISTED], _total(saved), sum(parts.values()), state, gathered)


def _passing(graph: Graph) -> set[int]:
  """Returns the ids of the values that are copied between a GPU and the host's memory.

  Kernels read the host's memory themselves, and XLA's memory scheduler copies each result when it is there,
  so that few are on the device at once. The latency-hiding scheduler may hold more.
  """
  copies = [operation for operation, _ in graph.every_operation() if operation.crosses]
  return {id(_viewed(value)) for copy in copies for value in (*copy.operands, *copy.results)}


def host_memory(graph: Graph, arguments: Sequence[Argument], kind: str) -> HostMemory | None:
  """Returns what a step keeps in the host's memory, and what it copies; `None` if it uses none."""
  sizes = device_sizes(arguments, kind)
  copies = [(made, times) for copy, times in graph.every_operation() if copy.crosses for made in copy.results]
  held = sum(argument_bytes(a, kind) for a in arguments if a.on_host)
  if not held and not copies:
    return None
  return HostMemory(
    held,
    to_device=sum(sizes.whole(made) * times for made, times in copies if not made.on_host),
    to_host=sum(sizes.whole(made) * times for made, times in copies if made.on_host),
  )


def device_sizes(arguments: Sequence[Argument], kind: str) -> DeviceSizes:
  """Returns the bytes of a step's values on one device of a kind, from the layout of its arguments."""
  batch = [a for a in arguments if a.part == "batch"]
  whole, local = sum(a.whole for a in batch), sum(a.nbytes for a in batch)
  shares: dict[tuple[int, ...], list[float]] = collections.defaultdict(list)
  for a in arguments:
    if a.part == "master weights" and len(a.shape) > 1:
      for shape in like_weight(a.shape):
        shares[shape].append(argument_bytes(a, kind) / max(1, a.whole))
  # Weights of one shape may lie on the mesh in several ways: all of them together have the right bytes.
  weights = {shape: statistics.mean(several) for shape, several in shares.items()}
  return DeviceSizes(local / whole if whole else 1.0, weights, kind)


def _part(value: GraphValue, weights: set[tuple[int, ...]], worst: Peak, results: set[int]) -> str:
  if id(value) in results:
    return "outputs"
  maker = value.maker
  shaped = value.shape in weights or tuple(reversed(value.shape)) in weights
  if maker is None:
    return "temporaries"
  if shaped and value.shape and maker.phase != BACKWARD and from_arguments(value):
    return "compute copies"
  if shaped and maker.phase == BACKWARD and len(value.shape) > 1:
    return "gradients"
  if maker.phase == FORWARD and id(value) in worst.read_backward:
    return "activations"
  return "temporaries"


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
  whole = {id(value) for value in body.arguments[: layout.rows.start]}
  products = [operation for operation in body.operations if operation.flops]
  read = [_viewed(value) for operation in products for value in operation.operands]
  stacked = [_viewed(value) for value in body.results[len(layout.carry) :]]
  made = {id(value) for operation in products for value in operation.results}
  return any(value.argument is not None and id(value) not in whole for value in read) or any(
    id(value) in made for value in stacked
  )


def _viewed(value: GraphValue) -> GraphValue:
  """Returns the value that a value is a view of."""
  while value.maker is not None and has(value.maker.equation, Trait.ALIAS):
    value = value.maker.operands[0]
  return value


def _returned_again(graph: Graph, worst: Peak, donated: Sequence[bool], sizes: DeviceSizes) -> int:
  """Returns the bytes of results that equal another result, or an argument that must not be overwritten."""
  seen: set[int] = set()
  total = 0
  for value in graph.results:
    root = worst.root(value)
    given = root.argument is not None and not donated[root.argument]
    total += sizes.of(value) if id(root) in seen or given else 0
    seen.add(id(root))
  return total


def _move_on_chip(parts: collections.Counter[str], room: int) -> None:
  """Removes what the compiler keeps in the chip's own memory: values with a short life."""
  for name in ("temporaries", "gradients", "compute copies"):
    moved = min(room, parts[name])
    parts[name] -= moved
    room -= moved


def _saved(worst: Peak) -> tuple[Saved, ...]:
  groups: dict[tuple[str, str, str, str, tuple[int, ...]], list[int]] = {}
  for value in worst.saved:
    maker = value.maker
    if maker is None:
      continue
    dtype = getattr(value.dtype, "name", str(value.dtype))
    row = groups.setdefault((layer_pattern(maker.path), maker.source, maker.name, dtype, value.shape), [0, 0])
    row[0] += 1
    row[1] += worst.size(value)
  rows = [Saved(*key, count=count, nbytes=nbytes) for key, (count, nbytes) in groups.items()]
  return tuple(sorted(rows, key=lambda row: -row.nbytes))


def _total(saved: Sequence[Saved]) -> int:
  return sum(row.nbytes for row in saved)


def gathered_at_once(graph: Graph, size: Callable[[GraphValue], int]) -> int:
  """Returns the most bytes of gathered parameters that a program holds at one time, in program order.

  A cast or a view of a parameter counts as the same parameter.

  Args:
    graph: graph of the program.
    size: returns the bytes of a value on a device.
  """
  root: dict[int, GraphValue] = {}
  last: dict[int, int] = {}
  for i, operation in enumerate(graph.operations):
    if _is_gather(operation):
      root.update((id(v), v) for v in operation.results)
    for operand in operation.operands:
      if (found := root.get(id(operand))) is not None:
        last[id(found)] = i
        if has(operation.equation, Trait.ALIAS | Trait.CAST):
          root.update((id(v), found) for v in operation.results)
  most = 0
  live: dict[int, int] = {}
  for i, operation in enumerate(graph.operations):
    if _is_gather(operation):
      live.update((id(v), size(v)) for v in operation.results if id(v) in last)
    inside = max((gathered_at_once(body, size) for body in operation.bodies), default=0)
    most = max(most, sum(live.values()) + inside)
    live = {key: nbytes for key, nbytes in live.items() if last[key] > i}
  return most


def _is_gather(operation: GraphOperation) -> bool:
  equation = operation.equation
  return equation.primitive is jax.lax.all_gather_p and "fsdp" in equation.params["axis_name"]
