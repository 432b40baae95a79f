"""The matrix products and collectives of an optimised program.

A product is a GEMM if a cuBLAS call, a Triton or cuDNN fusion or a TPU's matrix unit computes it. On a GPU,
XLA's own loops compute any other `dot`, without matrix units. A `scaled-dot` multiplies blocks with scales.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax.formats._passes import PASSES
from mpjax.jaxpr import taps
from mpjax.planner._results import Collective, add_up
from mpjax.planner.compiled._hlo import (
  COLLECTIVES,
  HloInstruction,
  HloModule,
  numpy_name,
  path_of_name,
  start_of,
)
from mpjax.planner.compiled._hlo_program import chain_id

# The numbers of XLA's algorithms of products (`PrecisionConfig.Algorithm` in `xla/xla_data.proto`), as in
# compiled programs, and their names in JAX.
_ALGORITHMS = {
  **{6: "BF16_BF16_F32", 7: "BF16_BF16_F32_X3", 8: "BF16_BF16_F32_X6", 13: "BF16_BF16_F32_X9"},
  **{9: "TF32_TF32_F32", 10: "TF32_TF32_F32_X3"},
}
_FLOAT32 = 11
_KERNELS = re.compile("__(cublas|cudnn|triton)")
_HIGHEST = 2


class KernelProduct(NamedTuple):
  """One matrix product.

  Attributes:
    kernel: `cublas`, `triton` or `cudnn`; `loop` for a product that is not a GEMM; `dot` on a TPU or CPU.
    dtypes: HLO's names of its operands' dtypes.
    flops: FLOPs of all repetitions.
    times: how often it runs; a loop of unknown length counts once.
    op: its place in the traced program.
  """

  kernel: str
  dtypes: tuple[str, str]
  flops: int
  times: int
  op: str


def kernel_products(module: HloModule, kind: str = "gpu") -> list[KernelProduct]:
  """Returns every matrix product of a program for a `kind` of platform: `gpu`, `tpu` or `cpu`."""
  found = []
  for computation, times, callers in module.repetitions():
    for instruction in computation.instructions:
      if (product := product_of(instruction)) and product.flops:
        kernel = _kernel_of(instruction, callers) if kind == "gpu" else "dot"
        lhs, rhs = (operand.shapes[0].dtype for operand in instruction.operands[:2])
        found.append(KernelProduct(kernel, (lhs, rhs), product.flops * times, times, instruction.op_name))
  return found


def _kernel_of(product: HloInstruction, callers: Sequence[HloInstruction]) -> str:
  """Returns what computes a product on a GPU, by its own target or the fusion that it is in."""
  fusions = [caller.config.get("fusion_backend_config", {}).get("kind", "") for caller in callers]
  for name in (product.proto.custom_call_target, *reversed(fusions)):
    if found := _KERNELS.match(name):
      return found[1]
  return "loop"


class Product(NamedTuple):
  """Matrix products of one instruction, or a convolution as a product.

  Attributes:
    dtype: NumPy's name of the dtype in which a GPU multiplies.
    shape: M, N, K as the units multiply, for a convolution with its padding.
    batch: number of products.
    flops: FLOPs of all of them, without padding.
    convolution: whether the traced program has it as a convolution.
    passes: number of products in `dtype` that make up one of float32 operands.
  """

  dtype: str
  shape: tuple[int, int, int]
  batch: int
  flops: int
  convolution: bool = False
  passes: int = 1


def product_of(instruction: HloInstruction) -> Product | None:
  """Returns the product that an instruction is, or `None`."""
  proto, target = instruction.proto, instruction.proto.custom_call_target
  if instruction.op == "convolution" or target.startswith("__cudnn$conv"):
    return _convolution(instruction)
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


def collectives(module: HloModule) -> tuple[Collective, ...]:
  """Returns the collectives of one step: the bytes of the results on each device, by operation and dtype."""
  found, chains = [], set()
  for computation, times, callers in module.repetitions():
    for instruction in computation.instructions:
      operation = instruction.op.removesuffix("-done")
      if operation not in COLLECTIVES:
        continue
      start = instruction if instruction.op == operation else start_of(instruction)
      # On a TPU, several fusions that compute during one collective each repeat it; they share its chain.
      if chain := chain_id(start):
        key = (chain, *(caller for caller in callers if caller.op == "while"))
        if key in chains:
          continue
        chains.add(key)
      size = 0 if operation == "collective-permute" else len(group_of(start))
      path = path_of_name(start.op_name)
      found += [
        Collective(operation, numpy_name(s.dtype), s.nbytes * times, times, (path,), size)
        for s in instruction.shapes
      ]
  return add_up(found)


def group_of(collective: HloInstruction) -> Sequence[int]:
  """Returns the numbers of the devices of the first group; empty if the program does not state them."""
  proto = collective.proto
  listed = proto.replica_groups or proto.collective_device_list.replica_groups
  if listed:
    return tuple(listed[0].replica_ids)
  for iota in (proto.iota_replica_groups, proto.collective_device_list.iota_replica_group_list):
    if iota.num_devices_per_group:
      sides = tuple(iota.iota_reshape_dims) or (iota.num_replica_groups * iota.num_devices_per_group,)
      order = tuple(iota.iota_transpose_perm) or tuple(range(len(sides)))
      devices = np.arange(np.prod(sides)).reshape(sides).transpose(order)
      return tuple(devices.reshape(-1, iota.num_devices_per_group)[0].tolist())
  groups = proto.mesh_replica_groups
  if groups.axes:
    # An axis of which a part is exchanged is three: before it, the part, and after it.
    parts = {axis.mesh_axis_index: axis.sub_axis_info for axis in groups.axes}
    sizes: list[int] = []
    exchanged: list[int] = []
    for i, axis in enumerate(groups.mesh.axes):
      before, size = (parts[i].pre_size or 1, parts[i].size or axis.size) if i in parts else (axis.size, 1)
      exchanged += [len(sizes) + 1] if i in parts else []
      sizes += [before, size, axis.size // (before * size)]
    devices = np.arange(np.prod(sizes)).reshape(sizes)
    kept = [i for i in range(len(sizes)) if i not in exchanged]
    return tuple(
      devices.transpose(*kept, *exchanged).reshape(-1, np.prod([sizes[i] for i in exchanged]))[0].tolist()
    )
  if proto.source_target_pairs:
    pair = proto.source_target_pairs[0]
    return (pair.source, pair.target)
  return ()


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
