"""JAX's rules for the gradient and the mapping of a product, with another product in the place of JAX's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad

from mpjax import _compat
from mpjax._types import Array, ClosedJaxpr, JaxprEqn
from mpjax.jaxpr import interpret

# The operands of JAX's product, each with arrays of its shape that have the same views; parameters of JAX.
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
    plain: JAX's product.
    ct: the cotangent of its result.
    x: the operand.
    others: the other of lhs and rhs, and the operands after them.
    side: 0 if the operand is the lhs, 1 if it is the rhs.
    parameters: the parameters of the product.
    bind: (operands, **parameters) -> the result; each operand is a list of one array.
  """
  rule = ad.primitive_transposes[plain]
  dtype = ct.dtype

  def of_jax(ct: Array, y: Array, *more: Array) -> Array:
    return rule(ct, *((x, y) if side == 0 else (y, x)), *more, **parameters)[side]

  y, *more = others
  if ct.size == 0 or _compat.is_explicit(x.aval):
    return of_jax(ct, y.astype(dtype), *more)
  avals = (_aval(ct, dtype), _aval(y, dtype), *(_aval(a, a.dtype) for a in more))
  return _replaced(plain, jax.make_jaxpr(of_jax)(*avals), [[a] for a in (ct, *others)], bind)


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
    plain: JAX's product.
    operands: its operands, each with arrays of the same shape and mapped dimension.
    axes: the mapped dimension of each; `None` for an operand that is not mapped.
    dtype: the dtype of lhs and rhs in JAX's product.
    parameters: the parameters of the product.
    bind: (operands, **parameters) -> the result.
  """
  mapped = jax.vmap(functools.partial(plain.bind, **parameters), tuple(axes))
  lhs, rhs, *more = (group[0] for group in operands)
  if any(x.size == 0 for x in (lhs, rhs)):  # JAX binds no convolution
    return mapped(lhs.astype(dtype), rhs.astype(dtype), *more)
  avals = (_aval(lhs, dtype), _aval(rhs, dtype), *(_aval(a, a.dtype) for a in more))
  return _replaced(plain, jax.make_jaxpr(mapped)(*avals), operands, bind)


def _aval(x: Array, dtype: np.dtype) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, dtype)


def _replaced(plain: Primitive, closed: ClosedJaxpr, operands: Sequence[list[Array]], bind: Bind) -> Array:
  """Returns the result of a program of views and one product, with another product."""

  def rule(equation: JaxprEqn, values: list[list[Array]]) -> list[list[Array]]:
    if equation.primitive is plain:
      return [[bind(values, **equation.params)]]
    return [[_compat.bind(equation, [x])[0] for x in values[0]]]

  return cast(Array, interpret(closed, operands, rule)[0][0])
