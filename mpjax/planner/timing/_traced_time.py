"""The time of a step from its traced program alone: a roofline of the kernels that a compiler makes of it.

What is stored is read and written, by the rule of the analytic plan of memory; what is not stored is computed
where it is read, at no cost. Element-wise operations on the same values are one kernel. On a TPU they belong
to the product before them, and the memory on the chip holds what is read soon.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence

import jax

from mpjax.formats import narrow_bits, padded
from mpjax.jaxpr import CallKind, Trait, call_kind, facts, has, layer_pattern
from mpjax.planner._arguments import Argument
from mpjax.planner._results import Time
from mpjax.planner._targets import Target
from mpjax.planner.analytic import Graph
from mpjax.planner.analytic._graph import GraphOperation, GraphValue, merged
from mpjax.planner.analytic._liveness import Storage, Traits, is_heavy, is_reduction, is_view, traits_of
from mpjax.planner.analytic._memory import DeviceSizes, device_sizes
from mpjax.planner.analytic._products import product_sizes, units_of
from mpjax.planner.timing._compiled_time import Spent
from mpjax.planner.timing._kernels import traced_flops
from mpjax.planner.timing._rates import (
  collective_seconds,
  efficiency,
  host_seconds,
  kernel_seconds,
  product_seconds,
)
from mpjax.products import is_fp8

_SOURCE = "roofline of the traced program"
_ERROR = 0.5
_SLICES = (jax.lax.slice_p, jax.lax.dynamic_slice_p)
_HIDDEN = 0.15  # of the collectives, as in compiled steps that gather their parameters at the start


def traced_time(
  graph: Graph, arguments: Sequence[Argument], donated: Sequence[bool], target: Target, devices: int
) -> Time | None:
  """Returns the time of a step, or `None` if the target has no published rates.

  Args:
    graph: graph of the step.
    arguments: the leaves of its arguments.
    donated: for each leaf, whether the results may take its memory.
    target: its target.
    devices: number of devices that share the work.
  """
  if target.kind == "cpu" or not target.flops or not target.bandwidth:
    return None
  sizes = device_sizes(arguments, target.kind)
  program = merged(graph, through_regions=traits_of(target.kind).merges_through_barriers)
  walk = _Walk(target, devices, sizes)
  spent = walk.run(program)
  for value, path in _copied(program, walk.traits, donated):
    spent.by_place["copies", layer_pattern(path)] += kernel_seconds(target, 0, 2 * sizes.of(value))
  _hide(spent)
  return spent.time(_SOURCE, _ERROR)


def _copied(graph: Graph, traits: Traits, donated: Sequence[bool]) -> Iterator[tuple[GraphValue, str]]:
  """Yields what is copied with its module: results that are views of arguments, and arguments to update."""
  storage = Storage(graph, traits)
  for value in {id(result): result for result in graph.results}.values():
    if value.maker is not None and storage.root(value).argument is not None:
      yield value, value.maker.path
  for operation in graph.operations:
    if has(operation.equation, Trait.IN_PLACE) and operation.operands and not operation.bodies:
      whole = storage.root(operation.operands[0])
      if whole.argument is not None and not donated[whole.argument]:
        yield whole, operation.path


def _hide(spent: Spent) -> None:
  """Hides a share of the collectives behind other work."""
  for place, seconds in spent.by_place.items():
    if place[0] == "collectives":
      spent.by_place[place] = seconds * (1 - _HIDDEN)
      spent.hidden += seconds * _HIDDEN


@dataclasses.dataclass(eq=False)
class _Kernel:
  """Operations that run as one.

  Attributes:
    operation: the one that names it.
    reads: bytes read of each value, by identity.
    writes: bytes written of each value.
    busy: seconds of its products, of its collective, or of its transfer to or from the host.
    part: kind of work, by the names of TIME_PARTS.
  """

  operation: GraphOperation
  reads: dict[int, float]
  writes: dict[int, float]
  busy: float = 0.0
  part: str = "element-wise"


class _OnChip:
  """The values that are in the memory on a TPU's chip, which the compiler fills; none on a GPU.

  They do not go to the device's memory at all if they are read before others take their place.
  """

  def __init__(self, target: Target, body: _Body):
    self._room = target.on_chip / 2
    self._held: collections.OrderedDict[int, float] = collections.OrderedDict()
    self._last = body.last_reads

  def moved(self, kernel: _Kernel) -> float:
    """Returns the bytes that a kernel moves to and from the device's memory."""
    moved = sum(nbytes for key, nbytes in kernel.reads.items() if key not in self._held)
    for key in kernel.reads:
      if self._last.get(key) is kernel:
        self._held.pop(key, None)
    for key, nbytes in kernel.writes.items():
      if key in self._last:
        self._held[key] = nbytes
      else:  # a result, or what a loop reads
        moved += nbytes
    while sum(self._held.values()) > self._room:
      moved += self._held.popitem(last=False)[1]
    return moved


