"""What one instruction of a compiled program computes, moves and exchanges."""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.formats import PASSES
from mpjax.jaxpr import layer_pattern, shape_of, taps
from mpjax.planner._program import Operation, Product, Program, fused_kernel
from mpjax.planner._results import Collective
from mpjax.planner._time import LEAST_DEPTH, NARROW, ROW_START, SCATTERED
from mpjax.planner.compiled._hlo import (
  COLLECTIVES,
  HOST,
  VIEWS,
  HloInstruction,
  chain_id,
  numpy_name,
  path_of_name,
)

# The numbers of XLA's algorithms of products (`PrecisionConfig.Algorithm` in `xla/xla_data.proto`), as in
# compiled programs, and their names in JAX.
_ALGORITHMS = {
  **{6: "BF16_BF16_F32", 7: "BF16_BF16_F32_X3", 8: "BF16_BF16_F32_X6", 13: "BF16_BF16_F32_X9"},
  **{9: "TF32_TF32_F32", 10: "TF32_TF32_F32_X3"},
}
_FLOAT32 = 11
_KERNELS = re.compile("__(cublas|cudnn|triton)")
_HIGHEST = 2

_TARGETS = ("tpu_custom_call", "__cudnn$fmha", "triton", "mosaic")
_SENTINEL = 1 << 62  # the compiler writes 2^63 - 1 where it has no estimate
_FREE = VIEWS | {"parameter", "constant", "partition-id", "replica-id", "iota", "async-update"}
_COPIES = VIEWS | {"constant", "copy", "fusion", "parameter", "slice", "transpose"}
_PART = frozenset({"dynamic-slice", "gather", "slice"})
_SEES = frozenset({"bitcast", "get-tuple-element"})


def set_work(
  operation: Operation, kind: str, starts: bool, end: HloInstruction, chains: set[str]
) -> HloInstruction:
  """Sets what an operation computes, moves and exchanges; returns the instruction that says its module.

  Args:
    operation: an operation.
    kind: kind of the platform.
    starts: whether others run until another operation that awaits it.
    end: the instruction that has its result.
    chains: the chains of a TPU's collectives that count already; those of this operation are added.
  """
  instruction: HloInstruction = operation.origin
  if instruction.op in _FREE or instruction.op.endswith("-done"):
    return instruction
  inner = list(_inside(instruction))
  made = [(product_of(one, fusions, kind), one) for one, fusions in inner]
  products = [(product, one) for product, one in made if product is not None]
  operation.products = [product for product, _ in products]
  for one in (one for one, _ in inner if one.op.removesuffix("-start") in COLLECTIVES):
    # On a TPU, several fusions that compute during a collective repeat it, with its chain.
    if (chain := chain_id(one)) and not starts:
      if chain not in chains:
        operation.collectives = [*operation.collectives, *_collectives(one, one, False)]
      chains.add(chain)
      continue
    chains.add(chain)
    whole = end if one is instruction else one
    is_share = not starts and _bytes(instruction) < _bytes(whole)
    operation.part, operation.members = "collectives", group_of(one)
    operation.collectives = _collectives(one, instruction if is_share else whole, is_share)
    operation.queue = f"collectives{_way(instruction)}" * starts
    return one
  if starts:
    _set_copy(operation, end)
    return instruction
  narrow = any(shape.dtype.startswith("f8") for shape in instruction.shapes)
  operation.moved = _moved(instruction) * (NARROW if narrow else 1)
  cycles = int(instruction.config.get("window_config", {}).get("estimated_cycles", _SENTINEL))
  operation.cycles = cycles if cycles < _SENTINEL else None
  if products:
    largest, speaker = max(products, key=lambda product: product[0].flops)
    operation.part = "convolutions" if largest.convolution else "products"
    operation.part = "attention kernels" if largest.kernel == "fused" else operation.part
    return speaker
  if {one.op for one, _ in inner} <= _COPIES:
    operation.part = "copies"
  elif kind != "tpu" or instruction.op != "custom-call" or cycles < _SENTINEL:
    operation.part = "element-wise"  # else a compiler's mark
  return instruction


