"""A program's matrix products, whether a target runs them at full rate, its fused kernels and collectives."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import formats
from mpjax._types import JaxprEqn
from mpjax.formats._passes import passes_of
from mpjax.jaxpr import Trait, dtype_of, facts, has, is_recomputation, layer_pattern, shape_of
from mpjax.planner._results import Collective, ProductGroup, add_up
from mpjax.planner._targets import Target
from mpjax.planner.analytic._graph import Graph, GraphOperation
from mpjax.products import Spec, is_fp8, plain_primitive

# The number of bfloat16 passes of a TPU for a float32 product, by precision.
_TPU_PASSES = {"": 1, "HIGH": 3, "HIGHEST": 6}


def list_products(
  graph: Graph, target: Target, devices: int = 1, *, least: bool = False
) -> tuple[ProductGroup, ...]:
  """Returns products, then fused kernels, one row for each line, shape and dtype; the most FLOPs first.

  Args:
    graph: graph of the program.
    target: the target with the matrix units.
    devices: number of devices that share the FLOPs.
    least: count the branch of a conditional with the least FLOPs, not the one with the most.
  """
  flops: Counter[ProductGroup] = Counter()
  runs: Counter[ProductGroup] = Counter()
  for operation, times in graph.every_operation(choose=min if least else max):
    is_kernel = has(operation.equation, Trait.KERNEL)
    if is_kernel or operation.flops:
      row = _kernel(operation) if is_kernel else _product(operation, target)
      flops[row] += int(operation.flops_on(devices) * times)
      runs[row] += times
  rows = [
    dataclasses.replace(row, flops=count, batch=runs[row] if row.kernel else row.batch)
    for row, count in flops.items()
  ]
  return tuple(sorted(rows, key=lambda row: (bool(row.kernel), -row.flops)))


def model_flops(graph: Graph, devices: int = 1) -> int:
  """Returns the FLOPs of products and kernels on one device, without those of a recomputation.

  Args:
    graph: graph of the program.
    devices: number of devices that share the FLOPs.
  """
  return sum(
    int(operation.flops_on(devices) * times)
    for operation, times in graph.every_operation()
    if operation.flops and not is_recomputation(operation.equation)
  )


def product_sizes(operation: GraphOperation) -> tuple[int, int, int]:
  """Returns M, N, K of one product [M, K] x [K, N]; for a convolution, of the product that computes it."""
  equation = operation.equation
  out = shape_of(equation.outvars[0])
  if "lhs_dilation" in equation.params:
    spec = equation.params["dimension_numbers"]
    groups = equation.params["feature_group_count"] * equation.params["batch_group_count"]
    kernel = shape_of(equation.invars[1])
    features = out[spec.out_spec[1]]
    n = features // groups
    return math.prod(out) // max(1, features), n, math.prod(kernel) // max(1, kernel[spec.rhs_spec[0]])
  if "ragged_dot_dimension_numbers" in equation.params:
    m, n = out[0], out[-1]
    return m, n, operation.flops // max(1, 2 * m * n)
  (contracted, rhs_contracted), (batch, rhs_batch) = equation.params["dimension_numbers"]
  lhs, rhs = map(shape_of, equation.invars[:2])
  m = math.prod(d for i, d in enumerate(lhs) if i not in {*contracted, *batch})
  n = math.prod(d for i, d in enumerate(rhs) if i not in {*rhs_contracted, *rhs_batch})
  return m, n, math.prod(lhs[i] for i in contracted)


class Units(NamedTuple):
  """The dtype in which matrix units multiply, and the number of their passes for one product."""

  dtype: str
  passes: int = 1


def units_of(operation: GraphOperation, target: Target) -> Units:
  """Returns how a target's units multiply: float32 operands in TensorFloat-32, or in bfloat16 passes."""
  equation = operation.equation
  if is_fp8(equation):
    return Units(_narrow_dtype(equation.params["spec"], target))
  dtype = _operand_dtype(equation)
  if dtype != np.float32:
    return Units(dtype.name)
  passes = passes_of(equation.params.get("precision"))
  if passes and plain_primitive(equation.primitive) is jax.lax.dot_general_p:  # JAX drops those of others
    return Units(passes.dtype, passes.products)
  precision = precision_of(equation)
  if target.kind == "tpu":
    return Units("bfloat16", _TPU_PASSES[precision])
  on_units = target.kind == "gpu" and formats.runs_on(target.matrix_units, "tensorfloat32")
  return Units("tensorfloat32" if on_units and precision != "HIGHEST" else "float32")


