"""The memory of a traced step: the stored buffers, by a small model of XLA, the bytes at the peak by part.

The result of an elementwise operation is computed where it is read; it is stored only if a matrix product, a
loop or the caller needs it in memory. Operations run in program order, but an update as soon as what it reads
is there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax
import numpy as np

from mpjax import _compat
from mpjax.formats import narrow_bits
from mpjax.jaxpr import BACKWARD, OTHER, Trait, has, layer_pattern
from mpjax.planner._arguments import Argument, argument_parts
from mpjax.planner._program import (
  Buffer,
  Operation,
  Program,
  by_part,
  live_at_peak,
  read_backward,
  total_bytes,
)
from mpjax.planner._results import TRANSIENT_PARTS, HostMemory, Memory, Saved, add_up
from mpjax.planner._targets import Target
from mpjax.products import is_fp8

_WORKSPACE = 4 << 20
_MOST_SAVED = 20
_IN_PARTS = (jax.lax.dynamic_slice_p, jax.lax.gather_p, jax.lax.slice_p)


def analytic_memory(program: Program, arguments: Sequence[Argument], target: Target) -> Memory:
  """Returns the parts of memory at the peak of what a step stores, its arguments among them."""
  peak = live_at_peak(program)
  results = set(program.results)
  transient = by_part([b for b in peak.live if b not in results], read_backward(program))
  transient["outputs"] = total_bytes(results.intersection(peak.live))
  # Negative where a result takes its operand's place.
  transient["temporaries"] += peak.nbytes - total_bytes(peak.live)
  if any(operation.flops for operation, _ in program.each()):
    most = _WORKSPACE if _compat.has_newer_xla() else target.workspace
    transient["workspace"] += min(most, target.workspace)
  room = target.on_chip
  for name in ("temporaries", "gradients", "compute copies"):  # short-lived, and on a TPU's chip
    moved = min(room, transient[name])
    transient[name] -= moved
    room -= moved
  saved = [
    Saved(layer_pattern(o.path), o.source, o.origin.primitive.name, str(b.dtype), b.shape, 1, b.nbytes)
    for b in peak.saved
    if (o := b.maker) is not None
  ]
  parts, slots = argument_parts(arguments)
  parts |= {name: transient[name] for name in TRANSIENT_PARTS if transient[name]}
  rows = tuple(add_up(saved, "count", "nbytes")[:_MOST_SAVED])
  return Memory(parts, slots, rows, total_bytes(peak.saved), sum(parts.values()))


def host_memory(program: Program, arguments: Sequence[Argument]) -> HostMemory | None:
  """Returns what a step keeps in the host's memory, and what it copies; `None` if it uses none."""
  copies = [(made, times) for copy, times in program.each() if copy.part == "host" for made in copy.writes]
  held = sum(a.nbytes for a in arguments if a.on_host)
  if not held and not copies:
    return None
  return HostMemory(
    held,
    to_device=sum(made.whole * times for made, times in copies if not made.on_host),
    to_host=sum(made.whole * times for made, times in copies if made.on_host),
  )


def stored_program(program: Program, kind: str = "gpu", donated: Sequence[Buffer] = ()) -> Program:
  """Returns the operations of a program that store a result, with all that they read from memory.

  Args:
    program: the traced program.
    kind: kind of the platform. A TPU's compiler fuses casts into products, and stores in half precision what
      only products of default precision read.
    donated: arguments whose memory results may take.
  """
  storage = _Storage(program, kind)
  operations = [
    _operation(operation, writes, storage, kind)
    for operation in program.operations
    if (writes := [v for v in operation.writes if v in storage.stored]) or operation.origin.effects
  ]
  given = {*program.arguments, *_in_place(program, donated)}
  return Program(_updates_early(operations), program.results, given)


def _operation(operation: Operation, writes: list[Buffer], storage: _Storage, kind: str) -> Operation:
  reads: dict[Buffer, float] = {}
  most = total_bytes(writes) if operation.origin.primitive in _IN_PARTS else math.inf
  for i, value in enumerate(operation.operands):
    for source, nbytes in storage.sources(value).items():
      read = 0 if is_update(operation) and not i else min(nbytes, most)
      reads[source] = min(source.nbytes, reads.get(source, 0) + read)
  extra = 0
  if is_fp8(operation.origin):  # the quantised operands
    formats = operation.origin.params["spec"].formats
    for value, dtype in zip(operation.operands[:2], formats, strict=True):
      extra += int(value.nbytes * narrow_bits(dtype) / 8 / max(1, value.dtype.itemsize))
  return dataclasses.replace(
    operation,
    reads=reads,
    writes=writes,
    spare=() if is_heavy(operation) and not has(operation.origin, Trait.IN_PLACE) else reads,
    extra=extra,
    bodies=[stored_program(body, kind, body.arguments) for body in operation.bodies],
  )