def kernel_flops(program: Program) -> dict[str, int]:
  """Returns the FLOPs of matrix products by kernel and operand dtypes, such as `cublas: bf16 x bf16`."""
  counts: collections.Counter[str] = collections.Counter()
  for operation, times in program.each():
    for product in operation.products:
      if product.operands:
        counts[f"{product.kernel}: {' x '.join(product.operands)}"] += int(product.flops * times)
  return {name: n for name, n in counts.most_common() if n}


def state_kernels(program: Program, traced: Program) -> None:
  """Gives kernels that state no FLOPs those of the traced kernels of their modules and shapes."""
  stated: dict[tuple[str, Any], list[float]] = collections.defaultdict(list)
  for operation, _ in traced.each():
    if operation.part == "attention kernels" and operation.path:
      shapes = tuple(shape_of(value) for value in (*operation.origin.invars, *operation.origin.outvars))
      stated[layer_pattern(operation.path), shapes].append(operation.flops * operation.devices)
  for operation, _ in program.each():
    if operation.part == "attention kernels" and not operation.flops:
      kernel, names = operation.origin, layer_pattern(operation.path).split("/")
      shapes = tuple(shape.dims for value in (*kernel.operands, kernel) for shape in value.shapes)
      fitting = [at for at in stated if _in_order(at[0].split("/"), names)]
      if best := max(fitting, key=lambda at: (len(at[0]), at[1] == shapes, stated[at]), default=None):
        operation.products = [operation.products[0]._replace(flops=statistics.mean(stated[best]))]


def _in_order(few: list[str], many: list[str]) -> bool:
  """Returns whether all names are among others, in their order, the last one last."""
  left = iter(many)
  return few[-1] == many[-1] and all(name in left for name in few)


def _inside(
  instruction: HloInstruction, fusions: tuple[HloInstruction, ...] = ()
) -> Iterator[tuple[HloInstruction, tuple[HloInstruction, ...]]]:
  """Yields an instruction and those that it is made of, each with the fusions around it."""
  yield instruction, fusions
  # What a TPU's SparseCore runs is a custom call in an asynchronous operation.
  if instruction.op in ("fusion", "async-start") or (instruction.op == "custom-call" and fusions):
    for called in instruction.called:
      for inner in called.instructions:
        yield from _inside(inner, (*fusions, instruction))


def _collectives(one: HloInstruction, result: HloInstruction, is_share: bool) -> list[Collective]:
  """Returns a collective by its results; an all-reduce of which each device keeps its share scatters."""
  operation = one.op.removesuffix("-start")
  operation = "reduce-scatter" if is_share and operation == "all-reduce" else operation
  size = 0 if operation == "collective-permute" else len(group_of(one))
  return [
    Collective(operation, numpy_name(s.dtype), s.nbytes, 1, (path_of_name(one.op_name),), size)
    for s in result.shapes
  ]


def _set_copy(operation: Operation, end: HloInstruction) -> None:
  """Sets the bytes of a copy that an operation starts: to or from the host, or on the device."""
  start = operation.origin
  spaces = [shape.space for shape in start.shapes]
  root = start.called[0].root if start.called else start
  operation.part = "host" if HOST in spaces else "copies"
  result = root.operands[1] if root.op == "dynamic-update-slice" and HOST in spaces else end
  operation.moved = _bytes(result)
  if operation.part == "copies":
    twice = operation.moved * (2 if spaces[:2] == [0, 0] else 1)
    operation.moved = (root is not start and _moved(root)) or twice
  operation.queue = operation.part + _way(start)


def product_of(
  instruction: HloInstruction, fusions: Sequence[HloInstruction] = (), kind: str = "gpu"
) -> Product | None:
  """Returns the product or the fused kernel that an instruction in some fusions is, or `None`.

  A product is a GEMM if a cuBLAS call, a Triton or cuDNN fusion or a TPU's matrix unit computes it. On a GPU,
  XLA's own loops compute any other `dot`, without matrix units. A `scaled-dot` multiplies blocks with scales.
  """
  target = instruction.proto.custom_call_target
  if any(name in target for name in _TARGETS):
    narrow = any(s.dtype.startswith("f8") for operand in instruction.operands for s in operand.shapes)
    return fused_kernel(_kernel_flops(instruction), narrow)
  is_convolution = instruction.op == "convolution" or target.startswith("__cudnn$conv")
  product = _convolution(instruction) if is_convolution else _matrix_product(instruction)
  if product is None:
    return None
  names = [caller.config.get("fusion_backend_config", {}).get("kind", "") for caller in reversed(fusions)]
  computes = (found[1] for name in (target, *names) if (found := _KERNELS.match(name)))
  lhs, rhs = (operand.shapes[0].dtype for operand in instruction.operands[:2])
  kernel = next(computes, "loop") if kind == "gpu" else "dot"
  return product._replace(kernel=kernel, operands=(lhs, rhs))


