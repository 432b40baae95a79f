"""The time of a step from its compiled program: its instructions in execution order, as often as they run.

On a TPU the compiler notes the cycles that it expects of most instructions. On a GPU, and for the others, an
instruction takes the longer of its FLOPs at the rate of the units and its bytes at the bandwidth of the
memory. What starts and ends in two instructions runs while those between them run.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence

from mpjax.jaxpr import layer_pattern
from mpjax.planner._program import Operation, time_of
from mpjax.planner._results import Note, Time
from mpjax.planner._targets import Target
from mpjax.planner.analytic import Graph
from mpjax.planner.compiled import HloModule
from mpjax.planner.compiled._hlo import (
  COLLECTIVES,
  HOST,
  VIEWS,
  HloComputation,
  HloInstruction,
  HloShape,
  done_of,
  path_of_name,
)
from mpjax.planner.compiled._hlo_products import group_of, product_of
from mpjax.planner.compiled._hlo_program import begins, chain_id, hlo_program
from mpjax.planner.timing._kernels import Kernels, is_kernel, kernel_flops, traced_kernels
from mpjax.planner.timing._rates import (
  CYCLES,
  NARROW,
  SCATTERED,
  beside_share,
  collective_seconds,
  efficiency,
  host_seconds,
  kernel_seconds,
  memory_seconds,
  product_seconds,
)

_SENTINEL = 1 << 62  # the compiler writes 2^63 - 1 where it has no estimate
_FREE = VIEWS | {"parameter", "constant", "partition-id", "replica-id", "iota", "async-update"}
_COPIES = VIEWS | {"constant", "copy", "fusion", "parameter", "slice", "transpose"}
_PART = frozenset({"dynamic-slice", "gather", "slice"})
_SEES = frozenset({"bitcast", "get-tuple-element"})
# Half of the published steps in benchmarks/README.md are nearer than this.
_ERROR = 0.2
_SOURCES = {"tpu": "compiler's cycles", "gpu": "roofline of the compiled program"}


def program_time(module: HloModule, target: Target, graph: Graph) -> tuple[Time | None, tuple[Note, ...]]:
  """Returns the time of a compiled program, and a note if it cannot be told. Never raises."""
  try:
    return compiled_time(module, target, traced_kernels(graph)), ()
  except Exception as error:
    text = f"the time of the compiled program cannot be told: {type(error).__name__}: {error}"[:200]
    return None, (Note(text, "time"),)


def compiled_time(module: HloModule, target: Target, kernels: Kernels | None = None) -> Time | None:
  """Returns the time of a step, or `None` if the target has no published rates.

  Args:
    module: the compiled program.
    target: its target.
    kernels: FLOPs of fused kernels, as `traced_kernels` returns them.
  """
  if target.kind not in _SOURCES or not target.flops or not target.bandwidth:
    return None
  program = hlo_program(module.entry, _Prices(target, kernels or {}).set_on)
  return time_of(program, beside_share(target)).time(_SOURCES[target.kind], _ERROR)


class _Prices:
  """The seconds of instructions on a target."""

  def __init__(self, target: Target, kernels: Kernels):
    self._target = target
    self._kernels = kernels
    self._clock = float(target.speeds.get("clock", 0))

  def set_on(self, operation: Operation, scope: HloComputation) -> None:
    """Sets what an operation takes with all that it is made of."""
    instruction = named = operation.made
    if instruction.op in _FREE:
      return
    if begins(instruction) is not None:
      operation.part, operation.seconds = self._beside(instruction, scope)
      operation.queue = operation.part + _way(instruction)
    else:
      operation.part, operation.seconds, named = self._operation(instruction)
    operation.path = layer_pattern(path_of_name(named.op_name))

  def _operation(self, instruction: HloInstruction) -> tuple[str, float, HloInstruction]:
    """Returns part, seconds, and the instruction that says the module."""
    inner = list(_inside(instruction))
    if (exchange := next((one for one in inner if _collective(one) and not chain_id(one)), None)) is not None:
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
      for _, product in products:
        dtype = "bfloat16" if "float32" in product.dtype else product.dtype
        least += product.flops / self._target.unit_rate(dtype)[1]
      return part, max(CYCLES * cycles / self._clock, least), named
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


def _collective(instruction: HloInstruction) -> bool:
  return instruction.op.removesuffix("-start") in COLLECTIVES


def _inside(instruction: HloInstruction) -> Iterator[HloInstruction]:
  """Yields an instruction and those that it is made of."""
  yield instruction
  if instruction.op in ("fusion", "async-start"):
    for called in instruction.called:
      for inner in called.instructions:
        yield from _inside(inner)


def moved_bytes(instruction: HloInstruction) -> int:
  """Returns the bytes of the device's memory that an instruction reads and writes.

  An operand that is only sliced or gathered from counts by the part that is read, and one that is updated in
  place by its updates.
  """
  moved = _moved(instruction)
  return NARROW * moved if any(shape.dtype.startswith("f8") for shape in instruction.shapes) else moved


def _moved(instruction: HloInstruction) -> int:
  operands = [_nbytes(operand) for operand in instruction.operands]
  written = _nbytes(instruction)
  if instruction.op in _PART:
    return 2 * min(written, sum(operands))
  if instruction.op == "dynamic-update-slice":
    return 2 * operands[1]
  if instruction.op == "scatter":
    return SCATTERED * sum(map(_nbytes, instruction.operands[2:]))
  if "__cu" in instruction.proto.custom_call_target and len(instruction.shapes) > 1:
    written -= instruction.shapes[-1].nbytes  # the workspace
  if instruction.op != "fusion":
    return sum(operands) + written
  scope = instruction.called[0]
  readers = collections.defaultdict(list)
  for inner in scope.instructions:
    for operand in inner.operands:
      readers[operand].append(inner)
  for i, parameter in enumerate(scope.parameters()):
    if operands[i] == 0:
      continue
    users = readers[parameter]
    while len(users) == 1 and users[0].op in _SEES:
      parameter = users[0]
      users = readers[parameter]
    if users and all(user.op in _PART and user.operands[0] is parameter for user in users):
      operands[i] = min(operands[i], sum(map(_nbytes, users)))
    elif users and all(user.op == "dynamic-update-slice" and user.operands[0] is parameter for user in users):
      written += sum(_nbytes(user.operands[1]) for user in users) - min(written, operands[i])
      operands[i] = 0
    elif any(user.op == "scatter" and user.operands[0] is parameter for user in users):
      updates = sum(shape.nbytes for user in users for update in user.operands[2:] for shape in update.shapes)
      written += SCATTERED * updates - min(written, operands[i])
      operands[i] = 0
  return sum(operands) + written


def _nbytes(instruction: HloInstruction) -> int:
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)
