"""The figures of a plan: memory by part, matrix products, collectives, the time, and a floor for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

from mpjax._render.tables import Renamed

# Parts of memory, in the order of tables and pictures. The first six are the arguments of a step, which stay
# in memory all the time. The others come and go: their bytes are those at the peak.
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
# Kinds of work, in the order of tables and pictures.
TIME_PARTS = (
  "products",
  "convolutions",
  "attention kernels",
  "element-wise",
  "copies",
  "collectives",
  "host",
)
Row = TypeVar("Row", bound=Any)  # a dataclass


class Note(str):
  """A sentence for the reader of a plan.

  Attributes:
    kind: what it is about: `devices`, `weights`, `fp8`, `constants`, `loops`, `gathered`, `install`,
      `failed`, `out of memory`, `program` or `time`.
  """

  kind: str

  def __new__(cls, text: str, kind: str = "") -> Note:
    """Returns a sentence of a kind."""
    note = super().__new__(cls, text)
    note.kind = kind
    return note


@dataclasses.dataclass(frozen=True)
class Saved:
  """An activation that the forward pass leaves for the backward pass.

  Attributes:
    path: modules that make it, such as `GPT/blocks/*/up`.
    source: file and line, such as `model.py:31`.
    operation: the operation that makes it.
    dtype, shape: dtype and shape of one.
    count: number of equal ones (one for each layer, where layers are alike).
    nbytes: bytes of all of them, on one device.
  """

  path: str
  source: str
  operation: str
  dtype: str
  shape: tuple[int, ...]
  count: int
  nbytes: int


@dataclasses.dataclass(frozen=True)
class Memory(Renamed):
  """Bytes on one device.

  Attributes:
    parts: bytes of each part, by the names of ARGUMENT_PARTS and TRANSIENT_PARTS, without empty parts; their
      sum is `peak`.
    optimizer: bytes of optimiser state by slot and dtype, such as `mu float32`.
    saved: activations that the backward pass reads, the largest 20 first; empty for a compiled program.
    saved_bytes: the most bytes of activations for the backward pass at one time, listed or not.
    peak: the most bytes in memory at one time.
  """

  parts: dict[str, int]
  optimizer: dict[str, int]
  saved: tuple[Saved, ...]
  saved_bytes: int
  peak: int


@dataclasses.dataclass(frozen=True)
class Compiled(Renamed):
  """The figures of the target's own compiler; bytes on one device.

  Attributes:
    arguments, outputs, aliases, temporaries: figures of the compiler's memory analysis.
    peak: arguments + outputs - aliases + temporaries: what the step needs.
    memory: the same, divided into parts by the compiler's schedule of the program.
    explained: share of `peak` that the parts account for.
    kernels: FLOPs of matrix products by kernel and operand dtypes, such as `cublas: bf16 x bf16`.
  """

  arguments: int
  outputs: int
  aliases: int
  temporaries: int
  peak: int
  memory: Memory
  explained: float
  kernels: dict[str, int]


@dataclasses.dataclass(frozen=True)
class ProductGroup(Renamed):
  """Equal matrix products (or convolutions, as products), or fused kernels, of one line of the program.

  Fused kernels (Pallas, cuDNN's attention): `dtype` has the floating dtypes of the operands, `batch` is how
  many run, and `flops` is what they state; no other figure counts them.

  Attributes:
    path, source: modules, such as `GPT/blocks/*/up`, and line.
    phase: forward, backward, or empty.
    dtype: the dtype in which the target multiplies.
    shape: M, N, K of one product of the batch.
    padded: the next M, N, K at which the target's matrix units run at full rate; `shape` if that does.
    batch: number of products of that shape in one operation.
    flops: FLOPs of all of them.
    why: what keeps it from the full rate of the matrix units; empty if nothing does.
    passes: number of products in `dtype` that make up one product of float32 operands; 1 for others.
    kernel: the name of a fused kernel; empty for a product.
  """

  path: str
  source: str
  phase: str
  dtype: str
  shape: tuple[int, int, int] = (0, 0, 0)
  padded: tuple[int, int, int] = (0, 0, 0)
  batch: int = 1
  flops: int = 0
  why: str = ""
  passes: int = 1
  kernel: str = ""

  @property
  def eligible(self) -> bool:
    """Whether the product runs on the matrix units at full rate."""
    return not (self.why or self.kernel)

  @property
  def units(self) -> str:
    """The dtype in which the target multiplies, with the passes if there are several: `bfloat16 x3`."""
    return self.dtype if self.passes == 1 else f"{self.dtype} x{self.passes}"


@dataclasses.dataclass(frozen=True)
class Collective:
  """Equal collectives of one step on one device.

  Attributes:
    operation: the compiler's name for it, such as `all-reduce`.
    dtype: dtype of the values that move.
    nbytes: bytes of the results of all of them.
    count: number of collectives.
    sources: modules that they come from, the largest first.
    group: number of devices that exchange with each other; 0 if not known, or if each sends to one other.
  """

  operation: str
  dtype: str
  nbytes: int
  count: int
  sources: tuple[str, ...]
  group: int = 0

  @property
  def sent(self) -> float:
    """The least bytes that a device sends with any algorithm, also if the network adds up an all-reduce."""
    group = self.group or 2
    if self.operation == "reduce-scatter":
      return float(self.nbytes * (group - 1))
    share = 1.0 if self.operation in ("all-reduce", "collective-permute") else (group - 1) / group
    return self.nbytes * (share if group > 1 else 0.0)


def add_up(rows: Iterable[Row], *fields: str) -> list[Row]:
  """Returns rows that differ only in some fields as one, with their sums; the largest by the last first."""
  found: dict[Row, list[Row]] = {}
  for row in rows:
    found.setdefault(dataclasses.replace(row, **dict.fromkeys(fields, 0)), []).append(row)
  total = lambda alike, field: sum(getattr(row, field) for row in alike)
  every = [
    dataclasses.replace(key, **{field: total(alike, field) for field in fields})
    for key, alike in found.items()
  ]
  return sorted(every, key=lambda row: -getattr(row, fields[-1]))


@dataclasses.dataclass(frozen=True)
class HostMemory:
  """What a step keeps in the host's memory, and what crosses to a device and back; bytes of one device.

  Attributes:
    held: bytes of arguments that are there between steps.
    to_device, to_host: bytes that one step copies in each direction.
  """

  held: int
  to_device: int
  to_host: int


@dataclasses.dataclass(frozen=True)
class Floor(Renamed):
  """The shortest time that a step can take at the published peak rates.

  Attributes:
    seconds: the longest of the parts.
    parts: seconds of `matrix units`, `memory` and `interconnect`.
    bound: name of the longest part.
    moved_bytes: the least bytes that the memory must move: state, batch, results, and the activations that
      the target's cache cannot keep.
  """

  seconds: float
  parts: dict[str, float]
  bound: str
  moved_bytes: int


@dataclasses.dataclass(frozen=True)
class Time:
  """An estimate of the time of a step.

  Attributes:
    seconds: seconds of one step, the sum of `parts`.
    parts: seconds by kind of work, by the names of TIME_PARTS, without empty parts. What other work hides is
      left out.
    hidden: seconds of collectives and copies that run at the same time as other work.
    modules: seconds by modules, such as `GPT/blocks/*/up`, the longest first.
    source: where the figure is from: `compiler's cycles`, `roofline of the compiled program` or `roofline of
      the traced program`.
    error: the relative error to expect, from the table of predicted and published rates in
      `benchmarks/README.md`.
  """

  seconds: float
  parts: dict[str, float]
  hidden: float
  modules: dict[str, float]
  source: str
  error: float

  @property
  def longest(self) -> str:
    """The kind of work that takes the most time; empty for no time."""
    return max(self.parts, key=lambda name: self.parts[name], default="")
