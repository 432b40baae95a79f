"""The matrix products and collectives of an optimised program.

A product is a GEMM if a cuBLAS call, a Triton or cuDNN fusion or a TPU's matrix unit computes it. On a GPU,
XLA's own loops compute any other `dot`, without matrix units. A `scaled-dot` multiplies blocks with scales.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from mpjax.jaxpr import taps
from mpjax.planner._results import Collective, Crossing, add_up
from mpjax.planner.compiled._hlo import HloComputation, HloInstruction, HloModule, numpy_name, start_of
from mpjax.planner.compiled._hlo_opcodes import COLLECTIVES
from mpjax.planner.compiled._hlo_parts import path_of_name


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
  times: collections.Counter[HloComputation] = collections.Counter()
  fused: dict[HloComputation, str] = {}
  for computation, count, callers in module.repetitions():
    times[computation] += count
    for caller in callers if kind == "gpu" else ():
      fusion = caller.config.get("fusion_backend_config", {}).get("kind", "")
      if fusion.startswith(("__triton", "__cudnn")):
        fused[computation] = fusion[2:8].rstrip("$")
  found = []
  for computation, count in times.items():
    for instruction in computation.instructions:
      if flops := product_flops(instruction):
        kernel = fused.get(computation, "loop" if kind == "gpu" else "dot")
        if instruction.op == "custom-call":
          kernel = "cublas" if "cublas" in instruction.proto.custom_call_target else "cudnn"
        lhs, rhs = (operand.shapes[0].dtype for operand in instruction.operands[:2])
        found.append(KernelProduct(kernel, (lhs, rhs), flops * count, count, instruction.op_name))
  return found


def counted_flops(module: HloModule) -> int:
  """Returns the products' FLOPs that XLA's cost analysis counts: no libraries' calls, a loop's body once."""
  counted: dict[HloComputation, int] = {}
  for computation in module.computations.values():  # those that are called come first
    counted[computation] = 0
    for instruction in computation.instructions:
      inside = [counted[called] for called in instruction.called]
      counted[computation] += max(inside, default=0) if instruction.op == "conditional" else sum(inside)
      counted[computation] += product_flops(instruction) if instruction.op != "custom-call" else 0
  return counted[module.entry]


def product_flops(instruction: HloInstruction) -> int:
  """Returns the FLOPs of one run of a matrix product or convolution; 0 for other operations."""
  if instruction.op == "convolution" or instruction.proto.custom_call_target.startswith("__cudnn$conv"):
    return _convolution(instruction)
  if (shared := shared_dimensions(instruction)) is None:
    return 0
  lhs, rhs = (operand.shapes[0].dims for operand in instruction.operands[:2])
  return 2 * math.prod(lhs) * math.prod(rhs) // max(1, math.prod(lhs[i] for axes in shared for i in axes))


def shared_dimensions(instruction: HloInstruction) -> tuple[Sequence[int], Sequence[int]] | None:
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
      if chain := [a.value for a in start.proto.frontend_attributes.map if a.key == "chain_id"]:
        key = (*chain, *(caller for caller in callers if caller.op == "while"))
        if key in chains:
          continue
        chains.add(key)
      size = 0 if operation == "collective-permute" else len(group_of(start))
      where = size, path_of_name(start.op_name), times
      found += [Crossing(operation, numpy_name(s.dtype), s.nbytes, *where) for s in instruction.shapes]
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


def _convolution(instruction: HloInstruction) -> int:
  """Returns the FLOPs of a convolution; on a TPU every plain product is one, with a window of one."""
  proto, target = instruction.proto, instruction.proto.custom_call_target
  lhs, rhs = (operand.shapes[0].dims for operand in instruction.operands[:2])
  out = instruction.shapes[0].dims
  # cuDNN's backward calls use the names of the forward call's operands and result.
  if "convBackwardFilter" in target:
    rhs, out = out, rhs
  elif "convBackwardInput" in target:
    lhs, out = out, lhs
  at = proto.convolution_dimension_numbers
  features = out[at.output_batch_dimension] * out[at.output_feature_dimension]
  flops = 2 * features * rhs[at.kernel_input_feature_dimension]
  space = at.input_spatial_dimensions, at.output_spatial_dimensions, proto.window.dimensions
  for i, j, w in zip(*space, strict=True):
    flops *= taps(lhs[i], out[j], w.size, w.stride, w.padding_low, w.base_dilation, w.window_dilation)
  return flops