def _operand_dtype(equation: JaxprEqn) -> np.dtype:
  dtypes = [jnp.dtype(dtype_of(atom)) for atom in equation.invars[:2]]
  if "originals" in equation.params:  # a product under autocast, which rounds a float32 operand
    return min(dtypes, key=lambda dtype: dtype.itemsize)
  return dtypes[0] if dtypes[0] == dtypes[1] else jnp.promote_types(*dtypes)


def _narrow_dtype(spec: Spec, target: Target) -> str:
  """Returns the format of a product below 16 bits: that of its blocks, or of the operand that decides.

  An operand in a format that the target's units lack decides, then a gradient's in E5M2.
  """
  if spec.in_blocks:
    bits = formats.narrow_bits(spec.lhs_dtype)
    return "nvfp4" if spec.scheme == "nvfp4" else f"mxfp{bits}"
  kinds = {spec.lhs_dtype.name, spec.rhs_dtype.name}
  return max(kinds, key=lambda kind: (not formats.runs_on(target.matrix_units, kind), "e5m2" in kind))


def precision_of(equation: JaxprEqn) -> str:
  """Returns `HIGH` or `HIGHEST` where a product asks for it; empty for the device's default."""
  asked = equation.params.get("precision")
  if asked is None:
    return ""
  both = asked if isinstance(asked, tuple) else (asked,)
  names = [getattr(one, "name", str(one)) for one in both]
  if any("HIGHEST" in name or "F32_F32" in name for name in names):
    return "HIGHEST"
  return "HIGH" if "HIGH" in names else ""


def _kernel(operation: GraphOperation) -> ProductGroup:
  dtypes = [dtype_of(atom) for atom in operation.equation.invars]
  floats = [dtype.name for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
  return ProductGroup(
    path=layer_pattern(operation.path),
    source=operation.source,
    phase=operation.phase,
    operation="kernel",
    dtype=", ".join(dict.fromkeys(floats)),
    kernel=str(operation.equation.params.get("name") or operation.name),
  )


def _product(operation: GraphOperation, target: Target) -> ProductGroup:
  sizes = product_sizes(operation)
  dtype, passes = units_of(operation, target)
  wanted = formats.padded(target.matrix_units, dtype, *sizes)
  fits = formats.eligible(target.matrix_units, dtype, *sizes)
  one = 2 * math.prod(sizes)
  return ProductGroup(
    path=layer_pattern(operation.path),
    source=operation.source,
    phase=operation.phase,
    operation=operation.name,
    dtype=dtype,
    shape=sizes,
    padded=wanted,
    batch=max(1, round(operation.flops / one)) if one else 1,
    eligible=fits,
    why="" if fits else _why(dtype, sizes, wanted, target),
    passes=passes,
  )


def _why(dtype: str, sizes: tuple[int, int, int], wanted: tuple[int, int, int], target: Target) -> str:
  if not formats.runs_on(target.matrix_units, dtype):
    return f"{target.name} has no matrix units for {dtype}"
  if 1 in sizes:
    return "a matrix times a vector: bound by memory"
  multiples = formats.padded(target.matrix_units, dtype, 1, 1, 1)
  wrong = [
    f"{name}={size} is not a multiple of {step}"
    for name, size, pad, step in zip("MNK", sizes, wanted, multiples, strict=True)
    if size != pad
  ]
  return ", ".join(wrong)


def serving_dtype(graph: Graph) -> np.dtype:
  """Returns the dtype of the operands of most of the FLOPs, in which the weights would be served."""
  total = Counter({np.dtype(np.float32): 0})
  for operation, times in graph.every_operation():
    if operation.flops and not has(operation.equation, Trait.KERNEL):
      dtype = jnp.dtype(jnp.bfloat16) if is_fp8(operation.equation) else _operand_dtype(operation.equation)
      total[dtype] += operation.flops * times
  return jax.dtypes.canonicalize_dtype(total.most_common(1)[0][0])


def stated_collectives(graph: Graph, *, least: bool = False) -> tuple[Collective, ...]:
  """Returns the program's collectives in one step: the bytes of the results on each device.

  Args:
    graph: graph of the step.
    least: count the branch of a conditional that sends least, not the one that sends most.
  """
  sent = lambda operation: sum(collective.sent for collective in _collectives(operation, 1))
  every = graph.every_operation(worth=sent, choose=min if least else max)
  return add_up(collective for operation, times in every for collective in _collectives(operation, times))


def _collectives(operation: GraphOperation, times: int) -> list[Collective]:
  name = facts(operation.equation).collective
  if not name or operation.group == 1:
    return []
  group = 0 if name == "collective-permute" else operation.group
  found = []
  for value in operation.results:
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)  # which crosses as its words
    dtype = "uint32" if is_key else np.dtype(value.dtype).name
    found.append(Collective(name, dtype, value.whole * times, times, (operation.path,), group))
  return found
