"""The time of a step: a floor, and one clock for compiled programs and the kernels that traced ones become.

On a TPU the compiler notes the cycles that it expects of most instructions. All else takes the longer of its
FLOPs at the rate of the units and its bytes at the bandwidth of the memory. What starts and ends in two
operations runs while those between them run.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mpjax.formats import padded
from mpjax.jaxpr import Trait, has, layer_pattern, shape_of
from mpjax.planner._memory import is_heavy, is_update
from mpjax.planner._program import Buffer, Operation, Product, Program, total_bytes
from mpjax.planner._results import TIME_PARTS, Collective, Floor, Memory, Time
from mpjax.planner._targets import Target

_SOURCES = {"tpu": "compiler's cycles", "gpu": "roofline of the compiled program"}
# Half of the published steps in benchmarks/README.md are nearer than the first; the second is of traced ones.
_ERROR, _ERROR_TRACED = 0.2, 0.5


_Spent = dict[Any, float]  # seconds by part and module
_HIDDEN = "", ""  # the place of those that other work hides

# All constants that were fitted, each with its source. "H100": products and passes over memory, measured on
# one (benchmarks/results/rates_h100.json); "steps": measured on one, too (step_time_measured_h100.json);
# "published": the 23 steps of benchmarks/README.md; "book": "How to Scale Your Model".
SUSTAINED = 0.85  # steps: a deep MLP runs at lower clocks than short products, before the power's limit
BESIDE = {"gpu": 0.2}  # a guess: collectives hold some multiprocessors of a GPU, copies some bandwidth
HIDDEN = 0.15  # compiled steps that gather their parameters first: the share of collectives that others hide
CYCLES = 0.8  # published: the median of 12 steps takes this share of the compiler's cycles
# The shares of published peaks that large work reaches. GPU: H100, memory and kernels by steps of GPT, links
# by the book (370 of 450 GB/s). TPU: links by the book (45 of 50 GB/s), the others are guesses, for what has
# no cycles.
REACHED = {
  "gpu": {
    **{"bfloat16": 0.87, "float16": 0.87, "float8": 0.82, "tensorfloat32": 0.8, "float32": 0.78},
    **{"memory": 0.9, "interconnect": 0.8, "kernels": 0.67},
  },
  "tpu": {"memory": 0.9, "interconnect": 0.9, "kernels": 0.5},
}
# H100: rows and columns of a result that one multiprocessor computes at once, and the share of its rate that
# this reaches: a smaller tile reads more of its operands for each product of two numbers.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (64, 64, 0.7))
PARTS_OF_K = (1, 2, 4, 8)  # H100
FILL = 64  # H100: the depth K that passes while a tile's pipeline fills
CONVOLUTION = 0.7  # of the rate of a product, by steps of ResNet
LINE = 16  # bytes: cuBLAS has slower kernels for matrices whose rows are not whole multiples of them
UNALIGNED = 2.3  # H100
LAUNCH = 1.1e-6  # H100: seconds of the smallest kernel of a program
START = 1.8e-6  # H100: more seconds of a product
HOST, NETWORK = 1.5e10, 2.5e9  # guesses: bytes/s of links that no file of a device names
LATENCY = 1e-6  # a guess: seconds of one hop
SCATTERED = 12  # H100: a scatter adds in memory, and takes the time of so many times the bytes of its updates
NARROW = 2  # steps of GPT: a kernel that writes FP8, often transposed, takes the time of twice its bytes
LEAST_DEPTH = 104  # H100: a narrower head of cuDNN's attention takes as long as one of this depth
ROW_START = 640  # H100: a row of T scores takes as long as T and so many at the rate of long rows


def compiled_time(program: Program, target: Target) -> Time | None:
  """Returns the time of a step from its compiled program; `None` if the target has no published rates."""
  if target.kind not in _SOURCES or not target.has_rates:
    return None
  return _time(_spent(program, target, BESIDE.get(target.kind, 0.0)), _SOURCES[target.kind], _ERROR)


def traced_time(program: Program, target: Target) -> Time | None:
  """Returns the time of a step from what its traced program stores: a roofline of the kernels made of it.

  What is stored is read and written; what is not stored is computed where it is read, at no cost.
  """
  if target.kind not in _SOURCES or not target.has_rates:
    return None
  spent = _spent(_kernels(program), target)
  for part, path in [*spent]:
    if part == "collectives":
      spent[_HIDDEN] += spent[part, path] * HIDDEN
      spent[part, path] *= 1 - HIDDEN
  return _time(spent, "roofline of the traced program", _ERROR_TRACED)


def time_floor(program: Program, crossing: Program, memory: Memory, target: Target) -> Floor | None:
  """Returns the shortest time of a step, or `None` if the target has no published peak rates.

  Every step reads its state and its batch from memory, and writes its results there. Arrays of which it reads
  or writes only a part do not count. Only activations that wait for the backward pass may stay in a cache
  instead. A conditional counts its least branch.

  Args:
    program: what the step stores.
    crossing: the program that says what crosses devices.
    memory: memory of the step, the compiler's if there is one.
    target: the target with the peak rates.
  """
  if not target.has_rates:
    return None
  read = {b for o in program.operations for b, n in o.reads.items() if b.argument and n >= b.nbytes}
  moved = total_bytes(read)
  moved += total_bytes({b for b in program.results if b.maker is not None and not is_update(b.maker)})
  moved += 2 * max(0, memory.saved_bytes - target.cache)
  # A kernel may state more FLOPs than it runs: the masked half of causal attention.
  seconds = lambda p: 0 if p.kernel else p.flops * p.passes / target.unit_rate(p.dtype)[1]
  work = sum(times * seconds(p) for o, times in program.each(worth=lambda o: -o.flops) for p in o.products)
  parts = {"matrix units": work, "memory": moved / target.bandwidth}
  sent = sum(o.sent * times for o, times in crossing.each(worth=lambda o: -o.sent))
  if sent and target.interconnect:
    parts["interconnect"] = sent / target.interconnect
  bound = max(parts, key=lambda name: parts[name])
  return Floor(parts[bound], parts, bound, moved)


def _time(spent: _Spent, source: str, error: float) -> Time:
  hidden = spent.pop(_HIDDEN, 0.0)
  parts: dict[str, float] = dict.fromkeys(TIME_PARTS, 0.0)
  modules: _Spent = collections.defaultdict(float)
  for (part, path), seconds in spent.items():
    parts[part] += seconds
    modules[layer_pattern(path)] += seconds
  parts = {name: seconds for name, seconds in parts.items() if seconds}
  longest = dict(sorted(modules.items(), key=lambda item: -item[1]))
  return Time(sum(parts.values()), parts, hidden, longest, source, error)


def _passing(spent: _Spent) -> float:
  """Returns the seconds that pass."""
  return sum(seconds for place, seconds in spent.items() if place != _HIDDEN)


def _spent(program: Program, target: Target, slowed: float = 0.0) -> _Spent:
  """Returns what one run of a program takes: its operations one after another, and what runs meanwhile.

  Args:
    program: the program.
    target: the target that it runs on.
    slowed: the share of its hidden seconds by which what runs meanwhile slows the others.
  """
  spent: _Spent = collections.defaultdict(float)
  now = 0.0
  free: dict[str, float] = collections.defaultdict(float)  # when a queue is free again
  began: dict[Operation, tuple[float, float]] = {}  # seconds, end
  for operation in program.operations:
    took: _Spent = collections.defaultdict(float)
    if operation.queue:
      seconds = _seconds(operation, target)
      free[operation.queue] = max(now, free[operation.queue]) + seconds
      began[operation] = seconds, free[operation.queue]
    elif (start := operation.awaits) is not None:
      seconds, end = began.pop(start)
      wait = max(0.0, end - now)
      took[_HIDDEN] = max(0.0, seconds - wait)
      took[start.part, start.path] = wait + slowed * took[_HIDDEN]
    elif operation.part and not operation.bodies and (seconds := _seconds(operation, target)):
      took[operation.part, operation.path] = seconds
    bodies = [_spent(body, target, slowed) for body in operation.bodies]
    for body in [max(bodies, key=_passing)] if operation.chooses else bodies:
      for place, seconds in body.items():
        took[place] += seconds * (operation.times or 1)
    for place, seconds in took.items():
      spent[place] += seconds
    now += _passing(took)
  spent[_HIDDEN] += sum(seconds for seconds, _ in began.values())  # what ends in another computation
  return spent


def _seconds(operation: Operation, target: Target) -> float:
  """Returns the seconds of one run of an operation: on a GPU, of a kernel."""
  if operation.part == "collectives":
    return collective_seconds(target, operation.collectives, operation.members)
  if operation.part == "host":
    return operation.moved / target.speeds.get("host", HOST)
  # On an H100, what fits its cache moves no faster (element-wise operations of 2 to 32 MB): none is counted.
  memory = operation.moved / (target.bandwidth * efficiency(target, "memory"))
  if operation.queue:
    return memory
  if operation.cycles is not None and (clock := target.speeds.get("clock")):
    # No product is faster than the units; float32 operands take at least one pass of bfloat16.
    rate_of = lambda dtype: target.unit_rate("bfloat16" if "float32" in dtype else dtype)[1]
    least = sum(p.flops / rate_of(p.dtype) for p in operation.products)
    return max(CYCLES * operation.cycles / clock, least)
  work = sum(product_seconds(target, product, operation.devices) for product in operation.products)
  if target.kind != "gpu":
    return max(work, memory)
  # Operands arrive and results leave only in part while the units work.
  return math.hypot(work, memory) + LAUNCH + (START if work else 0.0)


def _kernels(program: Program) -> Program:
  """Returns a program of kernels, with the bytes that they move."""
  kernels = list(_merged(program))  # which adds to those before
  for kernel in kernels:
    kernel.moved = kernel.moved or _moved(kernel)
    kernel.bodies = [_kernels(body) for body in kernel.bodies]
  return dataclasses.replace(program, operations=kernels)


def _merged(program: Program) -> Iterator[Operation]:
  """Yields the kernels of a program, a loop or conditional as one.

  The level of a value is the most products, reductions over columns and the like that it depends on one after
  another. Element-wise operations of one level and size are one kernel if they share a large operand.
  """
  level: dict[Buffer, int] = {}
  started: dict[tuple[int, int], list[Operation]] = collections.defaultdict(list)
  for operation in program.operations:
    reads, writes = operation.reads, operation.writes
    depth = max((level.get(b, 0) for b in reads), default=0)
    heavy = is_heavy(operation)
    ends = heavy or (has(operation.origin, Trait.STORES_RESULT) and not _of_rows(operation))
    level.update(dict.fromkeys(writes, depth + ends))
    alone = Operation(operation.origin, path=operation.path, part="element-wise")
    if heavy:
      if operation.extra:  # the operands' largest values, then their codes
        yield dataclasses.replace(alone, moved=operation.extra + 2 * total_bytes(operation.operands[:2]))
      yield dataclasses.replace(operation)
      continue
    elements = max((math.prod(v.shape) for v in (*operation.operands, *writes)), default=0)
    most = max((*reads.values(), *(b.nbytes for b in writes)), default=0)
    large = {b for b, nbytes in (reads | {b: b.nbytes for b in writes}).items() if 4 * nbytes >= most}
    alike = started[depth, elements]
    found = next((k for k in alike if not large.isdisjoint((*k.reads, *k.writes))), alone)
    if found is alone:
      alike.append(alone)
      yield alone
    found.reads |= {b: nbytes for b, nbytes in reads.items() if b not in found.writes}
    found.writes = [*found.writes, *writes]


def _moved(kernel: Operation) -> float:
  """Returns the bytes that a kernel reads and writes; an update in place writes what it reads."""
  reads = sum(kernel.reads.values())
  return 2 * reads if is_update(kernel) else reads + total_bytes(kernel.writes)


def _of_rows(operation: Operation) -> bool:
  """Returns whether an operation reduces the last dimension: a kernel does so, and goes on with the row."""
  last = len(shape_of(operation.origin.invars[0])) - 1 if len(operation.operands) == 1 else -1
  return operation.origin.params.get("axes") == (last,)


# Seconds of one operation on one device.


def efficiency(target: Target, name: str) -> float:
  """Returns the share of a peak that large work reaches, by dtype or `memory`, `interconnect`, `kernels`."""
  reached = REACHED.get(target.kind, {}).get(name, 0.95 if target.kind == "tpu" else 0.8)
  computes = name not in ("memory", "interconnect") and target.kind == "gpu"
  return reached * (SUSTAINED if computes else 1)


def product_seconds(target: Target, product: Product, devices: int = 1) -> float:
  """Returns the seconds that one device's matrix units take for products, however fast the memory is.

  On a GPU, tiles of the result are divided over the multiprocessors, and the last round of tiles may leave
  some of them idle; a product of few tiles is divided along K. Without the lower clocks of long steps it
  fits the products that were measured on an H100 within 7% in the mean. On a TPU, sizes are padded.

  Args:
    target: the target.
    product: equal products, or a fused kernel.
    devices: number of devices that divide the work of its shape.
  """
  name, peak = target.unit_rate(product.dtype)
  if product.kernel == "fused":
    return product.flops / (peak * efficiency(target, "kernels"))
  on_gpu, (m, n, k) = target.kind == "gpu", product.shape
  rate = peak * efficiency(target, name) * (CONVOLUTION if product.convolution and on_gpu else 1)
  times = product.passes / devices
  if not on_gpu:
    m, n, k = padded(target.matrix_units, product.dtype, m, n, k)
    return times * 2 * product.batch * m * n * (math.ceil(k / 128) * 128) / rate
  units = int(target.cuda.get("core_count", 100))
  best = math.inf
  for tall, wide, share in TILES:
    tiles = product.batch * math.ceil(m / tall) * math.ceil(n / wide)
    for parts in PARTS_OF_K if tiles < units else (1,):
      depth = k / parts + (FILL if parts == 1 else 2 * FILL)
      rounds = math.ceil(tiles * parts / units)
      best = min(best, rounds * units * 2 * tall * wide * depth / (rate * share))
  itemsize = {"float32": 4, "tensorfloat32": 4, "float8": 1}.get(name, 2)
  aligned = product.convolution or not any(side * itemsize % LINE for side in (n, k) if side > 1)
  return times * best * (1 if aligned else UNALIGNED)


def collective_seconds(target: Target, collectives: Sequence[Collective], group: Sequence[int]) -> float:
  """Returns the seconds of a collective, of which each row has one result: its bytes over the bandwidth.

  An all-reduce is that of a ring (Thakur et al., 2005), which sends twice.

  Args:
    target: the target.
    collectives: its results on one device.
    group: numbers of the devices that exchange with each other.
  """
  n = len(group)
  if n < 2 or not collectives:
    return 0.0
  operation, sent = collectives[0].operation, sum(collective.sent for collective in collectives)
  sent *= 2 * (n - 1) / n if operation == "all-reduce" else 1
  bandwidth = _torus(target, n) if target.kind == "tpu" else _network(target, operation, group)
  return sent / (bandwidth * efficiency(target, "interconnect")) + LATENCY * math.log2(n)


def _torus(target: Target, n: int) -> float:
  """Returns the bytes/s at which each TPU of a group sends: over both links of an axis that is a ring."""
  sides = sorted(target.sides, reverse=True)
  left = math.ceil(n * math.prod(sides) / max(1, target.devices))  # chips
  every, links = int(target.speeds.get("ring", 0)), 0
  for side in sides:
    if left > 1 or not links:
      links += 2 if left >= side and every and side % every == 0 else 1
      left = math.ceil(left / side)
  return target.interconnect * links / (2 * len(sides))


def _network(target: Target, operation: str, group: Sequence[int]) -> float:
  """Returns the bytes/s at which each GPU of a group sends: inside of a host, or by its cards."""
  inside = target.interconnect or target.speeds.get("host", HOST)
  together = sum(device // target.sides[-1] == group[0] // target.sides[-1] for device in group)
  if together == len(group):
    return inside
  # The rings of a host's GPUs leave it by different cards; in an all-to-all, each GPU has its own card.
  cards = 1 if operation.endswith("all-to-all") or operation == "collective-permute" else together
  return min(inside, cards * target.speeds.get("network", NETWORK))
