"""Live values of a program: which are stored, for how long, and how many bytes at the peak.

A small model of XLA. The result of an elementwise operation is computed where it is read; it is stored only
if a matrix product, a loop or the caller needs it in memory. Every value is freed after its last read.
Operations run in an order that keeps few bytes live.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import jax

from mpjax import _compat
from mpjax.formats import narrow_bits
from mpjax.jaxpr import BACKWARD, FORWARD, Trait, has
from mpjax.planner.analytic._divided_weights import NOT_DIVIDED, DividedWeights
from mpjax.planner.analytic._graph import Graph, GraphOperation, GraphValue
from mpjax.planner.analytic._schedule import Peak, StoredOperation, delayed, greedy
from mpjax.products import is_fp8


@dataclasses.dataclass(frozen=True)
class Traits:
  """How a platform's compiler differs from the model.

  Attributes:
    casts_into_products: a cast is fused into the product that reads it; no copy is stored.
    half_as_float32: values that are traced in half precision are computed and kept in float32.
    merges_through_barriers: what a rematerialised region should recompute is computed only once.
    half_operands: float32 values that only products of default precision read are stored in half precision.
    keeps_residuals: a value for the backward pass is stored itself, not a value from which it is cheap to
      compute.
    keeps_expensive: the result of a costly elementwise operation is stored if several operations read it.
  """

  casts_into_products: bool = False
  half_as_float32: bool = False
  merges_through_barriers: bool = False
  half_operands: bool = False
  keeps_residuals: bool = False
  keeps_expensive: bool = True


_TRAITS = {
  "cpu": Traits(keeps_residuals=True),
  "gpu": Traits(),
  "tpu": Traits(casts_into_products=True, half_operands=True),
}
_OLDER_CPU = Traits(half_as_float32=True, merges_through_barriers=True, keeps_residuals=True)


def traits_of(kind: str) -> Traits:
  """Returns the traits of a platform's compiler."""
  return _OLDER_CPU if kind == "cpu" and not _compat.has_newer_xla() else _TRAITS[kind]


def peak(
  graph: Graph,
  traits: Traits,
  *,
  size: Callable[[GraphValue], int],
  weights: DividedWeights = NOT_DIVIDED,
  reusable: Iterable[GraphValue] = (),
) -> Peak:
  """Returns the peak of a graph, without its arguments.

  Args:
    graph: graph of the program.
    traits: traits of the platform.
    size: returns the bytes of a value on a device.
    weights: the weights that the compiler gathers.
    reusable: arguments whose memory results may take (donated ones).
  """
  if traits.half_as_float32:
    given = size
    size = lambda v: given(v) * (2 if getattr(v.dtype, "itemsize", 4) == 2 else 1)
  storage = Storage(graph, traits)
  if traits.half_operands:
    whole = size
    size = lambda v: whole(v) // (2 if storage.only_multiplied(v) else 1)
  steps = storage.steps(
    lambda body: peak(body, traits, size=size, weights=weights, reusable=body.arguments), weights
  )
  kept = {id(storage.root(v)) for v in (*graph.results, *graph.arguments)}
  candidates = (steps, delayed(steps), greedy(steps, kept, size))
  results = [storage.root(v) for v in graph.results]
  best: Peak | None = None
  for order in candidates:
    arguments = [storage.root(v) for v in graph.arguments]
    found = _simulate(order, results, arguments, list(reusable), size, storage.root)
    best = found if best is None or found.nbytes < best.nbytes else best
  assert best is not None
  return best


