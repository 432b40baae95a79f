"""The time of a step: one clock for a compiled program, and for the kernels that a traced one becomes.

On a TPU the compiler notes the cycles that it expects of most instructions. All else takes the longer of its
FLOPs at the rate of the units and its bytes at the bandwidth of the memory. What starts and ends in two
operations runs while those between them run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator

import jax

from mpjax.formats import narrow_bits
from mpjax.jaxpr import Trait, has, layer_pattern
from mpjax.planner._program import Buffer, Operation, Program
from mpjax.planner._rates import (
  BESIDE,
  CYCLES,
  HIDDEN,
  collective_seconds,
  host_seconds,
  kernel_seconds,
  memory_seconds,
  product_seconds,
)
from mpjax.planner._results import TIME_PARTS, Time
from mpjax.planner._stored import is_heavy
from mpjax.planner._targets import Target
from mpjax.products import is_fp8

_SOURCES = {"tpu": "compiler's cycles", "gpu": "roofline of the compiled program"}
# Half of the published steps in benchmarks/README.md are nearer than the first; the second is of traced ones.
_ERROR, _ERROR_TRACED = 0.2, 0.5


def compiled_time(program: Program, target: Target) -> Time | None:
  """Returns the time of a step from its compiled program; `None` if the target has no published rates."""
  if not _has_rates(target):
    return None
  return _spent(program, target, BESIDE.get(target.kind, 0.0)).time(_SOURCES[target.kind], _ERROR)


def traced_time(program: Program, target: Target) -> Time | None:
  """Returns the time of a step from what its traced program stores: a roofline of the kernels made of it.

  What is stored is read and written; what is not stored is computed where it is read, at no cost.
  """
  if not _has_rates(target):
    return None
  spent = _spent(_kernels(program), target)
  for place, seconds in spent.by_place.items():
    if place[0] == "collectives":
      spent.by_place[place] = seconds * (1 - HIDDEN)
      spent.hidden += seconds * HIDDEN
  return spent.time("roofline of the traced program", _ERROR_TRACED)


def _has_rates(target: Target) -> bool:
  return target.kind in _SOURCES and bool(target.flops) and bool(target.bandwidth)


class _Spent:
  """Seconds by (part, module), and those that other work hides."""

  def __init__(self) -> None:
    self.by_place: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
    self.hidden = 0.0

  @property
  def seconds(self) -> float:
    """Returns the seconds that pass."""
    return sum(self.by_place.values())

  def add(self, other: _Spent, times: float = 1) -> None:
    """Adds what something takes that runs `times` times."""
    for place, seconds in other.by_place.items():
      self.by_place[place] += seconds * times
    self.hidden += other.hidden * times

  def time(self, source: str, error: float) -> Time:
    """Returns it as a plan has it."""
    parts: dict[str, float] = dict.fromkeys(TIME_PARTS, 0.0)
    modules: collections.defaultdict[str, float] = collections.defaultdict(float)
    for (part, path), seconds in self.by_place.items():
      parts[part] += seconds
      modules[layer_pattern(path)] += seconds
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    longest = dict(sorted(modules.items(), key=lambda item: -item[1]))
    return Time(sum(parts.values()), parts, self.hidden, longest, source, error)


def _spent(program: Program, target: Target, slowed: float = 0.0) -> _Spent:
  """Returns what one run of a program takes: its operations one after another, and what runs meanwhile.

  Args:
    program: the program.
    target: the target that it runs on.
    slowed: the share of its hidden seconds by which what runs meanwhile slows the others.
  """
  spent = _Spent()
  now = 0.0
  free: collections.defaultdict[str, float] = collections.defaultdict(float)  # when a queue is free again
  began: dict[Operation, tuple[float, float]] = {}  # seconds, end
  for operation in program.operations:
    place = operation.part, operation.path
    took = _Spent()
    if operation.queue:
      seconds = _seconds(operation, target)
      free[operation.queue] = max(now, free[operation.queue]) + seconds
      began[operation] = seconds, free[operation.queue]
    elif (start := operation.awaits) is not None:
      seconds, end = began.pop(start)
      wait = max(0.0, end - now)
      took.hidden = max(0.0, seconds - wait)
      took.by_place[start.part, start.path] = wait + slowed * took.hidden
    elif operation.part and not operation.bodies and (seconds := _seconds(operation, target)):
      took.by_place[place] = seconds
    bodies = [_spent(body, target, slowed) for body in operation.bodies]
    for body in [max(bodies, key=lambda body: body.seconds)] if operation.chooses else bodies:
      took.add(body, operation.times or 1)
    spent.add(took)
    now += took.seconds
  spent.hidden += sum(seconds for seconds, _ in began.values())  # what ends in another computation
  return spent


def _seconds(operation: Operation, target: Target) -> float:
  """Returns the seconds of one run of an operation."""
  if operation.part == "collectives":
    return collective_seconds(target, operation.collectives, operation.members)
  if operation.part == "host":
    return host_seconds(target, operation.moved)
  if operation.queue:
    return memory_seconds(target, operation.moved)
  if operation.cycles is not None and (clock := target.speeds.get("clock")):
    # No product is faster than the units; float32 operands take at least one pass of bfloat16.
    rate_of = lambda dtype: target.unit_rate("bfloat16" if "float32" in dtype else dtype)[1]
    least = sum(p.flops / rate_of(p.dtype) for p in operation.products)
    return max(CYCLES * operation.cycles / clock, least)
  work = sum(product_seconds(target, product, operation.devices) for product in operation.products)
  return kernel_seconds(target, work, operation.moved)


@dataclasses.dataclass(eq=False)
class _Kernel:
  """Operations that run as one: the first of them, and the bytes of each buffer read and written."""

  operation: Operation
  reads: dict[Buffer, float]
  writes: dict[Buffer, float]


def _kernels(program: Program) -> Program:
  """Returns a program of kernels, with the bytes that they move."""
  operations = []
  for kernel in list(_merged(program)):  # which adds to those before
    moved = kernel.operation.moved or sum((*kernel.reads.values(), *kernel.writes.values()))
    bodies = [_kernels(body) for body in kernel.operation.bodies]
    operations.append(dataclasses.replace(kernel.operation, bodies=bodies, moved=moved))
  return dataclasses.replace(program, operations=operations)


def _merged(program: Program) -> Iterator[_Kernel]:
  """Yields the kernels of a program, a loop or conditional as one.

  The level of a value is the most products, reductions over columns and the like that it depends on one after
  another. Element-wise operations of one level are one kernel if they share a large operand.
  """
  level: dict[Buffer, int] = {}
  started: dict[tuple[int, int], list[_Kernel]] = collections.defaultdict(list)
  for operation in program.operations:
    reads, writes = dict(operation.reads), {b: float(b.nbytes) for b in operation.writes}
    depth = max((level.get(b, 0) for b in reads), default=0)
    is_copy = operation.part == "copies" and not writes
    heavy = is_copy or is_heavy(operation)
    ends = heavy or (has(operation.origin, Trait.STORES_RESULT) and not _of_rows(operation))
    level.update(dict.fromkeys(writes, depth + ends))
    alone = Operation(operation.origin, path=operation.path, part="element-wise")
    if heavy:
      if is_fp8(operation.origin):
        yield _Kernel(alone, {Buffer((), None): _quantised_bytes(operation)}, {})
      kernel = _Kernel(operation, reads, writes)
      if not operation.bodies:
        _in_part(kernel)
      yield kernel
      continue
    elements = max((math.prod(v.shape) for v in (*operation.operands, *operation.writes)), default=0)
    most = max((*reads.values(), *writes.values()), default=0)
    large = {b for b, nbytes in (reads | writes).items() if 4 * nbytes >= most}
    open_ones = started[depth, elements]
    found = next((k for k in open_ones if not large.isdisjoint(k.reads | k.writes)), None)
    if found is None:
      found = _Kernel(alone, {}, {})
      open_ones.append(found)
      yield found
    found.reads |= {b: nbytes for b, nbytes in reads.items() if b not in found.writes}
    found.writes |= writes


def _in_part(kernel: _Kernel) -> None:
  """Corrects the bytes of an operation that reads or writes a part of a value."""
  made = kernel.operation.origin
  if made.primitive is jax.lax.gather_p:
    kernel.reads = {b: min(nbytes, sum(kernel.writes.values())) for b, nbytes in kernel.reads.items()}
  elif has(made, Trait.IN_PLACE) and len(kernel.operation.operands) > 1:  # a copy has none
    whole = next(iter(kernel.reads), None)
    kernel.reads = {b: nbytes for b, nbytes in kernel.reads.items() if b is not whole}
    kernel.writes = dict.fromkeys(kernel.writes, sum(kernel.reads.values()))


def _of_rows(operation: Operation) -> bool:
  """Returns whether an operation reduces the last dimension: a kernel does so, and goes on with the row."""
  axes = operation.origin.params.get("axes", ())
  return len(operation.operands) == 1 and axes == (len(operation.operands[0].shape) - 1,)


def _quantised_bytes(product: Operation) -> float:
  """Returns the bytes that move while the operands of an FP8 product are quantised."""
  spec = product.origin.params["spec"]
  nbytes = 0.0
  for value, dtype, given in zip(
    product.operands[:2], (spec.lhs_dtype, spec.rhs_dtype), spec.given[:2], strict=True
  ):
    passes = 1 if given or spec.in_blocks else 2  # the largest value, then the codes
    nbytes += value.nbytes * (passes + narrow_bits(dtype) / 8 / max(1, value.dtype.itemsize))
  return nbytes