def _updates_early(operations: list[Operation]) -> list[Operation]:
  """Returns operations in program order, but an update right behind the last that it waits for."""
  ready: dict[Buffer, int] = {}  # places of what the backward pass and updates write
  places = []
  for i, operation in enumerate(operations):
    place = (
      max((ready[b] for b in operation.reads if b in ready), default=i) if operation.phase == OTHER else i
    )
    places.append(place)
    if operation.phase == BACKWARD or place != i:
      ready.update(dict.fromkeys(operation.writes, place))
  return [operations[i] for i in sorted(range(len(operations)), key=places.__getitem__)]


class _Storage:
  """Which values of a graph are stored, and where those are computed from that are not."""

  def __init__(self, program: Program, kind: str):
    self._program = program
    self._reach: dict[Buffer, dict[Buffer, float]] = {}
    self.stored = {*program.arguments, *program.results}
    self._readers: dict[Buffer, list[Operation]] = collections.defaultdict(list)
    stores = lambda o: is_heavy(o) or has(o.origin, Trait.STORES_RESULT)
    # A TPU's product computes an operand itself.
    fuses = lambda o, v: kind == "tpu" and has(o.origin, Trait.PRODUCT) and v.maker and not stores(v.maker)
    for operation in program.operations:
      for value in operation.operands:
        self._readers[value].append(operation)
      if stores(operation):
        self.stored.update(operation.writes)
      if is_heavy(operation):
        self.stored.update(v for v in operation.operands if not fuses(operation, v))
    self._keep_shared()
    if kind == "tpu":
      self._store_read_often()
      self._reach.clear()
      # Products round what they alone read to half precision anyway.
      rounds = lambda o: has(o.origin, Trait.PRODUCT) and o.origin.params.get("precision") is None
      for value, readers in self._readers.items():
        computed = value.maker is not None and value.dtype == np.float32
        if computed and readers and all(map(rounds, readers)):
          value.nbytes //= 2

  def sources(self, value: Buffer) -> dict[Buffer, float]:
    """Returns the value if it is stored, else the stored values that it is computed from, with bytes read."""
    if value in self.stored:
      return {value: value.nbytes}
    if value not in self._reach:
      found: dict[Buffer, float] = {}
      most = math.inf
      if value.maker is not None and value.maker.origin.primitive in _IN_PARTS:
        most = value.nbytes
      for operand in value.maker.operands if value.maker else ():
        for source, nbytes in self.sources(operand).items():
          found[source] = max(found.get(source, 0), min(nbytes, most))
      self._reach[value] = found
    return self._reach[value]

  def _store_read_often(self) -> None:
    """Stores what takes more bytes to compute again for each of its readers."""
    for operation in self._program.operations:
      for value in operation.writes:
        times = len(self._readers[value])
        if times > 1 and value not in self.stored:
          again = sum(self.sources(value).values())
          if times * again > again + (1 + times) * value.nbytes:
            self.stored.add(value)
            self._reach.clear()

  def _keep_shared(self) -> None:
    """Stores what is dearer to recompute: costly operations, and small values computed from large ones."""
    needed_later = {v for o in self._program.operations if o.phase == BACKWARD for v in o.operands}
    for operation in self._program.operations:
      for value in operation.writes:
        if value in self.stored:
          continue
        readers = self._readers[value]
        if has(operation.origin, Trait.COSTLY) and len(readers) > 1:
          self.stored.add(value)
        elif operation.phase != BACKWARD and any(r.phase == BACKWARD for r in readers):
          sources = self.sources(value)
          more = sum(s.nbytes for s in sources if s not in needed_later and s.maker)
          if more > value.nbytes:
            self.stored.add(value)
            self._reach.clear()
          else:
            needed_later.update(sources)


def is_heavy(operation: Operation) -> bool:
  """Returns whether an operation reads its operands from memory, and writes its results to it."""
  return has(operation.origin, Trait.READS_STORED) or bool(operation.bodies) or operation.part == "host"


def is_update(operation: Operation) -> bool:
  """Returns whether an operation writes a part of its first operand, in its place."""
  return has(operation.origin, Trait.IN_PLACE) and bool(operation.operands) and not operation.bodies


def _in_place(program: Program, donated: Sequence[Buffer]) -> Iterator[Buffer]:
  """Yields the results that take the memory of a donated argument of the same shape and dtype."""
  kind = lambda value: (value.shape, value.dtype, value.on_host)
  free = collections.Counter(map(kind, donated))
  for v in dict.fromkeys(program.results):
    if v.maker is not None and free[kind(v)]:
      free[kind(v)] -= 1
      yield v
