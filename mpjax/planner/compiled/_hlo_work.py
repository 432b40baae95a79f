"""What one instruction of an optimised program computes, moves and exchanges."""

from __future__ import annotations

import collections
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax.formats._passes import PASSES
from mpjax.jaxpr import layer_pattern, shape_of, taps
from mpjax.planner._program import Operation, Product, Program, fused_kernel
from mpjax.planner._rates import LEAST_DEPTH, NARROW, ROW_START, SCATTERED
from mpjax.planner._results import Collective
from mpjax.planner.compiled._hlo import (
  COLLECTIVES,
  HOST,
  VIEWS,
  HloComputation,
  HloInstruction,
  chain_id,
  done_of,
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


Shapes = tuple[tuple[int, ...], ...]
# FLOPs by the pattern of a kernel's module and the shapes of its operands and results.
Kernels = Mapping[tuple[str, Shapes], float]
_TARGETS = ("tpu_custom_call", "__cudnn$fmha", "triton", "mosaic")
_SENTINEL = 1 << 62  # the compiler writes 2^63 - 1 where it has no estimate
_FREE = VIEWS | {"parameter", "constant", "partition-id", "replica-id", "iota", "async-update"}
_COPIES = VIEWS | {"constant", "copy", "fusion", "parameter", "slice", "transpose"}
_PART = frozenset({"dynamic-slice", "gather", "slice"})
_SEES = frozenset({"bitcast", "get-tuple-element"})


def traced_kernels(program: Program) -> Kernels:
  """Returns the FLOPs of one run of each kernel of a traced program; the mean of those that look alike."""
  found: dict[tuple[str, Shapes], list[float]] = collections.defaultdict(list)
  for operation, _ in program.each():
    if operation.part == "attention kernels":
      shapes = tuple(shape_of(value) for value in (*operation.origin.invars, *operation.origin.outvars))
      found[layer_pattern(operation.path), shapes].append(operation.flops * operation.devices)
  return {place: statistics.mean(several) for place, several in found.items()}


def set_work(
  operation: Operation, starts: bool, scope: HloComputation, kind: str, kernels: Kernels
) -> HloInstruction:
  """Sets what an operation computes, moves and exchanges, and returns the instruction that says its module.

  Args:
    operation: an operation.
    starts: whether others run until another operation that awaits it.
    scope: the computation that it is in.
    kind: kind of the platform.
    kernels: FLOPs of fused kernels.
  """
  instruction: HloInstruction = operation.origin
  if instruction.op in _FREE or instruction.op.endswith("-done"):
    return instruction
  inner = list(_inside(instruction))
  products = [(made, one) for one, fusions in inner if (made := product_of(one, fusions, kind)) is not None]
  operation.products = [made for made, _ in products]
  for one, _ in inner:
    # On a TPU, fusions that compute during a collective repeat it, with its chain.
    if one.op.removesuffix("-start") in COLLECTIVES and (starts or not chain_id(one)):
      operation.part, operation.members = "collectives", group_of(one)
      operation.collectives = [*_results(one, instruction, scope, starts)]
      operation.queue = f"collectives{_way(instruction)}" * starts
      return one
  if starts:
    _set_copy(operation, scope)
    return instruction
  operation.moved = moved_bytes(instruction)
  cycles = int(instruction.config.get("window_config", {}).get("estimated_cycles", _SENTINEL))
  operation.cycles = cycles if cycles < _SENTINEL else None
  if instruction.op == "custom-call" and any(n in instruction.proto.custom_call_target for n in _TARGETS):
    narrow = any(shape.dtype.startswith("f8") for operand in instruction.operands for shape in operand.shapes)
    operation.part = "attention kernels"
    operation.products = [fused_kernel(_kernel_flops(instruction, kernels), narrow)]
  elif products:
    largest, speaker = max(products, key=lambda product: product[0].flops)
    operation.part = "convolutions" if largest.convolution else "products"
    return speaker
  elif {one.op for one, _ in inner} <= _COPIES:
    operation.part = "copies"
  elif kind != "tpu" or instruction.op != "custom-call" or cycles < _SENTINEL:  # else a compiler's mark
    operation.part = "element-wise"
  return instruction


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


def _results(
  collective: HloInstruction, instruction: HloInstruction, scope: HloComputation, starts: bool
) -> Iterator[Collective]:
  """Yields the results of a collective that an instruction is or has, at its end if that is another one."""
  operation = collective.op.removesuffix("-start")
  end = done_of(instruction, scope) if collective is instruction and starts else None
  shapes = (end or collective).shapes
  if operation == "all-reduce" and not starts and _nbytes(instruction) < _nbytes(collective):
    operation, shapes = "reduce-scatter", instruction.shapes  # each device keeps its share
  size = 0 if operation == "collective-permute" else len(group_of(collective))
  for s in shapes:
    yield Collective(operation, numpy_name(s.dtype), s.nbytes, 1, (path_of_name(collective.op_name),), size)


def _set_copy(operation: Operation, scope: HloComputation) -> None:
  """Sets the bytes of a copy that an instruction starts: to or from the host, or on the device."""
  start = operation.origin
  nbytes = sum(shape.nbytes for shape in (done_of(start, scope) or start).shapes)
  spaces = [shape.space for shape in start.shapes]
  root = start.called[0].root if start.called else None
  operation.part = "host" if HOST in spaces else "copies"
  if HOST in spaces and root is not None and root.op == "dynamic-update-slice":
    nbytes = sum(shape.nbytes for shape in root.operands[1].shapes)
  operation.moved = nbytes * (2 if spaces[:2] == [0, 0] else 1)
  if root is not None and operation.part == "copies":
    operation.moved = moved_bytes(root) or operation.moved
  operation.queue = operation.part + _way(start)


def product_of(
  instruction: HloInstruction, fusions: Sequence[HloInstruction] = (), kind: str = "gpu"
) -> Product | None:
  """Returns the product that an instruction in some fusions is, or `None`.

  A product is a GEMM if a cuBLAS call, a Triton or cuDNN fusion or a TPU's matrix unit computes it. On a GPU,
  XLA's own loops compute any other `dot`, without matrix units. A `scaled-dot` multiplies blocks with scales.
  """
  target = instruction.proto.custom_call_target
  is_convolution = instruction.op == "convolution" or target.startswith("__cudnn$conv")
  product = _convolution(instruction) if is_convolution else _matrix_product(instruction)
  if product is None:
    return None
  lhs, rhs = (operand.shapes[0].dtype for operand in instruction.operands[:2])
  kernel = _kernel_of(instruction, fusions) if kind == "gpu" else "dot"
  return product._replace(kernel=kernel, operands=(lhs, rhs))


def _kernel_of(product: HloInstruction, around: Sequence[HloInstruction]) -> str:
  """Returns what computes a product on a GPU, by its own target or the fusion that it is in."""
  fusions = [caller.config.get("fusion_backend_config", {}).get("kind", "") for caller in around]
  for name in (product.proto.custom_call_target, *reversed(fusions)):
    if found := _KERNELS.match(name):
      return found[1]
  return "loop"


def _matrix_product(instruction: HloInstruction) -> Product | None:
  proto, target = instruction.proto, instruction.proto.custom_call_target
  if (dimensions := _shared_dimensions(instruction)) is None:
    return None
  precision: Sequence[Any] = proto.precision_config.operand_precision
  if target:
    config = instruction.config["gemm_backend_config"].get("precision_config", {})
    precision = config.get("operand_precision", ())
  lhs, rhs = (operand.shapes[0] for operand in instruction.operands[:2])
  k, many = (math.prod(lhs.dims[i] for i in axes) for axes in dimensions)
  shared = max(1, k * many)
  shape = (math.prod(lhs.dims) // shared, math.prod(rhs.dims) // shared, k)
  dtype, passes = _dtype(lhs.dtype, rhs.dtype, precision), 1
  algorithm = proto.precision_config.algorithm
  if algorithm in _ALGORITHMS:
    dtype, passes, _ = PASSES[_ALGORITHMS[algorithm]]
  elif algorithm == _FLOAT32:
    dtype = "float32"
  return Product(dtype, shape, many, 2 * many * math.prod(shape), passes=passes)


def _shared_dimensions(instruction: HloInstruction) -> tuple[Sequence[int], Sequence[int]] | None:
  """Returns the left operand's contracted and batch dimensions; `None` for what is not a matrix product."""
  numbers = instruction.proto.dot_dimension_numbers
  if instruction.op in ("dot", "scaled-dot"):
    return numbers.lhs_contracting_dimensions, numbers.lhs_batch_dimensions
  if not instruction.proto.custom_call_target.startswith("__cublas$"):
    return None
  found = instruction.config.get("gemm_backend_config", {}).get("dot_dimension_numbers")
  if found is None:  # as a triangular solve
    return None
  return [*map(int, found["lhs_contracting_dimensions"])], [*map(int, found["lhs_batch_dimensions"])]


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
      updates = sum(shape.nbytes for user in users for update in user.operands[2:] for shape in update.shapes)
      written += SCATTERED * updates - min(written, operands[i])
      operands[i] = 0
  return sum(operands) + written


def _nbytes(instruction: HloInstruction) -> int:
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)


def _kernel_flops(kernel: HloInstruction, traced: Kernels) -> float:
  """Returns the FLOPs of one run of a kernel of a compiled program, 0 if they are not known.

  Args:
    kernel: a kernel's call.
    traced: what `traced_kernels` returns.
  """
  config = kernel.config
  if "cudnn_fmha_backend_config" in config:
    return _attention(kernel, config["cudnn_fmha_backend_config"])
  stated = int(config.get("custom_call_config", {}).get("cost_estimate", {}).get("flops", 0))
  path = layer_pattern(path_of_name(kernel.op_name))
  names = path.split("/")
  shapes = tuple(shape.dims for value in (*kernel.operands, kernel) for shape in value.shapes)
  fitting = [at for at in traced if at[0] and _in_order(at[0].split("/"), names)]
  # A module may have several: then the one of its shapes.
  best = max(fitting, key=lambda at: (len(at[0]), at[1] == shapes, traced[at]), default=None)
  return stated or (traced[best] if best else 0)


def _in_order(few: list[str], many: list[str]) -> bool:
  """Returns whether all names are among others, in their order, the last one last."""
  left = iter(many)
  return few[-1] == many[-1] and all(name in left for name in few)


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
