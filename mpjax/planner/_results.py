"""A plan as data: memory by part, matrix products, collectives, and a floor for the time."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

# Parts of memory, in the order in which tables and pictures have them. The first six are the arguments of a
# step, which are there all the time; the others come and go, and are those of the worst moment.
ARGUMENT_PARTS = ("master weights", "model state", "optimizer state", "FP8 state", "other state", "batch")
TRANSIENT_PARTS = (
  "compute copies",
  "gradients",
  "activations",
  "workspace",
  "temporaries",
  "outputs",
  "allocator",
)
_MOST_SOURCES = 3


@dataclasses.dataclass(frozen=True)
class Saved:
  """An activation that the forward pass leaves for the backward pass.

  Attributes:
    path: modules that make it, `GPT/blocks/*/up`.
    source: file and line, `model.py:31`.
    operation: that makes it.
    dtype, shape: of one.
    count: how many such there are (one a layer, where layers are alike).
    nbytes: of all of them, on one device.
  """

  path: str
  source: str
  operation: str
  dtype: str
  shape: tuple[int, ...]
  count: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes on one device.

  Attributes:
    parts: by the names of ARGUMENT_PARTS and TRANSIENT_PARTS (those that there are); their sum is `peak`.
    optimizer: optimiser state by slot and dtype, `mu float32`.
    saved: activations that the backward pass reads, the largest first.
    saved_bytes: sum of all of those, also the ones that are not listed, at the moment when it is most.
    peak: the most that is in memory at one time.
    training_state: what weights, their copies in the compute dtype, gradients and optimiser state would take
      if all of each were there at once, by those names: the figure that rules of thumb give (16 bytes a
      parameter with Adam in float32, ZeRO, section 3.1). Of the analytic plan alone; empty of the compiler's.
    gathered: parameters that are gathered over `fsdp` and there at once. Of the analytic plan alone.
  """

  parts: dict[str, int]
  optimizer: dict[str, int]
  saved: tuple[Saved, ...]
  saved_bytes: int
  peak: int
  training_state: dict[str, int] = dataclasses.field(default_factory=dict)
  gathered: int = 0


@dataclasses.dataclass(frozen=True)
class Compiled:
  """The figures of the target's own compiler; bytes on one device.

  Attributes:
    arguments, outputs, aliases, temporaries: of its memory analysis.
    peak: arguments + outputs - aliases + temporaries: what the step needs.
    memory: the same, divided into parts by its own schedule of the program.
    explained: share of `peak` that the parts account for.
    difference: sentences that say why `peak` is not the analytic one.
    kernels: FLOPs of matrix products by kernel and dtypes of the operands, `cublas: bf16 x bf16`.
    seconds: that it took to compile.
  """

  arguments: int
  outputs: int
  aliases: int
  temporaries: int
  peak: int
  memory: Memory
  explained: float
  difference: tuple[str, ...]
  kernels: dict[str, int]
  seconds: float


@dataclasses.dataclass(frozen=True)
class ProductGroup:
  """Matrix products (or convolutions, as products) of one line of the program that are alike.

  Attributes:
    path, source: modules, `GPT/blocks/*/up`, and line.
    phase: forward, backward, or empty.
    operation: primitive.
    dtype: in which it multiplies.
    shape: M, N, K of one product of the batch.
    padded: the next M, N, K at which the target's matrix units run at full rate; equal to `shape` if it is.
    batch: how many products of that shape in one.
    flops: of all of them.
    eligible: whether it runs on the matrix units at full rate.
    why: what keeps it from that; empty if it is eligible.
  """

  path: str
  source: str
  phase: str
  operation: str
  dtype: str
  shape: tuple[int, int, int]
  padded: tuple[int, int, int]
  batch: int
  flops: int
  eligible: bool
  why: str


@dataclasses.dataclass(frozen=True)
class KernelGroup:
  """Fused kernels (Pallas, cuDNN's attention) of one line of the program that are alike.

  Attributes:
    path, source: modules, `GPT/blocks/*`, and line.
    phase: forward, backward, or empty.
    name: as the program names it.
    operands: the floating dtypes of its operands.
    count: how many run.
    flops: that all of them state; 0 if they state none. No other figure counts them.
  """

  path: str
  source: str
  phase: str
  name: str
  operands: tuple[str, ...]
  count: int
  flops: int


@dataclasses.dataclass(frozen=True)
class Collective:
  """Collectives that are alike, of one step on one device.

  Attributes:
    operation: as the compiler names it, `all-reduce`.
    dtype: of what moves.
    nbytes: of the results of all of them.
    count: how many.
    sources: modules that they come from, the largest first.
    group: how many devices exchange with each other; 0 where that is not known, or each has one to send to.
  """

  operation: str
  dtype: str
  nbytes: int
  count: int
  sources: tuple[str, ...]
  group: int = 0

  @property
  def sent(self) -> float:
    """The least bytes that a device sends, by any algorithm, and where the network adds up an all-reduce."""
    group = self.group or 2
    if self.operation == "reduce-scatter":
      return float(self.nbytes * (group - 1))
    share = 1.0 if self.operation in ("all-reduce", "collective-permute") else (group - 1) / group
    return self.nbytes * (share if group > 1 else 0.0)


