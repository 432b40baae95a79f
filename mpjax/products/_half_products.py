"""Products of half-precision operands, whose gradients of float32 values are never rounded.

`half_dot_general_p`, `half_conv_p` and `half_ragged_dot_p` are JAX's products of two half-precision operands,
with two more operands: the originals, float32 values that an operand was rounded from. The derivative goes to
the original: its gradient is a product with a float32 result, and JAX adds several gradients in float32.

XLA for CPU passes some products to a library before it folds transposes into them. If the library refuses
one, XLA multiplies it with partial sums in bfloat16, with an error of 0.02 instead of 0.0017 for one
rounding. The gradient of a weight is such a product; whether others are depends on the operations around
them. So all `dot_general`s multiply in float32 on a CPU, and round once; other platforms use JAX's
product. On a GPU a convolution returns half precision, also as the gradient of a float32 value: for a float32
result cuDNN would need float32 operands.

Products of float32 operands in passes of bfloat16 or TensorFloat-32 (`jax.lax.DotAlgorithmPreset`) are
`half_dot_general_p`, too, since JAX refuses some of them on a CPU: there they are float32 products.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.formats import passes_of
from mpjax.products._dimensions import (
  Dims,
  gradient_as_jax,
  gradient_product,
  mapped_as_jax,
  sum_of_tangents,
)
from mpjax.products._primitives import PLAIN, define, half_primitive
from mpjax.products._spec import FLOAT32

# Operands: those of JAX's product, and an original for each side (0, 1) in the parameter `originals`. A
# lhs or rhs in float32 is a tangent of an original: it is rounded to the dtype of the other, its cotangent
# is float32.
#
# In a derivative, the product of the primal values is JAX's own again, which policies of
# `jax.checkpoint` recognise; tangents and cotangents use these products.
half_dot_general_p = half_primitive(jax.lax.dot_general_p)
half_conv_p = half_primitive(jax.lax.conv_general_dilated_p)
half_ragged_dot_p = half_primitive(_compat.ragged_dot_general_p)
_OWN = {plain: own for own, plain in PLAIN.items()}


def half_product(
  lhs: Array, rhs: Array, dims: Dims, dtype: np.dtype, out_sharding: NamedSharding | None = None
) -> Array:
  """Returns a `dot_general` of half-precision operands in `dtype`; a float32 tangent is rounded to theirs."""
  return half_dot_general_p.bind(
    lhs,
    rhs,
    originals=(),
    dimension_numbers=dims,
    precision=None,
    preferred_element_type=np.dtype(dtype),
    out_sharding=out_sharding,
  )


def has_own_gradients(equation: JaxprEqn) -> bool:
  """Returns whether an equation is a product whose float32 operand may have a float32 gradient."""
  precision = equation.params.get("precision")
  algorithm = precision is not None and not isinstance(precision, tuple)
  return equation.primitive in _OWN and (not algorithm or passes_of(precision) is not None)


def bind_product(
  equation: JaxprEqn, operands: Sequence[Array], originals: Mapping[int, Array], **changes: Any
) -> list[Array]:
  """Applies a product to operands in half precision, or to float32 operands in passes.

  Operands in half precision need no passes.

  Args:
    equation: the product in the user's program; any other operation is applied as it is.
    operands: its operands.
    originals: by operand (0, 1), the float32 value that it was rounded from.
    **changes: parameters that differ from the equation's.
  """
  if not has_own_gradients(equation):
    return _compat.bind(equation, list(operands), **changes)
  passes = passes_of(equation.params.get("precision"))
  sizes = [x.dtype.itemsize for x in operands[:2]]
  if passes and 2 in sizes:
    changes["precision"] = None
  dot = equation.primitive is jax.lax.dot_general_p
  # JAX drops the passes of convolutions.
  in_passes = passes and dot and all(x.dtype == FLOAT32 for x in operands)
  wide = changes.get("preferred_element_type") == FLOAT32 or bool(originals)
  differs = wide or (dot and operands[0].dtype == jnp.bfloat16)
  if not in_passes and not (sizes == [2, 2] and differs):
    return _compat.bind(equation, list(operands), **changes)
  with _compat.context_of(equation):
    parameters = {**equation.params, **changes, "originals": tuple(originals)}
    return [_OWN[equation.primitive].bind(*operands, *originals.values(), **parameters)]


def _common(operands: Sequence[Array | ShapedArray]) -> np.dtype:
  """Returns the dtype of a product's operands: half precision, or float32 if a diagnosis asks for it."""
  return next((x.dtype for x in operands if x.dtype != FLOAT32), FLOAT32)


def _rounded(operands: Sequence[Array], originals: tuple[int, ...] = ()) -> list[Array]:
  """Returns the operands of JAX's product; a float32 lhs or rhs is rounded to the dtype of the other."""
  half = _common(operands[:2])
  return [*(x.astype(half) for x in operands[:2]), *operands[2 : len(operands) - len(originals)]]