class Storage:
  """The stored values, and which of them each operation reads."""

  def __init__(self, graph: Graph, traits: Traits):
    self._graph = graph
    self._traits = traits
    self._view: dict[int, GraphValue] = {}
    self._reach: dict[int, tuple[GraphValue, ...]] = {}
    for operation in graph.operations:
      if is_view(operation):
        for result, operand in zip(operation.results, operation.operands, strict=False):
          self._view[id(result)] = self.root(operand)
    self._stored: set[int] = {id(self.root(v)) for v in (*graph.arguments, *graph.results)}
    self._readers: dict[int, list[GraphOperation]] = {}
    for operation in graph.operations:
      if is_view(operation):
        continue
      for value in operation.operands:
        self._readers.setdefault(id(self.root(value)), []).append(operation)
      if is_heavy(operation) or is_reduction(operation):
        self._stored |= {id(value) for value in operation.results}
      if is_heavy(operation):
        for value in operation.operands:
          root = self.root(value)
          if not (self._fused_cast(operation, root)):
            self._stored.add(id(root))
    self._keep_shared()

  def root(self, value: GraphValue) -> GraphValue:
    """Returns the value whose memory this is a view of."""
    return self._view.get(id(value), value)

  def only_multiplied(self, value: GraphValue) -> bool:
    """Returns whether only products read a value, and round it to half precision anyway."""
    readers = self._readers.get(id(value), [])
    return (
      bool(readers)
      and value.argument is None
      and getattr(value.dtype, "name", "") == "float32"
      and all(has(r.equation, Trait.PRODUCT) and r.equation.params.get("precision") is None for r in readers)
    )

  def is_stored(self, value: GraphValue) -> bool:
    """Returns whether a value is in memory."""
    return id(value) in self._stored

  def store(self, value: GraphValue) -> None:
    """Stores a value, too."""
    self._stored.add(id(value))
    self._reach.clear()

  def readers(self, value: GraphValue) -> list[GraphOperation]:
    """Returns the operations that read a value that is not a view."""
    return self._readers.get(id(value), [])

  def steps(self, inner: Callable[[Graph], Peak], weights: DividedWeights) -> list[StoredOperation]:
    out = []
    gathered: set[int] = set()
    for operation in self._graph.operations:
      if is_view(operation):
        continue
      writes = [v for v in operation.results if self.is_stored(v)]
      if not writes and not operation.equation.effects:
        continue
      reads: dict[int, GraphValue] = {}
      for value in operation.operands:
        for v in self._sources(self.root(value)):
          reads[id(v)] = v
      bodies = [inner(body) for body in operation.bodies]
      worst = max(bodies, key=lambda found: found.nbytes, default=None)
      extra = (worst.nbytes if worst else 0) + weights.gradients(operation)
      for copy in weights.copies(operation, self.root):
        reads[id(copy)] = copy
        if id(copy) not in gathered:
          gathered.add(id(copy))
          writes.append(copy)
      if is_fp8(operation.equation):  # the quantised operands
        spec = operation.equation.params["spec"]
        for value, dtype in zip(operation.operands[:2], (spec.lhs_dtype, spec.rhs_dtype), strict=True):
          extra += math.prod(value.shape) * narrow_bits(dtype) // 8
      out.append(StoredOperation(operation, list(reads.values()), writes, int(extra), worst))
    return out

  def _fused_cast(self, operation: GraphOperation, value: GraphValue) -> bool:
    product = has(operation.equation, Trait.PRODUCT)
    if not self._traits.casts_into_products or not product or value.maker is None:
      return False
    return not (is_heavy(value.maker) or is_reduction(value.maker))

  def _sources(self, value: GraphValue) -> tuple[GraphValue, ...]:
    """Returns the value itself if it is stored, else the stored values that it is computed from."""
    if self.is_stored(value):
      return (value,)
    if id(value) not in self._reach:
      found: dict[int, GraphValue] = {}
      for operand in value.maker.operands if value.maker else ():
        for source in self._sources(self.root(operand)):
          found[id(source)] = source
      self._reach[id(value)] = tuple(found.values())
    return self._reach[id(value)]

  def _keep_shared(self) -> None:
    """Stores what is dearer to recompute: costly operations, and small values computed from large ones."""
    needed_later = {
      id(self.root(v)) for o in self._graph.operations if o.phase == BACKWARD for v in o.operands
    }
    for operation in self._graph.operations:
      for value in operation.results:
        if self.is_stored(value) or id(value) in self._view:
          continue
        readers = self._readers.get(id(value), [])
        if self._traits.keeps_expensive and has(operation.equation, Trait.COSTLY) and len(readers) > 1:
          self._stored.add(id(value))
          continue
        if operation.phase != BACKWARD and any(r.phase == BACKWARD for r in readers):
          sources = self._sources(value)
          more = sum(s.nbytes for s in sources if id(s) not in needed_later and s.argument is None)
          if more > value.nbytes or (more == value.nbytes and self._traits.keeps_residuals):
            self._stored.add(id(value))
            self._reach.clear()
          else:
            needed_later |= {id(s) for s in sources}


