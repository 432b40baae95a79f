"""Seconds of a product, of bytes in memory, of a collective and of a transfer to the host, on one device."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpjax.planner._targets import Target

# Products of a whole step run at lower clocks than short ones, which end before the card reaches the limit of
# its power: as planned and measured for a deep MLP (step_time_measured_h100.json).
_SUSTAINED = 0.85
# Collectives hold some of a GPU's multiprocessors, and copies some of its bandwidth: a guess, not measured.
_BESIDE = {"gpu": 0.2}
# Shares of published peaks that large work reaches. GPU: products as measured on an H100
# (benchmarks/results/rates_h100.json), memory as in steps of GPT there; between GPUs 370 of 450 GB/s, by
# "How to Scale Your Model". TPU: links 45 of 50 GB/s, by the same book; the others are guesses, for what has
# no cycles.
_REACHED = {
  "gpu": {
    **{"bfloat16": 0.87, "float16": 0.87, "float8": 0.82, "tensorfloat32": 0.8, "float32": 0.78},
    **{"memory": 0.9, "interconnect": 0.8, "kernels": 0.67},
  },
  "tpu": {"memory": 0.9, "interconnect": 0.9, "kernels": 0.5},
}
# Rows and columns of a result that one multiprocessor computes at once, and the share of its rate that this
# reaches: a smaller tile reads more of its operands for each product of two numbers.
_TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.97), (64, 64, 0.7))
_PARTS_OF_K = (1, 2, 4, 8)
_FILL = 64  # the depth K that passes while a tile's pipeline fills
_CONVOLUTION = 0.7  # of the rate of a product
_LINE = 16  # bytes: cuBLAS has slower kernels for matrices whose rows are not whole multiples of them
_UNALIGNED = 2.3
_LAUNCH = {"gpu": 1.1e-6}  # seconds of the smallest kernel of a program, and more of a product's
_START = 1.8e-6
_LATENCY = 1e-6  # seconds of one hop


def efficiency(target: Target, name: str) -> float:
  """Returns the share of a peak that large work reaches, by dtype or `memory`, `interconnect`, `kernels`."""
  reached = _REACHED.get(target.kind, {}).get(name, 0.95 if target.kind == "tpu" else 0.8)
  computes = name not in ("memory", "interconnect") and target.kind == "gpu"
  return reached * (_SUSTAINED if computes else 1)


def product_seconds(
  target: Target, dtype: str, shape: tuple[int, int, int], batch: int = 1, *, convolution: bool = False
) -> float:
  """Returns the seconds that the matrix units take for `batch` products, however fast the memory is.

  On a GPU, tiles of the result are divided over the multiprocessors, and the last round of tiles may leave
  some of them idle; a product of few tiles is divided along K. Without the lower clocks of long steps it
  fits the products that were measured on an H100 within 7% in the mean. On a TPU, K fills the units to a
  multiple of 128.

  Args:
    target: the target.
    dtype: NumPy's name of the operands' dtype, or `tensorfloat32`.
    shape: M, N and K.
    batch: number of products.
    convolution: whether it is a convolution, as a product.
  """
  name, peak = target.unit_rate(dtype)
  rate = peak * efficiency(target, name) * (_CONVOLUTION if convolution and target.kind == "gpu" else 1)
  m, n, k = shape
  if target.kind != "gpu":
    return 2 * batch * m * n * (math.ceil(k / 128) * 128) / rate
  units = int(target.cuda.get("core_count", 100))
  best = math.inf
  for tall, wide, share in _TILES:
    tiles = batch * math.ceil(m / tall) * math.ceil(n / wide)
    for parts in _PARTS_OF_K if tiles < units else (1,):
      depth = k / parts + (_FILL if parts == 1 else 2 * _FILL)
      rounds = math.ceil(tiles * parts / units)
      best = min(best, rounds * units * 2 * tall * wide * depth / (rate * share))
  itemsize = {"float32": 4, "tensorfloat32": 4, "float8": 1}.get(name, 2)
  aligned = convolution or not any(side * itemsize % _LINE for side in (n, k) if side > 1)
  return best * (1 if aligned else _UNALIGNED)


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
  return math.hypot(work, memory) + _LAUNCH["gpu"] + (_START if work else 0.0)


def memory_seconds(target: Target, nbytes: float) -> float:
  """Returns the seconds that the memory takes for bytes read and written.

  On an H100, what fits its cache moves no faster (element-wise operations of 2 to 32 MB), so that none is
  counted.
  """
  return nbytes / (target.bandwidth * efficiency(target, "memory"))


def host_seconds(target: Target, nbytes: float) -> float:
  """Returns the seconds of a transfer between the device and the memory of its host."""
  return nbytes / target.speeds.get("host", 1.5e10)


def beside_share(target: Target) -> float:
  """Returns the share of its hidden seconds by which a collective or copy slows what hides it."""
  return _BESIDE.get(target.kind, 0.0)


def collective_seconds(target: Target, operation: str, nbytes: float, group: Sequence[int]) -> float:
  """Returns the seconds of a collective.

  The bytes that cross are those of ring algorithms (Thakur et al., 2005): (n - 1) / n of the result of an
  all-gather, and twice that for an all-reduce. Meshes and tori: "How to Scale Your Model", on sharding.

  Args:
    target: the target.
    operation: HLO's name for it.
    nbytes: bytes of the result on one device.
    group: numbers of the devices that exchange with each other.
  """
  n = len(group)
  if n < 2:
    return 0.0
  share = {"all-reduce": 2 * (n - 1) / n, "reduce-scatter": n - 1, "collective-permute": 1}
  sent = nbytes * share.get(operation, (n - 1) / n)
  if target.kind == "gpu":
    return sent / _network(target, operation, group) + _LATENCY * math.log2(n)
  sides = _spanned(target, n)
  reached = target.interconnect * efficiency(target, "interconnect")
  link = reached / (2 * len(_sides(target)))
  hops = sum(side // 2 if ring else side - 1 for side, ring in sides) * _LATENCY
  if operation == "collective-permute":
    return sent / link + _LATENCY
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
