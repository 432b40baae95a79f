"""A program's matrix products, whether a target runs them at full rate, and its fused kernels."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import formats
from mpjax._render.plain_text import bytes_text
from mpjax._types import JaxprEqn
from mpjax.formats._passes import passes_of
from mpjax.jaxpr import Trait, dtype_of, has, is_recomputation, layer_pattern, shape_of
from mpjax.planner._results import KernelGroup, ProductGroup
from mpjax.planner._targets import Target
from mpjax.planner.analytic._graph import Graph, GraphOperation, GraphValue
from mpjax.products import is_fp8, plain_primitive
from mpjax.products._spec import Spec

# The number of bfloat16 passes of a TPU for a float32 product, by precision.
_TPU_PASSES = {"": 1, "HIGH": 3, "HIGHEST": 6}
# Padding by more than this share of a weight costs more than it gains.
_WORTH_PADDING = 0.25


def list_products(graph: Graph, target: Target, devices: int = 1) -> tuple[ProductGroup, ...]:
  """Returns all products, one row for each line, shape and dtype; the most FLOPs first.

  Args:
    graph: graph of the program.
    target: the target with the matrix units.
    devices: number of devices that share the FLOPs.
  """
  found: dict[Any, ProductGroup] = {}
  for operation, times in graph.every_operation():
    if not operation.flops or has(operation.equation, Trait.KERNEL):
      continue
    product = _product(operation, target)
    flops = int(operation.flops_on(devices) * times)
    key = dataclasses.replace(product, flops=0)
    known = found.get(key)
    found[key] = dataclasses.replace(product, flops=flops + (known.flops if known else 0))
  return tuple(sorted(found.values(), key=lambda product: -product.flops))


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


def list_kernels(graph: Graph, devices: int = 1) -> tuple[KernelGroup, ...]:
  """Returns all fused kernels, one row for each line, name and dtypes; the most FLOPs first.

  Args:
    graph: graph of the program.
    devices: number of devices that share the FLOPs.
  """
  found: dict[Any, KernelGroup] = {}
  for operation, times in graph.every_operation():
    if not has(operation.equation, Trait.KERNEL):
      continue
    one = KernelGroup(
      path=layer_pattern(operation.path),
      source=operation.source,
      phase=operation.phase,
      name=str(operation.equation.params.get("name") or operation.name),
      operands=tuple(dict.fromkeys(v.name for v in _float_dtypes(operation.equation))),
      count=0,
      flops=0,
    )
    known = found.get(one, one)
    flops = known.flops + int(operation.flops_on(devices) * times)
    found[one] = dataclasses.replace(one, count=known.count + times, flops=flops)
  return tuple(sorted(found.values(), key=lambda kernel: -kernel.flops))


def padding_advice(graph: Graph, target: Target, weights: dict[int, tuple[str, int]]) -> list[str]:
  """Returns sentences on the weights whose sizes slow products down, and on the cost of padding them.

  Args:
    graph: graph of the program.
    target: the target with the matrix units.
    weights: from the position of an argument to its path and the bytes of state for each element.
  """
  advice: dict[tuple[str, int], str] = {}
  for operation, _ in graph.every_operation():
    if not operation.flops or has(operation.equation, Trait.KERNEL):
      continue
    dtype = units_of(operation, target).dtype
    sizes, needed = product_sizes(operation), padded_sizes(operation, target)
    if not formats.runs_on(target.matrix_units, dtype):
      continue
    for operand in operation.operands[:2]:
      weight = _weight(operand)
      if weight is None or weight.argument not in weights:
        continue
      path, bytes_per_element = weights[weight.argument]
      for size, wanted in zip(sizes, needed, strict=True):
        if size != wanted and size in weight.shape and size > 1 and (path, size) not in advice:
          rows = math.prod(weight.shape) // size
          cost = (wanted - size) * rows
          if cost > _WORTH_PADDING * math.prod(weight.shape):
            continue
          share = cost / math.prod(weight.shape)
          advice[path, size] = (
            f"pad {path} from {size} to {wanted}: {cost:,} more elements ({share:.2%}, "
            f"{bytes_text(cost * bytes_per_element)} with optimizer state), and its products run at full rate"
          )
  return list(advice.values())


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


def padded_sizes(operation: GraphOperation, target: Target) -> tuple[int, int, int]:
  """Returns the next M, N, K at which the target's units run the product at full rate."""
  return formats.padded(target.matrix_units, units_of(operation, target).dtype, *product_sizes(operation))


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


def _float_dtypes(equation: JaxprEqn) -> list[np.dtype]:
  """Returns the floating dtypes of the operands."""
  dtypes = [dtype_of(atom) for atom in equation.invars]
  return [dtype for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]


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
    flops=0,
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


def _weight(value: GraphValue) -> GraphValue | None:
  """Returns the argument that a value is a cast or transposed form of."""
  for _ in range(64):
    if value.argument is not None:
      return value
    maker = value.maker
    if maker is None or maker.flops or maker.bodies or not maker.operands:
      return None
    if math.prod(maker.operands[0].shape) != math.prod(value.shape):
      return None
    value = maker.operands[0]
  return None


def serving_dtype(graph: Graph) -> np.dtype:
  """Returns the dtype of the operands of most of the FLOPs, in which the weights would be served."""
  total = Counter({np.dtype(np.float32): 0})
  for operation, times in graph.every_operation():
    if operation.flops and not has(operation.equation, Trait.KERNEL):
      dtype = jnp.dtype(jnp.bfloat16) if is_fp8(operation.equation) else _operand_dtype(operation.equation)
      total[dtype] += operation.flops * times
  return jax.dtypes.canonicalize_dtype(total.most_common(1)[0][0])
