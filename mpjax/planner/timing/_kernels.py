"""FLOPs of fused kernels: what they state, or the products of a kernel's body on its grid."""

from __future__ import annotations

import collections
import math
import statistics
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
  shape_of,
  times_run,
)
from mpjax.planner.analytic import Graph
from mpjax.planner.compiled._hlo import HloInstruction, path_of_name
from mpjax.planner.timing._rates import LEAST_DEPTH, ROW_START

Shapes = tuple[tuple[int, ...], ...]
# FLOPs by the pattern of a kernel's module and the shapes of its operands and results.
Kernels = Mapping[tuple[str, Shapes], float]
_TARGETS = ("tpu_custom_call", "__cudnn$fmha", "triton", "mosaic")


def is_kernel(instruction: HloInstruction) -> bool:
  """Returns whether an instruction of a compiled program is a fused kernel."""
  target = instruction.proto.custom_call_target
  return instruction.op == "custom-call" and any(name in target for name in _TARGETS)


def traced_kernels(graph: Graph) -> Kernels:
  """Returns the FLOPs of one run of each kernel of a traced program; the mean of those that look alike."""
  found: dict[tuple[str, Shapes], list[float]] = collections.defaultdict(list)
  for operation, _ in graph.every_operation():
    equation = operation.equation
    if has(equation, Trait.KERNEL):
      shapes = tuple(shape_of(value) for value in (*equation.invars, *equation.outvars))
      found[layer_pattern(operation.path), shapes].append(traced_flops(equation))
  return {place: statistics.mean(several) for place, several in found.items()}


def traced_flops(equation: JaxprEqn) -> int:
  """Returns the FLOPs of one run of a fused kernel: what it states, or those of its body on its grid."""
  return flops(equation) or _on_grid(equation)


def kernel_flops(kernel: HloInstruction, traced: Kernels) -> float:
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
