"""Gradients of activations that are used many times: summed in float32, and rounded once.

JAX adds the gradients of a value in its dtype: one for each use, each step of a loop that reads it, and each
row of a lookup. In half precision such a sum stops at some hundred terms. So a use reads the half-precision
value, and its gradient goes to a float32 copy, which no program computes: its only reader is the derivative.

Also here: two identities that are optimisation barriers, of a gradient and of what a derivative reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import register_as, shape_of
from mpjax.products import lower_as, return_first

MANY = 16  # uses; as many terms in bfloat16 are off by about 0.01

# (x, its original in float32) -> x; the gradient goes to the original, as that of a product does.
_use_p = Primitive("use_of_many")
register_as(_use_p, jax.lax.copy_p)


def use(x: Array, wide: Array) -> Array:
  """Returns `x`, a value in half precision; its gradient goes to `wide`, the same value in float32."""
  return _use_p.bind(x, wide, originals=(0,))


def widened(x: Array) -> Array:
  """Returns a value in float32, for `use`."""
  return jax.lax.convert_element_type(x, jnp.float32)


def adds_many(equation: JaxprEqn, known_index: bool) -> bool:
  """Returns whether the gradient of a lookup may add many rows in one place.

  Args:
    equation: any equation.
    known_index: whether its index depends on positions alone: then it reads each row about as often.
  """
  if equation.primitive is jax.lax.dynamic_slice_p:
    return 1 in equation.params["slice_sizes"]  # a row: a batching rule outside makes it a lookup of many
  if equation.primitive is not jax.lax.gather_p:
    return False
  operand, index = map(shape_of, equation.invars)
  if known_index:
    return math.prod(shape_of(equation.outvars[0])) > MANY * math.prod(operand)
  batch = equation.params["dimension_numbers"].start_indices_batching_dims
  return math.prod(n for axis, n in enumerate(index[:-1]) if axis not in batch) > MANY


def look_up(equation: JaxprEqn, operands: Sequence[Array]) -> list[Array]:
  """Returns the rows of a half-precision array that a lookup reads; its gradient adds them in float32."""
  rows, wide = (_compat.bind(equation, [x, *operands[1:]]) for x in (operands[0], widened(operands[0])))
  return list(map(use, rows, wide))


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], *, originals: tuple[int, ...]
) -> tuple[Array, Array | ad.Zero]:
  x, (still, moving) = primals[0], tangents
  return x, still if isinstance(moving, ad.Zero) else jax.lax.convert_element_type(moving, x.dtype)


def _transpose(
  ct: Array | ad.Zero, x: object, wide: object, *, originals: tuple[int, ...]
) -> list[Array | ad.Zero | None]:
  return [None, ct if isinstance(ct, ad.Zero) else widened(ct)]


def _batch(
  operands: Sequence[Array], axes: Sequence[int | None], *, originals: tuple[int, ...]
) -> tuple[Array, int | None]:
  (x, wide), (axis, other) = operands, axes
  if axis is not None and other is not None:
    wide = jnp.moveaxis(wide, other, axis)
  return use(x, wide), axis


return_first(_use_p)
ad.primitive_jvps[_use_p] = _jvp
ad.primitive_transposes[_use_p] = _transpose
batching.primitive_batchers[_use_p] = _batch


def _stored(ct: Array | ad.Zero, _: object) -> list[Array | ad.Zero]:
  return [ct if isinstance(ct, ad.Zero) else jax.lax.optimization_barrier(ct)]


# The identity; its transpose is an optimisation barrier.
store_gradient_p = Primitive("store_gradient")
# The identity; on a GPU it is an optimisation barrier.
apart_p = Primitive("apart")
for _primitive, _transposed in ((store_gradient_p, _stored), (apart_p, lambda ct, _: [ct])):
  register_as(_primitive, jax.lax.copy_p)
  return_first(_primitive)
  ad.deflinear2(_primitive, _transposed)
  batching.defvectorized(_primitive)
for _platform in ("cuda", "rocm"):
  lower_as(apart_p, jax.lax.optimization_barrier, _platform)


def derivative_apart(fun: Callable[..., list[Array]]) -> Callable[..., list[Array]]:
  """Returns a function whose derivative, on a GPU, shares nothing with the computation of its results."""
  apart = jax.custom_jvp(fun)

  @apart.defjvp
  def _(primals: Sequence[Array], tangents: Sequence[Array]) -> tuple[list[Array], list[Array]]:
    return fun(*primals), jax.jvp(fun, list(map(apart_p.bind, primals)), list(tangents))[1]

  return apart