class _Walk:
  """The seconds of graphs on a target, with the bytes of values on one of its devices."""

  def __init__(self, target: Target, devices: int, sizes: DeviceSizes):
    self._target = target
    self._devices = devices
    self._sizes = sizes
    self.whole_size = sizes.of
    self.traits = traits_of(target.kind)
    if target.kind == "gpu":  # the exponentials of a softmax are computed again
      self.traits = dataclasses.replace(self.traits, keeps_expensive=False)
    self.fuses_into_products = target.kind == "tpu"

  def run(self, graph: Graph) -> Spent:
    """Returns what one run of a graph takes."""
    spent = Spent()
    body = _Body(graph, self)
    on_chip = _OnChip(self._target, body)
    for item in body.kernels:
      if isinstance(item, GraphOperation):
        spent.add(self._call(item))
        continue
      place = item.part, layer_pattern(item.operation.path)
      if item.part in ("collectives", "host"):
        spent.by_place[place] += item.busy
        continue
      spent.by_place[place] += kernel_seconds(self._target, item.busy, on_chip.moved(item))
    return spent

  def _call(self, operation: GraphOperation) -> Spent:
    spent = Spent()
    bodies = [self.run(body) for body in operation.bodies]
    if call_kind(operation.equation) is CallKind.COND:
      spent.add(max(bodies, key=lambda body: body.seconds))
      return spent
    for body in bodies:
      spent.add(body, operation.times)
    return spent

  def size(self, value: GraphValue, storage: Storage) -> float:
    """Returns the bytes of a stored value on a device."""
    half = self.traits.half_operands and storage.only_multiplied(value)
    return self.whole_size(value) / (2 if half else 1)

  def busy(self, operation: GraphOperation) -> tuple[str, float]:
    """Returns the part of an operation, and the seconds of its FLOPs or of its collective."""
    equation, target = operation.equation, self._target
    share = operation.divided if operation.local else self._devices
    if operation.crosses:
      return "host", host_seconds(target, sum(map(self._sizes.whole, operation.results)))
    if name := facts(equation).collective:
      nbytes = sum(map(self.whole_size, operation.results))
      return "collectives", collective_seconds(target, name, nbytes, range(operation.group))
    if has(equation, Trait.KERNEL):
      narrow = any(narrow_bits(getattr(value.dtype, "name", "")) for value in operation.operands)
      _, rate = target.unit_rate("float8_e4m3fn" if narrow else "bfloat16")
      return "attention kernels", traced_flops(equation) / share / (rate * efficiency(target, "kernels"))
    if not operation.flops:
      return ("copies" if has(equation, Trait.MOVES) else "element-wise"), 0.0
    dtype, passes = units_of(operation, target)
    sizes = product_sizes(operation)
    batch = max(1, round(operation.flops / max(1, 2 * math.prod(sizes))))
    if target.kind == "tpu":
      sizes = padded(target.matrix_units, dtype, *sizes)
    convolution = "lhs_dilation" in equation.params
    seconds = passes * product_seconds(target, dtype, sizes, batch, convolution=convolution) / share
    return ("convolutions" if convolution else "products"), seconds

  def quantised_bytes(self, operation: GraphOperation) -> float:
    """Returns the bytes that move while the operands of an FP8 product are quantised."""
    spec = operation.equation.params["spec"]
    nbytes = 0.0
    for value, dtype, given in zip(
      operation.operands[:2], (spec.lhs_dtype, spec.rhs_dtype), spec.given[:2], strict=True
    ):
      passes = 1 if given or spec.in_blocks else 2  # the largest value, then the codes
      nbytes += self.whole_size(value) * (passes + narrow_bits(dtype) / 8 / max(1, value.dtype.itemsize))
    return nbytes


