"""JAX's rules for the gradient and the mapping of a product, with another product in the place of JAX's.

`plain` is JAX's product, `parameters` are those of the product, and `bind` applies the other one to operands,
each a list of arrays of one shape that have the same views, and parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import interpret

Bind: TypeAlias = Callable[..., Array]


def gradient_as_jax(
  plain: Primitive,
  ct: Array,
  x: ad.UndefinedPrimal,
  others: Sequence[Array],
  side: int,
  parameters: Mapping[str, Any],
  bind: Bind,
) -> Array:
  """Returns the cotangent of an operand as JAX's rule does: views of the operands, and a product.

  Args:
    ct: the cotangent of its result.
    x: the operand.
    others: the other of lhs and rhs, and the operands after them.
    side: 0 if the operand is the lhs, 1 if it is the rhs.
  """
  rule = ad.primitive_transposes[plain]
  dtype = ct.dtype

  def of_jax(ct: Array, y: Array, *more: Array) -> Array:
    return rule(ct, *((x, y) if side == 0 else (y, x)), *more, **parameters)[side]

  if ct.size == 0 or _compat.is_explicit(x.aval):
    return of_jax(ct, others[0].astype(dtype), *others[1:])
  return _replaced(plain, of_jax, [[a] for a in (ct, *others)], dtype, bind)


def mapped_as_jax(
  plain: Primitive,
  operands: Sequence[list[Array]],
  axes: Sequence[int | None],
  dtype: np.dtype,
  parameters: Mapping[str, Any],
  bind: Bind,
) -> Array:
  """Returns a product whose operands `vmap` maps over, as JAX's rule does; its mapped dimension is the first.

  Args:
    operands: its operands, each with arrays of the same shape and mapped dimension.
    axes: the mapped dimension of each; `None` for an operand that is not mapped.
    dtype: the dtype of lhs and rhs in JAX's product.
  """
  mapped = jax.vmap(functools.partial(plain.bind, **parameters), tuple(axes))
  lhs, rhs, *more = (group[0] for group in operands)
  if any(x.size == 0 for x in (lhs, rhs)):  # JAX binds no convolution
    return mapped(lhs.astype(dtype), rhs.astype(dtype), *more)
  return _replaced(plain, mapped, operands, dtype, bind)


def _replaced(
  plain: Primitive, fun: Callable[..., Array], operands: Sequence[list[Array]], dtype: np.dtype, bind: Bind
) -> Array:
  """Returns the result of views and one product (of lhs and rhs in a dtype), with another product."""
  like = [jax.ShapeDtypeStruct(x.shape, dtype if i < 2 else x.dtype) for i, (x, *_) in enumerate(operands)]

  def rule(equation: JaxprEqn, values: list[list[Array]]) -> list[list[Array]]:
    if equation.primitive is plain:
      return [[bind(values, **equation.params)]]
    return [[_compat.bind(equation, [x])[0] for x in values[0]]]

  return cast(Array, interpret(jax.make_jaxpr(fun)(*like), operands, rule)[0][0])