class Crossing(NamedTuple):
  """A collective that runs so many times; the attributes are those of `Collective`, of one."""

  operation: str
  dtype: str
  nbytes: int
  group: int
  source: str
  times: int


def add_up(crossings: Iterable[Crossing]) -> tuple[Collective, ...]:
  """Returns the collectives of a step, those that are alike as one, the largest first."""
  rows: dict[tuple[str, str, int], list[Crossing]] = {}
  for crossing in crossings:
    rows.setdefault((crossing.operation, crossing.dtype, crossing.group), []).append(crossing)
  found = []
  for (operation, dtype, group), alike in rows.items():
    sources: Counter[str] = Counter()
    for crossing in alike:
      sources[crossing.source] += crossing.nbytes * crossing.times
    count = sum(crossing.times for crossing in alike)
    named = tuple(source for source, _ in sources.most_common(_MOST_SOURCES) if source)
    found.append(Collective(operation, dtype, sources.total(), count, named, group))
  return tuple(sorted(found, key=lambda collective: -collective.nbytes))


@dataclasses.dataclass(frozen=True)
class Floor:
  """The shortest time that a step can take at the published peaks: no step is faster.

  Attributes:
    seconds: the longest of the parts.
    parts: `matrix units`, `memory`, `interconnect`: seconds of each.
    bound: the part that is longest.
    moved_bytes: bytes that memory must move at the least: those that a cache of the target cannot keep.
    touched_bytes: bytes that the step reads and writes, the cache's among them.
    cache: bytes of that cache: an L2 on a GPU, the memory on the chip of a TPU.
  """

  seconds: float
  parts: dict[str, float]
  bound: str
  moved_bytes: int
  touched_bytes: int = 0
  cache: int = 0


@dataclasses.dataclass(frozen=True)
class PlanFigures:
  """The cost of one step on one target, as data.

  Attributes:
    label: what it is called in a comparison; a policy's name.
    target: name of the target.
    device: what that is, in words.
    devices: how many devices the step runs on; all bytes and FLOPs are of one.
    device_memory: bytes that one has, 0 where that is not known.
    parameters: number of trained parameters.
    memory: the analytic plan.
    compiled: the compiler's, or `None`.
    inference: bytes of the weights in the compute dtype.
    checkpoint: bytes of what a checkpoint of the state holds, unpadded and once for all devices.
    products: the matrix products, the most FLOPs first.
    collectives: what crosses devices, from the compiled program; without one, what the step states itself,
      which a step of `mpjax.make_train_step` with a mesh does of all but a `tensor` axis.
    floor: for the time, or `None` where the target has no published peaks.
    notes: sentences for whoever reads the plan.
    subject: what the step trains, in words; empty if that is not known.
    usable_memory: bytes of a device that JAX takes; 0 for all of them.
    fused: its kernels, the most FLOPs first.
  """

  label: str
  target: str
  device: str
  devices: int
  device_memory: int
  parameters: int
  memory: Memory
  compiled: Compiled | None
  inference: int
  checkpoint: int
  products: tuple[ProductGroup, ...]
  collectives: tuple[Collective, ...]
  floor: Floor | None
  notes: tuple[str, ...]
  subject: str = ""
  usable_memory: int = 0
  fused: tuple[KernelGroup, ...] = ()

  @property
  def room(self) -> int:
    """Bytes that the step has to fit in: what JAX takes of a device's memory; 0 where that is not known."""
    return self.usable_memory or self.device_memory

  @property
  def peak(self) -> int:
    """Bytes that the step needs: the compiler's figure where there is one."""
    return self.compiled.peak if self.compiled else self.memory.peak

  def bytes_per_parameter(self, *parts: str) -> float:
    """Returns analytic bytes per parameter of some parts, all if none is named."""
    chosen = parts or tuple(self.memory.parts)
    return sum(self.memory.parts.get(part, 0) for part in chosen) / max(1, self.parameters)

  def matrix_flops(self) -> dict[str, int]:
    """FLOPs of matrix products by dtype, the most first."""
    total: dict[str, int] = {}
    for product in self.products:
      total[product.dtype] = total.get(product.dtype, 0) + product.flops
    return dict(sorted(total.items(), key=lambda item: -item[1]))

  @property
  def eligible(self) -> float:
    """Share of the matrix FLOPs that run on matrix units at full rate."""
    whole = sum(product.flops for product in self.products)
    return sum(product.flops for product in self.products if product.eligible) / whole if whole else 1.0

  def to_dict(self) -> dict[str, Any]:
    """Returns plain data for JSON."""
    derived = {"peak": self.peak, "matrix_flops": self.matrix_flops(), "eligible": self.eligible}
    return dataclasses.asdict(self) | derived