class _Body:
  """The kernels of one graph, in program order; a loop or conditional stands for itself.

  The level of a value is the most products, reductions and the like that it depends on one after another.
  Element-wise operations of one level may be one kernel.

  Attributes:
    kernels: the kernels.
    last_reads: the last kernel that reads each value, by identity, of those that stay inside the graph.
  """

  def __init__(self, graph: Graph, walk: _Walk):
    self._walk = walk
    self._storage = Storage(graph, walk.traits)
    self._level: dict[int, int] = {}
    self._open: dict[tuple[int, int], list[_Kernel]] = {}
    self.kernels: list[_Kernel | GraphOperation] = []
    for operation in graph.operations:
      if not is_view(operation):
        self._store_shared(operation)
    for operation in graph.operations:
      if not is_view(operation):
        self._add(operation)
    if walk.fuses_into_products:
      self._fuse_into_products()
    self.last_reads = self._last_reads(graph)

  def _store_shared(self, operation: GraphOperation) -> None:
    """Stores what it takes longer to compute again for each of its readers."""
    reads: dict[int, float] | None = None
    for value in operation.results:
      times = len(self._storage.readers(value))
      if times < 2 or self._storage.is_stored(value):
        continue
      own = self._walk.whole_size(value)
      if reads is None:
        reads = self._reads(operation)
      again = sum(reads.values())
      if times * again > again + (1 + times) * own:
        self._storage.store(value)

  def _readers(self) -> dict[int, list[_Kernel | GraphOperation]]:
    """Returns what reads each value, in program order."""
    found: dict[int, list[_Kernel | GraphOperation]] = collections.defaultdict(list)
    for kernel in self.kernels:
      if isinstance(kernel, _Kernel):
        keys = {*kernel.reads}
      else:
        keys = {id(self._storage.root(value)) for value in kernel.operands}
      for key in keys:
        found[key].append(kernel)
    return found

  def _last_reads(self, graph: Graph) -> dict[int, _Kernel]:
    """Returns the last kernel that reads each value, of those that only kernels read."""
    kept = {id(self._storage.root(value)) for value in graph.results}
    return {
      key: readers[-1]
      for key, readers in self._readers().items()
      if key not in kept and isinstance(readers[-1], _Kernel)
    }

  def _fuse_into_products(self) -> None:
    """Moves element-wise kernels into the product whose result only they read."""
    maker = {key: k for k in self.kernels if isinstance(k, _Kernel) and k.busy for key in k.writes}
    readers = self._readers()
    for kernel in list(self.kernels):
      if isinstance(kernel, GraphOperation) or kernel.part != "element-wise" or kernel.busy:
        continue
      product = next((maker[key] for key in kernel.reads if key in maker and readers[key] == [kernel]), None)
      if product is None or product.part == "attention kernels":
        continue
      self.kernels.remove(kernel)
      reads = {key: nbytes for key, nbytes in kernel.reads.items() if key not in product.writes}
      for key in reads:
        readers[key][readers[key].index(kernel)] = product
      product.reads |= reads
      made = [key for key in product.writes if key in kernel.reads and readers[key] == [kernel]]
      for key in made:
        del product.writes[key]
      product.writes |= kernel.writes

  def _add(self, operation: GraphOperation) -> None:
    storage, size = self._storage, self._walk.size
    written = [v for v in operation.results if storage.is_stored(v)]
    if not written and not operation.equation.effects:
      return
    reads = self._reads(operation)
    writes = {id(v): size(v, storage) for v in written}
    level = max((self._level.get(key, 0) for key in reads), default=0)
    heavy = is_heavy(operation)
    if operation.bodies:
      self.kernels.append(operation)
    elif heavy:
      kernel = _Kernel(operation, reads, writes)
      kernel.part, kernel.busy = self._walk.busy(operation)
      self._in_part(operation, kernel)
      if is_fp8(operation.equation):
        self.kernels.append(_Kernel(operation, {-id(operation): self._walk.quantised_bytes(operation)}, {}))
      self.kernels.append(kernel)
    else:
      self._join(operation, reads, writes, level)
    after = level + (heavy or is_reduction(operation))
    self._level.update((id(value), after) for value in written)

  def _join(
    self, operation: GraphOperation, reads: dict[int, float], writes: dict[int, float], level: int
  ) -> None:
    """Adds an element-wise operation or a reduction to the kernel that works on the same values."""
    elements = max((math.prod(v.shape) for v in (*operation.operands, *operation.results)), default=0)
    most = max((*reads.values(), *writes.values()), default=0)
    large = {key for key, nbytes in (reads | writes).items() if 4 * nbytes >= most}
    kernels = self._open.setdefault((level, elements), [])
    kernel = next((k for k in kernels if not large.isdisjoint(k.reads | k.writes)), None)
    if kernel is None:
      kernel = _Kernel(operation, {}, {})
      kernels.append(kernel)
      self.kernels.append(kernel)
    kernel.reads |= {key: nbytes for key, nbytes in reads.items() if key not in kernel.writes}
    kernel.writes |= writes

  def _in_part(self, operation: GraphOperation, kernel: _Kernel) -> None:
    """Corrects the bytes of an operation that reads or writes a part of a value."""
    if operation.equation.primitive is jax.lax.gather_p:
      kernel.reads = {key: min(n, sum(kernel.writes.values())) for key, n in kernel.reads.items()}
    elif has(operation.equation, Trait.IN_PLACE) and len(operation.operands) > 1:
      whole = self._storage.root(operation.operands[0])
      others = {k: n for k, n in kernel.reads.items() if k != id(whole)}
      update = sum(others.values())
      made = 0 if self._storage.is_stored(whole) else sum(kernel.writes.values())
      kernel.reads, kernel.writes = others, dict.fromkeys(kernel.writes, update + made)

  def _reads(self, operation: GraphOperation) -> dict[int, float]:
    """Returns the bytes that an operation reads of each stored value, also through those that are not."""
    storage, size = self._storage, self._walk.size
    found: dict[int, float] = collections.defaultdict(float)
    most: dict[int, float] = {}
    seen: set[int] = set()
    waiting: list[tuple[GraphValue, float]] = [(storage.root(v), math.inf) for v in operation.operands]
    while waiting:
      value, part = waiting.pop()
      if id(value) in seen:
        continue
      if storage.is_stored(value):
        most[id(value)] = size(value, storage)
        found[id(value)] += min(part, most[id(value)])
        if part == math.inf:
          seen.add(id(value))
        continue
      seen.add(id(value))
      maker = value.maker
      if maker is None:
        continue
      if maker.equation.primitive in _SLICES:
        part = min(part, self._walk.whole_size(value))
      waiting += [(storage.root(v), part) for v in maker.operands]
    return {key: min(nbytes, most[key]) for key, nbytes in found.items()}