def is_heavy(operation: GraphOperation) -> bool:
  return has(operation.equation, Trait.READS_STORED) or bool(operation.bodies) or operation.crosses


def is_reduction(operation: GraphOperation) -> bool:
  return has(operation.equation, Trait.STORES_RESULT)


def is_view(operation: GraphOperation) -> bool:
  if has(operation.equation, Trait.ALIAS):
    return True
  if len(operation.operands) != 1 or len(operation.results) != 1:
    return False
  operand, result = operation.operands[0], operation.results[0]
  same = operand.nbytes == result.nbytes
  if operation.equation.primitive is jax.lax.broadcast_in_dim_p:
    return same
  is_cast = operation.equation.primitive is jax.lax.convert_element_type_p
  return is_cast and operand.dtype == result.dtype


def _simulate(
  order: Sequence[StoredOperation],
  results: list[GraphValue],
  arguments: list[GraphValue],
  reusable: list[GraphValue],
  size: Callable[[GraphValue], int],
  root: Callable[[GraphValue], GraphValue],
) -> Peak:
  """Steps through an order, stores and frees values, and returns its peak."""
  last = _last_uses(order, results)
  outputs = {id(v) for v in results}
  given = {id(v) for v in arguments} | _in_place(results, arguments, reusable)
  read_backward = frozenset(id(v) for step in order if step.operation.phase == BACKWARD for v in step.reads)

  def is_saved(v: GraphValue) -> bool:
    return v.maker is not None and v.maker.phase == FORWARD and id(v) in read_backward

  live: dict[int, GraphValue] = {}
  total = saved_now = 0
  worst, worst_live = 0, list[GraphValue]()
  worst_at: StoredOperation | None = None
  saved_worst, saved = 0, list[GraphValue]()
  for i, step in enumerate(order):
    dying = [v for v in {id(v): v for v in step.reads}.values() if last[id(v)] == i and id(v) in live]
    for v in step.writes:
      if id(v) not in given and id(v) not in live:
        live[id(v)] = v
        total += size(v)
        saved_now += size(v) if is_saved(v) else 0
    now = total - _written_over(step, dying, size) + step.extra
    if now > worst:
      worst, worst_live, worst_at = now, list(live.values()), step
    if saved_now > saved_worst:
      saved_worst, saved = saved_now, [v for v in live.values() if is_saved(v)]
    for v in (*dying, *(v for v in step.writes if last[id(v)] == i)):
      if id(v) in live and id(v) not in outputs:
        del live[id(v)]
        total -= size(v)
        saved_now -= size(v) if is_saved(v) else 0
  return Peak(
    nbytes=worst,
    at=worst_at.operation if worst_at else None,
    live=worst_live,
    saved=saved,
    extra=worst_at.extra if worst_at else 0,
    read_backward=read_backward,
    size=size,
    order=order,
    root=root,
    fresh=[v for v in results if id(v) not in given],
    inner=worst_at.inner if worst_at else None,
  )


def _last_uses(order: Sequence[StoredOperation], results: list[GraphValue]) -> dict[int, int]:
  """Returns the position of the last operation that reads or writes each value; the end for results."""
  last = {id(v): i for i, step in enumerate(order) for v in (*step.reads, *step.writes)}
  return last | {id(v): len(order) for v in results}


def _in_place(results: list[GraphValue], arguments: list[GraphValue], reusable: list[GraphValue]) -> set[int]:
  """Returns the results that take the memory of a donated argument of the same shape and dtype."""
  fixed = {id(v) for v in arguments}
  free = collections.Counter((v.shape, v.dtype, v.on_host) for v in reusable)
  found: set[int] = set()
  for v in results:
    if id(v) not in fixed and id(v) not in found and free[v.shape, v.dtype, v.on_host]:
      free[v.shape, v.dtype, v.on_host] -= 1
      found.add(id(v))
  return found


def _written_over(step: StoredOperation, dying: list[GraphValue], size: Callable[[GraphValue], int]) -> int:
  """Returns the bytes that an operation writes over operands that it reads for the last time."""
  if is_heavy(step.operation) and not has(step.operation.equation, Trait.IN_PLACE):
    return 0
  spare = collections.Counter(map(size, dying))
  written = collections.Counter(map(size, step.writes))
  return sum(n * count for n, count in (spare & written).items())
