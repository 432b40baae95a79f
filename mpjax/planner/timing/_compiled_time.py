"""The time of a step from its compiled program: its instructions in execution order, as often as they run.

On a TPU the compiler notes the cycles that it expects of most instructions. On a GPU, and for the others, an
instruction takes the longer of its FLOPs at the rate of the units and its bytes at the bandwidth of the
memory. What starts and ends in two instructions runs while those between them run.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence

from mpjax.jaxpr import layer_pattern
from mpjax.planner._results import TIME_PARTS, Time
from mpjax.planner._targets import Target
from mpjax.planner.analytic import Graph
from mpjax.planner.compiled import HloModule
from mpjax.planner.compiled._hlo import (
  HOST,
  HloComputation,
  HloInstruction,
  HloShape,
  done_of,
  start_of,
  trips,
)
from mpjax.planner.compiled._hlo_opcodes import COLLECTIVES, VIEWS
from mpjax.planner.compiled._hlo_parts import path_of_name
from mpjax.planner.compiled._hlo_products import group_of, product_flops
from mpjax.planner.timing._instructions import moved_bytes, product_of
from mpjax.planner.timing._kernels import Kernels, is_kernel, kernel_flops, traced_kernels
from mpjax.planner.timing._rates import (
  beside_share,
  collective_seconds,
  efficiency,
  host_seconds,
  kernel_seconds,
  memory_seconds,
  product_seconds,
)

_SENTINEL = 1 << 62  # the compiler writes 2^63 - 1 where it has no estimate
# The share of the compiler's cycles that pass, fitted to published steps: of 12 in benchmarks/README.md, the
# median takes 0.8 of what the cycles, collectives and transfers say.
_CYCLES = 0.8
_FREE = VIEWS | {"parameter", "constant", "partition-id", "replica-id", "iota", "async-update"}
_COPIES = VIEWS | {"constant", "copy", "fusion", "parameter", "slice", "transpose"}
# Half of the published steps in benchmarks/README.md are nearer than this.
_ERROR = 0.2
_SOURCES = {"tpu": "compiler's cycles", "gpu": "roofline of the compiled program"}


@dataclasses.dataclass
class Spent:
  """Seconds by (part, module), and those that other work hides."""

  by_place: collections.defaultdict[tuple[str, str], float] = dataclasses.field(
    default_factory=lambda: collections.defaultdict(float)
  )
  hidden: float = 0.0

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


def program_time(module: HloModule, target: Target, graph: Graph) -> tuple[Time | None, tuple[str, ...]]:
  """Returns the time of a compiled program, and a note if it cannot be told. Never raises."""
  try:
    return compiled_time(module, target, traced_kernels(graph)), ()
  except Exception as error:
    return None, (f"the time of the compiled program cannot be told: {type(error).__name__}: {error}"[:200],)


def compiled_time(module: HloModule, target: Target, kernels: Kernels | None = None) -> Time | None:
  """Returns the time of a step, or `None` if the target has no published rates.

  Args:
    module: the compiled program.
    target: its target.
    kernels: FLOPs of fused kernels, as `traced_kernels` returns them.
  """
  if target.kind not in _SOURCES or not target.flops or not target.bandwidth:
    return None
  spent = _Walk(target, kernels or {}).run(module.entry)
  return spent.time(_SOURCES[target.kind], _ERROR)


class _Walk:
  def __init__(self, target: Target, kernels: Kernels):
    self._target = target
    self._kernels = kernels
    self._clock = float(target.speeds.get("clock", 0))
    self._done: dict[HloComputation, Spent] = {}

  def run(self, computation: HloComputation) -> Spent:
    """Returns what one run of a computation takes."""
    if computation not in self._done:
      self._done[computation] = self._run(computation)
    return self._done[computation]

  def _run(self, computation: HloComputation) -> Spent:
    spent = Spent()
    now = 0.0
    free: collections.defaultdict[str, float] = collections.defaultdict(
      float
    )  # when the links, copies and host are free again
    ends: dict[HloInstruction | str, tuple[float, float, tuple[str, str]]] = {}
    for instruction in computation.instructions:
      if (key := _begins(instruction)) is not None:
        part, seconds = self._beside(instruction, computation)
        queue = part + _way(instruction)
        free[queue] = max(now, free[queue]) + seconds
        ends[key] = free[queue], seconds, (part, _module(instruction))
        continue
      if (key := _awaits(instruction)) is not None and key in ends:
        end, seconds, place = ends.pop(key)
        wait = max(0.0, end - now)
        hidden = max(0.0, seconds - wait)
        wait += beside_share(self._target) * hidden
        spent.by_place[place] += wait
        spent.hidden += hidden
        now += wait
        continue
      took = self._one(instruction)
      spent.add(took)
      now += took.seconds
    for _, seconds, _ in ends.values():  # what ends in another computation
      spent.hidden += seconds
    return spent

  def _one(self, instruction: HloInstruction) -> Spent:
    """Returns what an instruction takes with all that it calls."""
    spent = Spent()
    if instruction.op == "while":
      for called in instruction.called:
        spent.add(self.run(called), trips(instruction) or 1)
    elif instruction.op == "conditional":
      spent.add(max((self.run(called) for called in instruction.called), key=lambda branch: branch.seconds))
    elif instruction.op == "call":
      spent.add(self.run(instruction.called[0]))
    elif instruction.op not in _FREE:
      part, seconds, named = self._operation(instruction)
      if seconds:
        spent.by_place[part, _module(named)] += seconds
    return spent

  def _operation(self, instruction: HloInstruction) -> tuple[str, float, HloInstruction]:
    """Returns part, seconds, and the instruction that says the module."""
    inner = list(_inside(instruction))
    if (exchange := next((one for one in inner if _collective(one) and not _chain(one)), None)) is not None:
      return "collectives", self._exchange(exchange, instruction.shapes), exchange
    products = [(one, found) for one in inner if (found := product_of(one)) is not None]
    part, named, work = "element-wise", instruction, 0.0
    if is_kernel(instruction):
      part, work = "attention kernels", self._kernel(instruction)
    elif products:
      named, largest = max(products, key=lambda found: found[1].flops)
      part = "convolutions" if largest.convolution else "products"
    elif {one.op for one in inner} <= _COPIES:
      part = "copies"
    cycles = int(instruction.config.get("window_config", {}).get("estimated_cycles", _SENTINEL))
    if cycles < _SENTINEL and self._clock:
      # No product is faster than the units; float32 operands take at least one pass of bfloat16.
      least = 0.0
      for one, product in products:
        dtype = "bfloat16" if "float32" in product.dtype else product.dtype
        least += product_flops(one) / self._target.unit_rate(dtype)[1]
      return part, max(_CYCLES * cycles / self._clock, least), named
    if self._target.kind == "tpu" and instruction.op == "custom-call" and not is_kernel(instruction):
      return part, 0.0, named  # a mark for the compiler
    work += sum(
      one.passes * product_seconds(self._target, one.dtype, one.shape, one.batch, convolution=one.convolution)
      for _, one in products
    )
    return part, kernel_seconds(self._target, work, moved_bytes(instruction)), named

  def _kernel(self, kernel: HloInstruction) -> float:
    """Returns the seconds that the units take for a fused kernel."""
    narrow = any(shape.dtype.startswith("f8") for operand in kernel.operands for shape in operand.shapes)
    _, rate = self._target.unit_rate("float8_e4m3fn" if narrow else "bfloat16")
    return kernel_flops(kernel, self._kernels) / (rate * efficiency(self._target, "kernels"))

  def _exchange(self, collective: HloInstruction, results: Sequence[HloShape]) -> float:
    """Returns the seconds of a collective that leaves these results."""
    operation = collective.op.removesuffix("-start")
    nbytes = sum(shape.nbytes for shape in collective.shapes)
    kept = sum(shape.nbytes for shape in results)
    if operation == "all-reduce" and kept < nbytes:  # a fusion in which each device keeps its share
      operation, nbytes = "reduce-scatter", kept
    return collective_seconds(self._target, operation, nbytes, group_of(collective))

  def _beside(self, start: HloInstruction, scope: HloComputation) -> tuple[str, float]:
    """Returns part and seconds of what an instruction starts."""
    done = done_of(start, scope)
    nbytes = sum(shape.nbytes for shape in (done or start).shapes)
    for inner in _inside(start):
      if _collective(inner):
        operation = inner.op.removesuffix("-start")
        if inner is not start:
          nbytes = sum(shape.nbytes for shape in inner.shapes)
        return "collectives", collective_seconds(self._target, operation, nbytes, group_of(inner))
    spaces = [shape.space for shape in start.shapes]
    if HOST in spaces:
      if start.called and (root := start.called[0].root).op == "dynamic-update-slice":
        nbytes = sum(shape.nbytes for shape in root.operands[1].shapes)
      return "host", host_seconds(self._target, nbytes)
    if start.called and (moved := moved_bytes(start.called[0].root)):
      return "copies", memory_seconds(self._target, moved)
    both_ways = 2 if spaces[:2] == [0, 0] else 1
    return "copies", memory_seconds(self._target, nbytes * both_ways)


def _way(start: HloInstruction) -> str:
  """Returns the way that a transfer goes; host and device, and neighbours, send both ways at once."""
  if start.op == "collective-permute-start":
    pairs = start.proto.source_target_pairs
    return " up" if sum(pair.target > pair.source for pair in pairs) * 2 > len(pairs) else " down"
  result = start.called[0].root if start.called else start
  return " out" if result.shapes and result.shapes[0].space == HOST else ""


def _begins(instruction: HloInstruction) -> HloInstruction | str | None:
  """Returns what names the asynchronous work that an instruction starts."""
  if instruction.op.endswith("-start"):
    return instruction
  chain = _chain_of(instruction, "AsyncCollectiveStart")
  return chain or None


def _awaits(instruction: HloInstruction) -> HloInstruction | str | None:
  """Returns what names the asynchronous work that an instruction waits for."""
  if instruction.op.endswith("-done"):
    found = start_of(instruction)
    while found.op == "async-update":  # one that brings the operands
      found = start_of(found)
    return found
  return _chain_of(instruction, "AsyncCollectiveDone") or None


def _chain_of(instruction: HloInstruction, target: str) -> str:
  """Returns the chain of a TPU's collective that a fusion starts or ends; others compute meanwhile."""
  if instruction.op != "fusion":
    return ""
  scope = instruction.called[0].instructions
  if not any(one.proto.custom_call_target == target for one in scope):
    return ""
  return next((chain for one in scope if (chain := _chain(one))), "")


def _chain(instruction: HloInstruction) -> str:
  return next((e.value for e in instruction.proto.frontend_attributes.map if e.key == "chain_id"), "")


def _collective(instruction: HloInstruction) -> bool:
  return instruction.op.removesuffix("-start") in COLLECTIVES


def _inside(instruction: HloInstruction) -> Iterator[HloInstruction]:
  """Yields an instruction and those that it is made of."""
  yield instruction
  if instruction.op in ("fusion", "async-start"):
    for called in instruction.called:
      for inner in called.instructions:
        yield from _inside(inner)


def _module(instruction: HloInstruction) -> str:
  return layer_pattern(path_of_name(instruction.op_name))