def _compute(
  own: Primitive,
  *operands: Array,
  originals: tuple[int, ...] = (),
  platform: str | None,
  **parameters: Any,
) -> Array:
  lhs, rhs, *others = _rounded(operands, originals)
  dtype = parameters["preferred_element_type"] or lhs.dtype
  if platform == "cpu" and passes_of(parameters["precision"]):
    parameters["precision"] = None
  elif platform == "cpu" and own is half_dot_general_p and (lhs.dtype == jnp.bfloat16 or dtype == FLOAT32):
    lhs, rhs, parameters["preferred_element_type"] = lhs.astype(FLOAT32), rhs.astype(FLOAT32), FLOAT32
  elif platform in ("cuda", "rocm") and own is half_conv_p and dtype == FLOAT32:
    parameters["preferred_element_type"] = None  # for a float32 result cuDNN needs float32 operands
  return PLAIN[own].bind(lhs, rhs, *others, **parameters).astype(dtype)


def _abstract(
  own: Primitive,
  lhs: ShapedArray,
  rhs: ShapedArray,
  *others: ShapedArray,
  originals: tuple[int, ...],
  **params: Any,
) -> ShapedArray:
  others = others[: len(others) - len(originals)]
  return _compat.product_type(PLAIN[own], _common((lhs, rhs)), lhs, rhs, *others, **params)


def _jvp(
  own: Primitive,
  primals: Sequence[Array],
  tangents: Sequence[Array | ad.Zero],
  *,
  originals: tuple[int, ...],
  **parameters: Any,
) -> tuple[Array, Array | ad.Zero]:
  values = _rounded(primals, originals)
  moving = {side: tangents[side] for side in (0, 1)}
  moving |= dict(zip(originals, tangents[len(values) :], strict=True))
  # A CPU refuses JAX's own product in passes, and one with a batch in float32, as a gradient is.
  in_float32 = parameters["preferred_element_type"] == FLOAT32 and not originals
  keeps = in_float32 or passes_of(parameters["precision"]) is not None
  out = own.bind(*values, originals=(), **parameters) if keeps else PLAIN[own].bind(*values, **parameters)
  bind = lambda _, lhs, rhs: own.bind(lhs, rhs, *values[2:], originals=(), **parameters)
  return out, sum_of_tangents(out, values[:2], moving.items(), bind)


def _transpose(
  own: Primitive,
  ct: Array,
  place: int,
  *operands: Any,  # an `ad.UndefinedPrimal` at that place
  originals: tuple[int, ...],
  **parameters: Any,
) -> Array:
  """Returns the cotangent of one operand, or of its original: float32, without a rounding in between."""
  plain = operands[: len(operands) - len(originals)]
  side = place if place < 2 else originals[place - len(plain)]
  x, y = operands[place].aval, operands[1 - side]
  if ct.dtype == FLOAT32:  # of a product with a float32 result, which a half product reads
    ct = ct.astype(y.dtype)
  if FLOAT32 in (x.dtype, parameters["preferred_element_type"]):
    parameters["preferred_element_type"] = x.dtype
  if own is half_dot_general_p:
    dims = parameters["dimension_numbers"]
    dims, sharding, in_layout = gradient_product(x, y.ndim, dims, side, cotangent_first=True)
    parameters |= {"dimension_numbers": dims, "out_sharding": sharding}
    return in_layout(own.bind(ct, y, originals=(), **parameters))
  bind = functools.partial(_bind_groups, own, ())
  return gradient_as_jax(PLAIN[own], ct, operands[place], [y, *plain[2:]], side, parameters, bind)


def _bind_groups(
  own: Primitive, originals: tuple[int, ...], groups: Sequence[Sequence[Array]], **parameters: Any
) -> Array:
  """Applies a product to its operands, each followed by its original, if there is one."""
  flat = [group[0] for group in groups] + [groups[side][1] for side in originals]
  return own.bind(*flat, originals=originals, **parameters)


def _batch(
  own: Primitive,
  axis_data: Any,
  operands: Sequence[Array],
  axes: Sequence[int | None],
  *,
  originals: tuple[int, ...],
  **parameters: Any,
) -> tuple[Array, int | None]:
  """Applies JAX's form of a mapped product: views of the operands, and a product."""
  n = len(operands) - len(originals)
  groups = [[x] for x in operands[:n]]
  for side, x, at in zip(originals, operands[n:], axes[n:], strict=True):
    wanted = axes[side]  # that of the rounded operand
    groups[side].append(x if at is None or wanted is None else jnp.moveaxis(x, at, wanted))
  bind = functools.partial(_bind_groups, own, originals)
  return mapped_as_jax(PLAIN[own], axis_data, groups, axes[:n], _common(operands[:2]), parameters, bind)


for _own in PLAIN:
  define(_own, *(functools.partial(rule, _own) for rule in (_abstract, _compute, _jvp, _transpose, _batch)))
