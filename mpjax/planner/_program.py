"""A program as buffers and operations on them: what `from_jaxpr` and `from_hlo` make, and folds."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from mpjax.jaxpr import BACKWARD, FORWARD
from mpjax.planner._arguments import Argument
from mpjax.planner._results import Collective, Note, add_up

_MOST_SOURCES = 3


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
  """An array of a program.

  Attributes:
    shape, dtype: as traced, for all devices together; a compiled program has those on one device.
    nbytes: bytes in one device's main memory, padding included; 0 for one that is elsewhere.
    maker: the operation that computes it; `None` for an argument or constant.
    argument: the leaf of the step's arguments that it is, or `None`.
    weight: the weight that it is, or a cast, a view or a layer of; or `None`.
    part: the part of memory that it belongs to whoever reads it; empty if that decides.
    on_host: whether it is in the host's memory.
    whole: `nbytes`, wherever it is.
  """

  shape: tuple[int, ...]
  dtype: Any
  nbytes: int = 0
  maker: Operation | None = None
  argument: Argument | None = None
  weight: Argument | None = None
  part: str = ""
  on_host: bool = False
  whole: int = 0


class Product(NamedTuple):
  """Matrix products of one operation, a convolution as a product, or a fused kernel.

  Attributes:
    dtype: NumPy's name of the dtype in which the units multiply, or `tensorfloat32`.
    shape: M, N, K as the units multiply, for a compiled convolution with its padding; zeros for a fused
      kernel.
    batch: number of products.
    flops: FLOPs of all of them on one device, without padding.
    convolution: whether the traced program has it as a convolution.
    passes: number of products in `dtype` that make up one of float32 operands.
    kernel: `fused` for a fused kernel. In a compiled program, what computes it: `cublas`, `triton`, `cudnn`,
      `loop` for a product that is not a GEMM, `dot` on a TPU or CPU.
    operands: HLO's names of its operands' dtypes.
  """

  dtype: str
  shape: tuple[int, int, int]
  batch: int
  flops: float
  convolution: bool = False
  passes: int = 1
  kernel: str = ""
  operands: tuple[str, ...] = ()


def fused_kernel(flops: float, is_narrow: bool) -> Product:
  """Returns a fused kernel of so many FLOPs on a device; a narrow one has operands in FP8."""
  return Product("float8_e4m3fn" if is_narrow else "bfloat16", (0, 0, 0), 1, flops, kernel="fused")


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
  """An operation that reads and writes memory.

  Attributes:
    origin: the equation or the instruction.
    phase: FORWARD or BACKWARD in a derivative, else OTHER.
    path, source: modules, such as `GPT/blocks/0/up`, and line, such as `model.py:31`.
    operands: what it reads, in order; literals are left out.
    reads: the stored buffers that it reads, with the bytes of each that it reads.
    writes: the buffers that it writes.
    spare: operands whose memory a result of as many bytes may take, if nothing reads them later.
    extra: bytes that it needs while it runs, its bodies apart.
    bodies: what it runs: a loop's body, or one of a conditional's (`chooses`).
    times: how often its bodies run; `None` if the program does not say it.
    devices: number of devices that divide the work of its shapes.
    part: kind of work, by the names of TIME_PARTS; empty for none.
    products: its matrix products, or a fused kernel.
    collectives: what crosses devices in one run, a row for each result.
    members: numbers of the devices that exchange with each other.
    moved: bytes of the device's memory that it reads and writes, or that cross to the host or back.
    cycles: cycles that a TPU's compiler expects.
    queue: what it occupies while others run, until the operation that `awaits` it; empty if it ends at once.
      Operations of one queue run one after another.
    awaits: the start that it waits for.
  """

  origin: Any
  phase: str = ""
  path: str = ""
  source: str = ""
  operands: Sequence[Buffer] = ()
  reads: dict[Buffer, float] = dataclasses.field(default_factory=dict)
  writes: Sequence[Buffer] = ()
  spare: Collection[Buffer] = ()
  extra: int = 0
  bodies: Sequence[Program] = ()
  times: int | None = 1
  chooses: bool = False
  devices: int = 1
  part: str = ""
  products: Sequence[Product] = ()
  collectives: Sequence[Collective] = ()
  members: Sequence[int] = ()
  moved: float = 0.0
  cycles: int | None = None
  queue: str = ""
  awaits: Operation | None = None

  @property
  def flops(self) -> float:
    """FLOPs of one run on one device, as products and kernels state them."""
    return sum(product.flops for product in self.products)

  @property
  def sent(self) -> float:
    """The least bytes that a device sends in one run."""
    return sum(collective.sent for collective in self.collectives)


@dataclasses.dataclass(eq=False, slots=True)
class Program:
  """Operations in the order in which they run.

  Attributes:
    operations: the operations.
    results: buffers that are live at the end.
    given: buffers that count for the caller: arguments, and results in their memory.
    arguments: the arguments, in order.
  """

  operations: list[Operation]
  results: list[Buffer]
  given: set[Buffer] = dataclasses.field(default_factory=set)
  arguments: list[Buffer] = dataclasses.field(default_factory=list)

  def each(
    self, times: int = 1, worth: Callable[[Operation], float] = lambda operation: operation.flops
  ) -> Iterator[tuple[Operation, int]]:
    """Yields all operations, also those in loops, with the number of times that each runs.

    Args:
      times: how often the program runs.
      worth: the measure of an operation; a conditional runs the branch with the most of it.
    """
    measure = lambda body: sum(worth(o) * n for o, n in body.each(worth=worth))
    for operation in self.operations:
      yield operation, times
      for body in [max(operation.bodies, key=measure)] if operation.chooses else operation.bodies:
        yield from body.each(times * (operation.times or 1), worth)


class Peak(NamedTuple):
  """The moment when a program stores the most bytes.

  Attributes:
    nbytes: bytes that are stored then, without what is given.
    live: buffers that are stored then, also inside the loop or branch that runs then.
    saved: buffers of the forward pass that the backward pass reads, at the moment of their most bytes.
  """

  nbytes: int
  live: list[Buffer]
  saved: list[Buffer]


def total_bytes(buffers: Collection[Buffer]) -> int:
  """Returns the bytes of some buffers."""
  return sum(buffer.nbytes for buffer in buffers)


def by_part(buffers: Collection[Buffer], kept: Collection[Buffer]) -> collections.Counter[str]:
  """Returns the bytes of buffers by part of memory; `kept` waits for the backward pass."""
  parts: collections.Counter[str] = collections.Counter()
  for b in buffers:
    parts[b.part or ("activations" if b in kept else "temporaries")] += b.nbytes
  return parts


def read_backward(program: Program) -> set[Buffer]:
  """Returns what the forward pass computes and the backward pass reads, also in loops and branches.

  Gathered weights are left out.
  """
  forward = [operation for operation in program.operations if operation.phase == FORWARD]
  made = {b for operation in forward for b in operation.writes if b.maker is not None}
  read = {b for operation in program.operations if operation.phase == BACKWARD for b in operation.reads}
  inner = (read_backward(body) for operation in program.operations for body in operation.bodies)
  return (made & read).union(*inner)


def live_at_peak(program: Program) -> Peak:
  """Steps through a program, stores and frees buffers, and returns the moment of the most bytes."""
  last = {b: i for i, o in enumerate(program.operations) for b in (*o.reads, *o.writes)}
  last |= dict.fromkeys(program.results, len(program.operations))
  kept = read_backward(program)
  live: dict[Buffer, None] = {}
  total = kept_now = most = most_kept = 0
  worst: list[Buffer] = []
  saved: list[Buffer] = []
  for i, operation in enumerate(program.operations):
    dying = [b for b in operation.reads if last[b] == i and b in live]
    for b in operation.writes:
      if b not in program.given and b not in live:
        live[b] = None
        total += b.nbytes
        kept_now += b.nbytes * (b in kept)
    taken: dict[Buffer, None] = {}
    for b in operation.writes:
      same = (s for s in dying if s.nbytes == b.nbytes and s in operation.spare and s not in taken)
      taken |= dict.fromkeys(itertools.islice(same, 1))
    inner = max(map(live_at_peak, operation.bodies), key=lambda peak: peak.nbytes, default=Peak(0, [], []))
    now = total - total_bytes(taken) + operation.extra + inner.nbytes
    if now > most:
      most, worst = now, [*(b for b in live if b not in taken), *inner.live]
    for found in ([b for b in live if b in kept] if kept_now > most_kept else [], inner.saved):
      if (nbytes := total_bytes(found)) > most_kept:
        most_kept, saved = nbytes, found
    for b in (*dying, *(b for b in operation.writes if last[b] == i)):
      if b in live:
        del live[b]
        total -= b.nbytes
        kept_now -= b.nbytes * (b in kept)
  return Peak(most, worst, saved)


def collectives_of(program: Program) -> tuple[Collective, ...]:
  """Returns the program's collectives in one step: the bytes of the results on each device."""
  rows = [
    dataclasses.replace(one, nbytes=one.nbytes * times, count=times)
    for operation, times in program.each(worth=lambda operation: operation.sent)
    for one in operation.collectives
  ]
  of_sources = add_up(rows, "count", "nbytes")
  found = []
  for row in add_up([dataclasses.replace(row, sources=()) for row in rows], "count", "nbytes"):
    same = (r for r in of_sources if (r.operation, r.dtype, r.group) == (row.operation, row.dtype, row.group))
    sources = [source for r in same for source in r.sources if source]
    found.append(dataclasses.replace(row, sources=tuple(sources[:_MOST_SOURCES])))
  return tuple(found)


def loops_of(program: Program, whose: str) -> tuple[Note, ...]:
  """Returns a sentence on the loops of unknown length in a program; none without them."""
  loops = [operation for operation, _ in program.each() if operation.times is None]
  if not loops:
    return ()
  where = f", the first at {loops[0].source}" if loops[0].source else ""
  text = f"{whose} does not say how often {len(loops)} of its loops run{where}: what they do counts once"
  return (Note(text, "loops"),)
