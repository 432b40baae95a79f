"""FLOPs of fused kernels: what they state, or the products of a kernel's body on its grid."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mpjax._types import AnyJaxpr, JaxprEqn
from mpjax.jaxpr import (
  CallKind,
  Trait,
  bodies_of,
  call_kind,
  flops,
  has,
  layer_pattern,
  open_jaxpr,
  times_run,
)
from mpjax.planner.analytic import Graph
from mpjax.planner.compiled._hlo import HloInstruction
from mpjax.planner.compiled._hlo_parts import path_of_name

_LEAST_DEPTH, _ROW_START = 104, 640
_TARGETS = ("tpu_custom_call", "__cudnn$fmha", "triton", "mosaic")


def is_kernel(instruction: HloInstruction) -> bool:
  """Returns whether an instruction of a compiled program is a fused kernel."""
  target = instruction.proto.custom_call_target
  return instruction.op == "custom-call" and any(name in target for name in _TARGETS)


def traced_kernels(graph: Graph) -> dict[str, int]:
  """Returns the FLOPs of one run of each fused kernel of a traced program by the pattern of its module."""
  found: dict[str, int] = {}
  for operation, _ in graph.every_operation():
    if has(operation.equation, Trait.KERNEL):
      path = layer_pattern(operation.path)
      found[path] = max(found.get(path, 0), flops(operation.equation) or _on_grid(operation.equation))
  return found


def kernel_flops(kernel: HloInstruction, traced: Mapping[str, int]) -> int:
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
  fitting = [name for name in traced if name and _in_order(name.split("/"), names)]
  return stated or (traced[max(fitting, key=len)] if fitting else 0)


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
  depth = max(_LEAST_DEPTH, kernel.operands[0].shapes[0].dims[-1])
  products = 6 if "Backward" in kernel.proto.custom_call_target else 2
  flops = 2 * products * math.prod(scores[:-1]) * (scores[-1] + _ROW_START) * depth
  return flops // (2 if config.get("mask_type") == "CAUSAL" else 1)


def _on_grid(equation: JaxprEqn) -> int:
  """Returns the FLOPs of a Pallas kernel by its grid; 0 for another, or for a grid that is not known."""
  grid = getattr(equation.params.get("grid_mapping"), "grid", None)
  if grid is None or not all(isinstance(side, int) for side in grid):
    return 0
  return int(math.prod(grid) * _of_body(equation.params["jaxpr"]))


def _of_body(jaxpr: AnyJaxpr) -> float:
  """Returns the FLOPs of a body; a conditional takes its branches equally often, as for a causal mask."""
  total = 0.0
  for equation in open_jaxpr(jaxpr).eqns:
    bodies = [_of_body(body) for body in bodies_of(equation)]
    if bodies and call_kind(equation) is CallKind.COND:
      total += sum(bodies) / len(bodies)
    else:
      total += sum(bodies) * times_run(equation) + flops(equation)
  return total
