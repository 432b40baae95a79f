"""A program as stored buffers and the operations on them, and the folds over it: live bytes and the clock.

`analytic` makes one of a traced step, `compiled` of a compiler's program; everything else reads it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from mpjax.jaxpr import BACKWARD, FORWARD
from mpjax.planner._results import TIME_PARTS, Time


@dataclasses.dataclass(eq=False, slots=True)
class Buffer:
  """An array of a program.

  Attributes:
    shape, dtype: as traced, for all devices together; a compiled program has those on one device.
    nbytes: bytes in one device's main memory, padding included; 0 for one that is elsewhere.
    maker: the operation, in the form of its program, that computes it; `None` for an argument or constant.
    argument: its position among the flat arguments, or `None`.
    weight: the position of the weight that it is a cast, a view, a slice or a layer of; or `None`.
    local: whether the shape is already one device's share (inside a `shard_map`).
    on_host: whether it is in the host's memory.
    whole: `nbytes`, wherever it is.
  """

  shape: tuple[int, ...]
  dtype: Any
  nbytes: int = 0
  maker: Any = None
  argument: int | None = None
  weight: int | None = None
  local: bool = False
  on_host: bool = False
  whole: int = 0


@dataclasses.dataclass(eq=False, slots=True)
class Operation:
  """An operation that reads and writes memory.

  Attributes:
    made: the operation in the form of its program.
    phase: FORWARD or BACKWARD in a derivative, else OTHER.
    reads: the buffers that it reads, with the bytes of each that it reads.
    writes: the buffers that it writes.
    spare: operands whose memory a result of as many bytes may take, if nothing reads them later.
    extra: bytes that it needs while it runs, its bodies apart.
    bodies: what it runs `times` times: a loop's body, or one of a conditional's (`chooses`).
    part: kind of work, by the names of TIME_PARTS; empty for none.
    path: module path.
    seconds: seconds of one run, its bodies apart.
    starts: whether others run meanwhile, until the operation that `awaits` it.
    queue: name of what it occupies until then; those of one queue run one after another.
    awaits: the start that it waits for.
  """

  made: Any
  phase: str = ""
  reads: dict[Buffer, float] = dataclasses.field(default_factory=dict)
  writes: Sequence[Buffer] = ()
  spare: Collection[Buffer] = ()
  extra: int = 0
  bodies: Sequence[Program] = ()
  times: int = 1
  chooses: bool = False
  part: str = ""
  path: str = ""
  seconds: float = 0.0
  starts: bool = False
  queue: str = ""
  awaits: Operation | None = None


@dataclasses.dataclass(eq=False, slots=True)
class Program:
  """Operations in the order in which they run.

  Attributes:
    operations: the operations.
    results: buffers that are live at the end.
    given: buffers that count for the caller: arguments, and results in their memory.
  """

  operations: list[Operation]
  results: list[Buffer]
  given: set[Buffer]


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


class Spent:
  """Seconds by (part, module), and those that other work hides."""

  def __init__(self) -> None:
    self.by_place: collections.defaultdict[tuple[str, str], float] = collections.defaultdict(float)
    self.hidden = 0.0

  @property
  def seconds(self) -> float:
    """Returns the seconds that pass."""
    return sum(self.by_place.values())

  def add(self, other: Spent, times: float = 1) -> None:
    """Adds what something takes that runs `times` times."""
    for place, seconds in other.by_place.items():
      self.by_place[place] += seconds * times
    self.hidden += other.hidden * times

  def time(self, source: str, error: float) -> Time:
    """Returns it as a plan has it."""
    parts: dict[str, float] = dict.fromkeys(TIME_PARTS, 0.0)
    modules: collections.defaultdict[str, float] = collections.defaultdict(float)
    for (part, module), seconds in self.by_place.items():
      parts[part] += seconds
      modules[module] += seconds
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    longest = dict(sorted(modules.items(), key=lambda item: -item[1]))
    return Time(sum(parts.values()), parts, self.hidden, longest, source, error)


def time_of(program: Program, slowed: float = 0.0) -> Spent:
  """Returns what one run of a program takes: its operations one after another, and what runs meanwhile.

  Args:
    program: the program.
    slowed: the share of its hidden seconds by which what runs meanwhile slows the others.
  """
  spent = Spent()
  now = 0.0
  free: collections.defaultdict[str, float] = collections.defaultdict(float)  # when a queue is free again
  ends: dict[Operation, float] = {}
  for operation in program.operations:
    if operation.starts:
      ends[operation] = free[operation.queue] = max(now, free[operation.queue]) + operation.seconds
      continue
    took = Spent()
    if (start := operation.awaits) is not None:
      wait = max(0.0, ends.pop(start) - now)
      took.hidden = max(0.0, start.seconds - wait)
      took.by_place[start.part, start.path] = wait + slowed * took.hidden
    elif operation.seconds:
      took.by_place[operation.part, operation.path] = operation.seconds
    bodies = [time_of(body, slowed) for body in operation.bodies]
    for body in [max(bodies, key=lambda body: body.seconds)] if operation.chooses else bodies:
      took.add(body, operation.times)
    spent.add(took)
    now += took.seconds
  spent.hidden += sum(start.seconds for start in ends)  # what ends in another computation
  return spent
