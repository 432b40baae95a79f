"""The time of a step from its traced program alone: a roofline of the kernels that a compiler makes of it.

What is stored is read and written, by the rule of the analytic plan of memory; what is not stored is computed
where it is read, at no cost. Element-wise operations on the same values are one kernel. On a TPU the memory
on the chip holds what is read soon.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from mpjax.formats import narrow_bits, padded
from mpjax.jaxpr import Trait, facts, has
from mpjax.planner._program import Buffer, Operation, Program, time_of, total_bytes
from mpjax.planner._results import Time
from mpjax.planner._targets import Target
from mpjax.planner.analytic._graph import GraphOperation
from mpjax.planner.analytic._products import product_sizes, units_of
from mpjax.planner.analytic._stored import is_heavy
from mpjax.planner.timing._kernels import traced_flops
from mpjax.planner.timing._rates import (
  HIDDEN,
  collective_seconds,
  efficiency,
  host_seconds,
  kernel_seconds,
  product_seconds,
)
from mpjax.products import is_fp8

_SOURCE = "roofline of the traced program"
_ERROR = 0.5


def traced_time(program: Program, target: Target, devices: int) -> Time | None:
  """Returns the time of a step, or `None` if the target has no published rates.

  Args:
    program: what the step stores.
    target: its target.
    devices: number of devices that share the work.
  """
  if target.kind == "cpu" or not target.flops or not target.bandwidth:
    return None
  spent = time_of(_timed(program, target, devices))
  for place, seconds in spent.by_place.items():
    if place[0] == "collectives":
      spent.by_place[place] = seconds * (1 - HIDDEN)
      spent.hidden += seconds * HIDDEN
  return spent.time(_SOURCE, _ERROR)


@dataclasses.dataclass(eq=False)
class _Kernel:
  """Operations that run as one.

  Attributes:
    operation: the first of them, which names it.
    reads: bytes read of each buffer.
    writes: bytes written of each buffer.
    part: kind of work, by the names of TIME_PARTS.
    busy: seconds of its products, of its collective, or of its transfer to or from the host.
  """

  operation: Operation
  reads: dict[Buffer, float]
  writes: dict[Buffer, float]
  part: str = "element-wise"
  busy: float = 0.0


def _timed(program: Program, target: Target, devices: int) -> Program:
  """Returns a program of kernels with their seconds."""
  kernels = list(_kernels(program, target, devices))
  operations = []
  for kernel, moved in zip(kernels, _moved(kernels, program, target.on_chip / 2), strict=True):
    if kernel.operation.bodies:
      bodies = [_timed(body, target, devices) for body in kernel.operation.bodies]
      operations.append(dataclasses.replace(kernel.operation, bodies=bodies))
      continue
    crosses = kernel.part in ("collectives", "host")
    seconds = kernel.busy if crosses else kernel_seconds(target, kernel.busy, moved)
    operations.append(dataclasses.replace(kernel.operation, part=kernel.part, seconds=seconds))
  return dataclasses.replace(program, operations=operations)


def _kernels(program: Program, target: Target, devices: int) -> Iterator[_Kernel]:
  """Yields the kernels of a program, a loop or conditional as one.

  The level of a value is the most products, reductions and the like that it depends on one after another.
  Element-wise operations of one level are one kernel if they share a large operand.
  """
  level: dict[Buffer, int] = {}
  started: dict[tuple[int, int], list[_Kernel]] = collections.defaultdict(list)
  for operation in program.operations:
    made = operation.made
    reads, writes = dict(operation.reads), {b: float(b.nbytes) for b in operation.writes}
    depth = max((level.get(b, 0) for b in reads), default=0)
    heavy = is_heavy(made) or operation.part == "copies"
    level.update(dict.fromkeys(writes, depth + (heavy or has(made.equation, Trait.STORES_RESULT))))
    if heavy:
      kernel = _Kernel(operation, reads, writes, operation.part)
      if not operation.bodies and not operation.part:
        kernel.part, kernel.busy = _busy(made, target, devices)
        _in_part(kernel, made)
      if is_fp8(made.equation):
        yield _Kernel(operation, {Buffer((), None): _quantised_bytes(made)}, {})
      yield kernel
      continue
    elements = max((math.prod(v.shape) for v in (*made.operands, *made.results)), default=0)
    most = max((*reads.values(), *writes.values()), default=0)
    large = {b for b, nbytes in (reads | writes).items() if 4 * nbytes >= most}
    open_ones = started[depth, elements]
    found = next((k for k in open_ones if not large.isdisjoint(k.reads | k.writes)), None)
    if found is None:
      found = _Kernel(operation, {}, {})
      open_ones.append(found)
      yield found
    found.reads |= {b: nbytes for b, nbytes in reads.items() if b not in found.writes}
    found.writes |= writes


def _moved(kernels: Sequence[_Kernel], program: Program, room: float) -> Iterator[float]:
  """Yields the bytes that each kernel moves to and from the device's memory.

  What fits the memory on a TPU's chip, which the compiler fills, does not go there at all if it is read
  before others take its place.
  """
  last = {b: kernel for kernel in kernels for b in kernel.reads}
  stays = {b for b, kernel in last.items() if not kernel.operation.bodies} - set(program.results)
  held: collections.OrderedDict[Buffer, float] = collections.OrderedDict()
  for kernel in kernels:
    moved = sum(nbytes for b, nbytes in kernel.reads.items() if b not in held)
    for b in kernel.reads:
      if last[b] is kernel:
        held.pop(b, None)
    for b, nbytes in kernel.writes.items():
      if b in stays:
        held[b] = nbytes
      else:
        moved += nbytes
    while sum(held.values()) > room:
      moved += held.popitem(last=False)[1]
    yield moved


def _busy(made: GraphOperation, target: Target, devices: int) -> tuple[str, float]:
  """Returns the part of an operation, and the seconds of its FLOPs or of its collective."""
  equation = made.equation
  share = made.divided if made.local else devices
  if made.crosses:
    return "host", host_seconds(target, sum(value.whole for value in made.results))
  if name := facts(equation).collective:
    return "collectives", collective_seconds(target, name, total_bytes(made.results), range(made.group))
  if has(equation, Trait.KERNEL):
    narrow = any(narrow_bits(getattr(value.dtype, "name", "")) for value in made.operands)
    _, rate = target.unit_rate("float8_e4m3fn" if narrow else "bfloat16")
    return "attention kernels", traced_flops(equation) / share / (rate * efficiency(target, "kernels"))
  if not made.flops:
    return ("copies" if has(equation, Trait.MOVES) else "element-wise"), 0.0
  dtype, passes = units_of(made, target)
  sizes = product_sizes(made)
  batch = max(1, round(made.flops / max(1, 2 * math.prod(sizes))))
  if target.kind == "tpu":
    sizes = padded(target.matrix_units, dtype, *sizes)
  convolution = "lhs_dilation" in equation.params
  seconds = passes * product_seconds(target, dtype, sizes, batch, convolution=convolution) / share
  return ("convolutions" if convolution else "products"), seconds


def _in_part(kernel: _Kernel, made: GraphOperation) -> None:
  """Corrects the bytes of an operation that reads or writes a part of a value."""
  if made.equation.primitive is jax.lax.gather_p:
    kernel.reads = {b: min(nbytes, sum(kernel.writes.values())) for b, nbytes in kernel.reads.items()}
  elif has(made.equation, Trait.IN_PLACE) and len(made.operands) > 1:
    whole = next(iter(kernel.reads), None)
    kernel.reads = {b: nbytes for b, nbytes in kernel.reads.items() if b is not whole}
    kernel.writes = dict.fromkeys(kernel.writes, sum(kernel.reads.values()))


def _quantised_bytes(made: GraphOperation) -> float:
  """Returns the bytes that move while the operands of an FP8 product are quantised."""
  spec = made.equation.params["spec"]
  nbytes = 0.0
  for value, dtype, given in zip(
    made.operands[:2], (spec.lhs_dtype, spec.rhs_dtype), spec.given[:2], strict=True
  ):
    passes = 1 if given or spec.in_blocks else 2  # the largest value, then the codes
    nbytes += value.nbytes * (passes + narrow_bits(dtype) / 8 / max(1, value.dtype.itemsize))
  return nbytes
