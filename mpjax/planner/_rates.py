"""Seconds of a product, of bytes in memory, of a collective and of a transfer to the host, on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpjax.formats import padded
from mpjax.planner._program import Product
from mpjax.planner._results import Collective
from mpjax.planner._targets import Target

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
LAUNCH = {"gpu": 1.1e-6}  # H100: seconds of the smallest kernel of a program
START = 1.8e-6  # H100: more seconds of a product
LATENCY = 1e-6  # a guess: seconds of one hop
SCATTERED = 12  # H100: a scatter adds in memory, and takes the time of so many times the bytes of its updates
NARROW = 2  # steps of GPT: a kernel that writes FP8, often transposed, takes the time of twice its bytes
LEAST_DEPTH = 104  # H100: a narrower head of cuDNN's attention takes as long as one of this depth
ROW_START = 640  # H100: a row of T scores takes as long as T and so many at the rate of long rows


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


def kernel_seconds(target: Target, work: float, nbytes: float) -> float:
  """Returns the seconds of one kernel of a GPU, or of one operation of a TPU.

  Args:
    target: the target.
    work: seconds that its products take in the units; 0 without products.
    nbytes: bytes of memory that it reads and writes.
  """
  memory = memory_seconds(target, nbytes)
  if target.kind != "gpu":
    return max(work, memory)
  # Operands arrive and results leave only in part while the units work.
  return math.hypot(work, memory) + LAUNCH["gpu"] + (START if work else 0.0)


def memory_seconds(target: Target, nbytes: float) -> float:
  """Returns the seconds that the memory takes for bytes read and written.

  On an H100, what fits its cache moves no faster (element-wise operations of 2 to 32 MB), so that none is
  counted.
  """
  return nbytes / (target.bandwidth * efficiency(target, "memory"))


def host_seconds(target: Target, nbytes: float) -> float:
  """Returns the seconds of a transfer between the device and the memory of its host."""
  return nbytes / target.speeds.get("host", 1.5e10)


def collective_seconds(target: Target, collectives: Sequence[Collective], group: Sequence[int]) -> float:
  """Returns the seconds of a collective, of which each row has one result.

  The bytes that cross are those of ring algorithms (Thakur et al., 2005): (n - 1) / n of the result of an
  all-gather, and twice that for an all-reduce. Meshes and tori: "How to Scale Your Model", on sharding.

  Args:
    target: the target.
    collectives: its results on one device.
    group: numbers of the devices that exchange with each other.
  """
  n = len(group)
  if n < 2 or not collectives:
    return 0.0
  operation, nbytes = collectives[0].operation, sum(collective.nbytes for collective in collectives)
  share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
  sent = nbytes * share.get(operation, (n - 1) / n)
  if target.kind == "gpu":
    return sent / _network(target, operation, group) + LATENCY * math.log2(n)
  sides = _spanned(target, n)
  reached = target.interconnect * efficiency(target, "interconnect")
  link = reached / (2 * len(_sides(target)))
  hops = sum(side // 2 if ring else side - 1 for side, ring in sides) * LATENCY
  if operation == "collective-permute":
    return sent / link + LATENCY
  if operation.endswith("all-to-all"):
    # A byte passes a quarter of the ring on average, half as much again without a link between its ends.
    longest, ring = max(sides)
    return nbytes * longest / (8 if ring else 4) / link + hops
  return sent / (link * sum(2 if ring else 1 for _, ring in sides)) + hops


def _network(target: Target, operation: str, group: Sequence[int]) -> float:
  """Returns the bytes/s at which each GPU of a group sends."""
  inside = (target.interconnect or target.speeds.get("host", 1.5e10)) * efficiency(target, "interconnect")
  each = _sides(target)[-1]
  together = sum(device // each == group[0] // each for device in group)
  if together == len(group):
    return float(inside)
  # The rings of a host's GPUs leave it by different cards; in an all-to-all, each GPU has its own card.
  cards = 1 if operation.endswith("all-to-all") or operation == "collective-permute" else together
  return float(min(inside, cards * target.speeds.get("network", 2.5e9) * efficiency(target, "interconnect")))


def _sides(target: Target) -> tuple[int, ...]:
  """Returns the sides of a slice in chips; for GPUs, the number of hosts and of the GPUs of each."""
  sides = tuple(int(side) for side in target.topology.rpartition(":")[2].split("x") if side)
  return sides or (1, target.devices)


def _spanned(target: Target, n: int) -> list[tuple[int, bool]]:
  """Returns the chips along each axis of the slice that a group spans, and whether they close a ring."""
  sides = sorted(_sides(target), reverse=True)
  left = math.ceil(n * math.prod(sides) / max(1, target.devices)) if n < target.devices else math.prod(sides)
  spanned = []
  for side in sides:
    taken = min(side, left)
    if taken > 1:
      every = int(target.speeds.get("ring", 0))
      spanned.append((taken, taken == side and bool(every) and side % every == 0))
    left = math.ceil(left / taken)
  return spanned or [(2, True)]
