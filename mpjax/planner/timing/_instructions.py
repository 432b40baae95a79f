"""Matrix products and bytes of one instruction of a compiled program."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mpjax.formats._passes import PASSES
from mpjax.planner.compiled._hlo import HloInstruction, numpy_name
from mpjax.planner.compiled._hlo_products import product_flops, shared_dimensions

_HIGHEST = 2
_PART = frozenset({"dynamic-slice", "gather", "slice"})
# A scatter adds in memory: it takes as long as so many times the bytes of its updates (on an H100).
_SCATTERED = 12
# A kernel that writes FP8, often transposed, takes as long as so many times its bytes (GPT on an H100).
_NARROW = 2
_SEES = frozenset({"bitcast", "get-tuple-element"})


# The numbers of XLA's algorithms of products (`PrecisionConfig.Algorithm` in `xla/xla_data.proto`), as in
# compiled programs, and their names in JAX.
_ALGORITHMS = {
  **{6: "BF16_BF16_F32", 7: "BF16_BF16_F32_X3", 8: "BF16_BF16_F32_X6", 13: "BF16_BF16_F32_X9"},
  **{9: "TF32_TF32_F32", 10: "TF32_TF32_F32_X3"},
}
_FLOAT32 = 11


class Product(NamedTuple):
  """Matrix products of one instruction, or a convolution as a product.

  Attributes:
    dtype: NumPy's name of the dtype in which a GPU multiplies.
    shape: M, N, K.
    batch: number of products.
    convolution: whether the traced program has it as a convolution.
    passes: number of products in `dtype` that make up one of float32 operands.
  """

  dtype: str
  shape: tuple[int, int, int]
  batch: int
  convolution: bool
  passes: int = 1

  @property
  def flops(self) -> int:
    """FLOPs of all of them."""
    return 2 * self.batch * math.prod(self.shape)


def product_of(instruction: HloInstruction) -> Product | None:
  """Returns the product that an instruction is, or `None`."""
  proto, target = instruction.proto, instruction.proto.custom_call_target
  if instruction.op == "convolution" or "__cudnn$conv" in target:
    return _convolution(instruction)
  if (dimensions := shared_dimensions(instruction)) is None:
    return None
  precision: Sequence[Any] = proto.precision_config.operand_precision
  if target:
    config = instruction.config["gemm_backend_config"].get("precision_config", {})
    precision = config.get("operand_precision", ())
  lhs, rhs = (operand.shapes[0] for operand in instruction.operands[:2])
  k, many = (math.prod(lhs.dims[i] for i in axes) for axes in dimensions)
  shared = max(1, k * many)
  shape = (math.prod(lhs.dims) // shared, math.prod(rhs.dims) // shared, k)
  algorithm = proto.precision_config.algorithm
  if algorithm in _ALGORITHMS:
    passes = PASSES[_ALGORITHMS[algorithm]]
    return Product(passes.dtype, shape, many, False, passes.products)
  if algorithm == _FLOAT32:
    return Product("float32", shape, many, False)
  return Product(_dtype(lhs.dtype, rhs.dtype, precision), shape, many, False)


def _convolution(instruction: HloInstruction) -> Product:
  """Returns a convolution as a product; cuDNN's backward calls have the dimensions of the forward call."""
  numbers, target = instruction.proto.convolution_dimension_numbers, instruction.proto.custom_call_target
  lhs, rhs = (operand.shapes[0] for operand in instruction.operands[:2])
  result = instruction.shapes[0]
  out, weights = result, rhs
  if "BackwardFilter" in target:
    out, weights = rhs, result
  elif "BackwardInput" in target:
    out = lhs
  features = max(1, out.dims[numbers.output_feature_dimension])
  named = "conv_general" in instruction.op_name or "__cudnn$conv" in target
  if named:  # units multiply with the padding, too
    flops = 2 * math.prod(out.dims) * math.prod(weights.dims) // features
  else:  # a batch of products is a window, of which each result meets one element
    flops = product_flops(instruction)
  wide = weights.dims[numbers.kernel_input_feature_dimension] if "BackwardInput" in target else features
  tall = max(1, math.prod(result.dims) // max(1, wide))
  k = max(1, flops // (2 * tall * max(1, wide)))
  precision = instruction.proto.precision_config.operand_precision
  return Product(_dtype(lhs.dtype, rhs.dtype, precision), (tall, wide, k), 1, named)


def _dtype(lhs: str, rhs: str, precision: Sequence[Any]) -> str:
  """Returns the dtype in which a GPU multiplies: TensorFloat-32 for float32 below the highest precision."""
  if "f32" in (lhs, rhs):
    return "float32" if any(p in (_HIGHEST, "HIGHEST") for p in precision) else "tensorfloat32"
  return numpy_name(lhs)


def moved_bytes(instruction: HloInstruction) -> int:
  """Returns the bytes of the device's memory that an instruction reads and writes.

  An operand that is only sliced or gathered from counts by the part that is read, and one that is updated in
  place by its updates.
  """
  moved = _moved(instruction)
  return _NARROW * moved if any(shape.dtype.startswith("f8") for shape in instruction.shapes) else moved


def _moved(instruction: HloInstruction) -> int:
  operands = [_nbytes(operand) for operand in instruction.operands]
  written = _nbytes(instruction)
  if instruction.op in _PART:
    return 2 * min(written, sum(operands))
  if instruction.op == "dynamic-update-slice":
    return 2 * operands[1]
  if instruction.op == "scatter":
    return _SCATTERED * sum(map(_nbytes, instruction.operands[2:]))
  if "__cu" in instruction.proto.custom_call_target and len(instruction.shapes) > 1:
    written -= instruction.shapes[-1].nbytes  # the workspace
  if instruction.op != "fusion":
    return sum(operands) + written
  scope = instruction.called[0]
  readers = collections.defaultdict(list)
  for inner in scope.instructions:
    for operand in inner.operands:
      readers[operand].append(inner)
  for i, parameter in enumerate(scope.parameters()):
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
      written += _SCATTERED * updates - min(written, operands[i])
      operands[i] = 0
  return sum(operands) + written


def _nbytes(instruction: HloInstruction) -> int:
  return sum(shape.nbytes for shape in instruction.shapes if shape.space == 0)