def _matrix_product(instruction: HloInstruction) -> Product | None:
  proto, gemm = instruction.proto, instruction.config.get("gemm_backend_config", {})
  precision, numbers = proto.precision_config.operand_precision, gemm.get("dot_dimension_numbers")
  if instruction.op in ("dot", "scaled-dot"):
    numbers = proto.dot_dimension_numbers
    contracted, batch = numbers.lhs_contracting_dimensions, numbers.lhs_batch_dimensions
  elif proto.custom_call_target.startswith("__cublas$") and numbers:  # a triangular solve has none
    contracted, batch = (map(int, numbers[f"lhs_{of}_dimensions"]) for of in ("contracting", "batch"))
    precision = gemm.get("precision_config", {}).get("operand_precision", ())
  else:
    return None
  lhs, rhs = (operand.shapes[0] for operand in instruction.operands[:2])
  k, many = (math.prod(lhs.dims[i] for i in axes) for axes in (contracted, batch))
  shared = max(1, k * many)
  shape = (math.prod(lhs.dims) // shared, math.prod(rhs.dims) // shared, k)
  dtype, passes = _dtype(lhs.dtype, rhs.dtype, precision), 1
  algorithm = proto.precision_config.algorithm
  if algorithm in _ALGORITHMS:
    dtype, passes, _ = PASSES[_ALGORITHMS[algorithm]]
  elif algorithm == _FLOAT32:
    dtype = "float32"
  return Product(dtype, shape, many, 2 * many * math.prod(shape), passes=passes)


def group_of(collective: HloInstruction) -> Sequence[int]:
  """Returns the numbers of the devices of the first group; empty if the program does not state them."""
  proto = collective.proto
  if listed := proto.replica_groups or proto.collective_device_list.replica_groups:
    return tuple(listed[0].replica_ids)
  for iota in (proto.iota_replica_groups, proto.collective_device_list.iota_replica_group_list):
    if n := iota.num_devices_per_group:
      sides = tuple(iota.iota_reshape_dims) or (iota.num_replica_groups * n,)
      return _first_group(sides, tuple(iota.iota_transpose_perm) or range(len(sides)), n)
  if groups := proto.mesh_replica_groups.axes:
    # An axis of which a part is exchanged is three: before it, the part, and after it.
    parts = {axis.mesh_axis_index: axis.sub_axis_info for axis in groups}
    sizes: list[int] = []
    for i, axis in enumerate(proto.mesh_replica_groups.mesh.axes):
      before, size = (parts[i].pre_size or 1, parts[i].size or axis.size) if i in parts else (axis.size, 1)
      sizes += [before, size, axis.size // (before * size)]
    exchanged = [3 * i + 1 for i in sorted(parts)]
    kept = [i for i in range(len(sizes)) if i not in exchanged]
    return _first_group(sizes, [*kept, *exchanged], math.prod(sizes[i] for i in exchanged))
  return next(((pair.source, pair.target) for pair in proto.source_target_pairs), ())


def _first_group(sides: Sequence[int], order: Sequence[int], n: int) -> tuple[int, ...]:
  """Returns the first `n` devices of a mesh whose sides are put in an order."""
  devices = np.arange(math.prod(sides)).reshape(sides).transpose(order)
  return tuple(devices.reshape(-1, n)[0].tolist())


def _convolution(instruction: HloInstruction) -> Product:
  """Returns a convolution as a product; on a TPU every plain product is one, with a window of one."""
  proto, target = instruction.proto, instruction.proto.custom_call_target
  lhs, rhs = (operand.shapes[0] for operand in instruction.operands[:2])
  result = instruction.shapes[0].dims
  images, weights, out = lhs.dims, rhs.dims, result
  # cuDNN's backward calls use the names of the forward call's operands and result.
  if "convBackwardFilter" in target:
    weights, out = out, weights
  elif "convBackwardInput" in target:
    images, out = out, images
  at = proto.convolution_dimension_numbers
  features, wide = out[at.output_feature_dimension], weights[at.kernel_input_feature_dimension]
  flops = 2 * out[at.output_batch_dimension] * features * wide
  space = at.input_spatial_dimensions, at.output_spatial_dimensions, proto.window.dimensions
  for i, j, w in zip(*space, strict=True):
    flops *= taps(images[i], out[j], w.size, w.stride, w.padding_low, w.base_dilation, w.window_dilation)
  named = "conv_general" in instruction.op_name or bool(target)
  # Units multiply with the padding; a batch of products is a window, of which each result meets one element.
  padded = 2 * math.prod(out) * math.prod(weights) // max(1, features) if named else flops
  columns = max(1, wide if "convBackwardInput" in target else features)
  rows = max(1, math.prod(result) // columns)
  shape = (rows, columns, max(1, padded // (2 * rows * columns)))
  return Product(
    _dtype(lhs.dtype, rhs.dtype, proto.precision_config.operand_precision), shape, 1, flops, named
  )


def _dtype(lhs: str, rhs: str, precision: Sequence[Any]) -> str:
  """Returns the dtype in which a GPU multiplies: TensorFloat-32 for float32 below the highest precision."""
  if "f32" in (lhs, rhs):
    return "float32" if any(p in (_HIGHEST, "HIGHEST") for p in precision) else "tensorfloat32"
  return numpy_name(lhs)


def _way(start: HloInstruction) -> str:
  """Returns the way that a transfer goes; host and device, and neighbours, send both ways at once."""
  if start.op == "collective-permute-start":
    pairs = start.proto.source_target_pairs
    return " up" if sum(pair.target > pair.source for pair in pairs) * 2 > len(pairs) else " down"
  result = start.called[0].root if start.called else start
  return " out" if result.shapes and result.shapes[0].space == HOST else ""


def _moved(instruction: HloInstruction) -> int:
  """Returns the bytes of the device's memory that an instruction reads and writes.

  An operand that is only sliced or gathered from counts by the part that is read, and one that is updated in
  place by its updates.
  """
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
  for i, parameter in enumerate(scope.parameters()[: len(operands)]):
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
      updates = sum(_bytes(update) for user in users for update in user.operands[2:])
      written += SCATTERED * updates - min(written, operands[i])
      operands[i] = 0
  return sum(operands) + written


def _bytes(instruction: HloInstruction) -> int:
  """Returns the bytes of the results in any memory."""
  return sum(shape.nbytes for shape in instruction.shapes)


def _nbytes(instruction: HloInstruction) -> int:
  """Returns the bytes of the results in the device's main memory."""
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)


def _kernel_flops(kernel: HloInstruction) -> float:
  """Returns the FLOPs of one run of a kernel of a compiled program, 0 if it does not state them."""
  config = kernel.config
  if "cudnn_fmha_backend_config" in config:
    return _attention(kernel, config["cudnn_fmha_backend_config"])
  return int(config.get("custom_call_config", {}).get("cost_estimate", {}).get("flops", 0))


def _attention(kernel: HloInstruction, config: Mapping[str, Any]) -> int:
  """Returns the FLOPs of cuDNN's attention as they were measured on an H100, in terms of the units' work.

  Forward two products, backward five, which take as long as six. A head narrower than 104 takes as long
  as one of 104: the exponentials. Half the scores if it is causal. A row of T scores takes as long as T + 640
  at the rate of long rows.
  """
  scores = [int(n) for n in config["intermediate_tensor_shape"]["dimensions"]]
  depth = max(LEAST_DEPTH, kernel.operands[0].shapes[0].dims[-1])
  products = 6 if "Backward" in kernel.proto.custom_call_target else 2
  flops = 2 * products * math.prod(scores[:-1]) * (scores[-1] + ROW_START) * depth
  return flops // (2 if config.get("mask_type") == "CAUSAL" else 1)
