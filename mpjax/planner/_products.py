"""The matrix products of a traced program, whether a target runs them at full rate, and its fused kernels."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import formats
from mpjax._types import JaxprEqn
from mpjax.jaxpr import dtype_of, is_recomputation, layer_pattern, shape_of
from mpjax.planner._program import Operation, Product, Program
from mpjax.planner._results import ProductGroup, add_up
from mpjax.planner._targets import Target
from mpjax.products import Spec, is_fp8, plain_primitive


def product_of(equation: JaxprEqn, stated: int, devices: int, target: Target) -> Product:
  """Returns the products of an equation that states so many FLOPs on all devices together."""
  sizes = _sizes(equation, stated)
  one = 2 * math.prod(sizes)
  batch = max(1, round(stated / one)) if one else 1
  dtype, passes = _units_of(equation, target)
  return Product(dtype, sizes, batch, stated / devices, "lhs_dilation" in equation.params, passes)


def list_products(program: Program, target: Target) -> tuple[ProductGroup, ...]:
  """Returns products, then fused kernels, one row for each line, shape and dtype; the most FLOPs first."""
  rows = [
    _row(operation, product, target, times)
    for operation, times in program.each()
    for product in operation.products
  ]
  products = add_up([row for row in rows if not row.kernel], "flops")
  return (*products, *add_up([row for row in rows if row.kernel], "batch", "flops"))


def model_flops(program: Program) -> int:
  """Returns the FLOPs of products and kernels on one device, without those of a recomputation."""
  every = program.each()
  return sum(int(o.flops * times) for o, times in every if o.flops and not is_recomputation(o.origin))


def _sizes(equation: JaxprEqn, stated: int) -> tuple[int, int, int]:
  """Returns M, N, K of one product [M, K] x [K, N]; for a convolution, of the product that computes it."""
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
    return m, n, stated // max(1, 2 * m * n)
  (contracted, _), (batch, _) = equation.params["dimension_numbers"]
  lhs, rhs = map(shape_of, equation.invars[:2])
  k, many = (math.prod(lhs[i] for i in axes) for axes in (contracted, batch))
  shared = max(1, k * many)
  return math.prod(lhs) // shared, math.prod(rhs) // shared, k


def _units_of(equation: JaxprEqn, target: Target) -> tuple[str, int]:
  """Returns the dtype in which units multiply (float32 in TensorFloat-32 or bfloat16), and their passes."""
  if is_fp8(equation):
    return _narrow_dtype(equation.params["spec"], target), 1
  dtype = _operand_dtype(equation)
  if dtype != np.float32:
    return dtype.name, 1
  passes = formats.passes_of(equation.params.get("precision"))
  if passes and plain_primitive(equation.primitive) is jax.lax.dot_general_p:  # JAX drops those of others
    return passes.dtype, passes.products
  asked = equation.params.get("precision")
  names = [getattr(one, "name", str(one)) for one in (asked if isinstance(asked, tuple) else (asked,))]
  highest = any("HIGHEST" in name or "F32_F32" in name for name in names)
  if target.kind == "tpu":
    return "bfloat16", 6 if highest else 3 if "HIGH" in names else 1
  on_units = target.kind == "gpu" and formats.runs_on(target.matrix_units, "tensorfloat32")
  return ("tensorfloat32" if on_units and not highest else "float32"), 1


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
    bits = formats.narrow_bits(spec.formats[0])
    return "nvfp4" if spec.scheme == "nvfp4" else f"mxfp{bits}"
  kinds = {dtype.name for dtype in spec.formats}
  return max(kinds, key=lambda kind: (not formats.runs_on(target.matrix_units, kind), "e5m2" in kind))


def _row(operation: Operation, product: Product, target: Target, times: int) -> ProductGroup:
  """Returns products, or a kernel, that run so many times, as a row."""
  path, source, phase = layer_pattern(operation.path), operation.source, operation.phase
  count = int(product.flops * times)
  if product.kernel:
    dtypes = [dtype_of(atom) for atom in operation.origin.invars]
    floats = [dtype.name for dtype in dtypes if dtype is not None and jnp.issubdtype(dtype, jnp.floating)]
    name = operation.origin.params.get("name") or operation.origin.primitive.name
    named = ", ".join(dict.fromkeys(floats))
    return ProductGroup(path, source, phase, named, batch=times, flops=count, kernel=str(name))
  dtype, shape = product.dtype, product.shape
  padded = formats.padded(target.matrix_units, dtype, *shape)
  why = _why(dtype, shape, padded, target)
  return ProductGroup(path, source, phase, dtype, shape, padded, product.batch, count, why, product.passes)


def _why(dtype: str, sizes: tuple[int, int, int], wanted: tuple[int, int, int], target: Target) -> str:
  """Returns what keeps a product from the full rate of the matrix units; empty if nothing does."""
  if not formats.runs_on(target.matrix_units, dtype):
    return f"{target.name} has no matrix units for {dtype}"
  if 1 in sizes and sizes != wanted:
    return "a matrix times a vector: bound by memory"
  multiples = formats.padded(target.matrix_units, dtype, 1, 1, 1)
  wrong = [
    f"{name}={size} is not a multiple of {step}"
    for name, size, pad, step in zip("MNK", sizes, wanted, multiples, strict=True)
    if size != pad
  ]
  return ", ".join(wrong)
