"""`half_dot_general_p`: the `dot_general` of bfloat16 operands that is as exact on every platform.

XLA for CPU leaves some products to a library before it folds transposes into them. Those that the library
then refuses it multiplies with partial sums in bfloat16: wrong by 0.02 where one rounding is 0.0017. The
gradient of a weight is one of them, and which others are depends on what is round them. So all of these
multiply in float32 on a CPU, and round once; every other platform is given JAX's product.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.fp8._dot_general import Dims, batched_dims, fp8_dot_general_p, free_dims
from mpjax.jaxpr import register_as

# Where it is differentiated, the product of the primal values is JAX's own again, which policies of
# `jax.checkpoint` know; tangents and cotangents are of this one.
half_dot_general_p = Primitive("dot_general")
register_as(half_dot_general_p, jax.lax.dot_general_p)


def as_half_product(equation: JaxprEqn, operands: Sequence[Array]) -> JaxprEqn:
  """Returns an equation to bind to operands: a `dot_general` of bfloat16 as a `half_dot_general`."""
  if equation.primitive is not jax.lax.dot_general_p or any(x.dtype != jnp.bfloat16 for x in operands):
    return equation
  precision = equation.params["precision"]
  algorithm = precision is not None and not isinstance(precision, tuple)
  return equation if algorithm else equation.replace(primitive=half_dot_general_p)


@functools.lru_cache(maxsize=128)
def as_product(policy: Callable[..., Any]) -> Callable[..., Any]:
  """Returns a policy of `jax.checkpoint` that decides for mpjax's own products as for matrix products."""

  def asked(primitive: Primitive, *args: object, **params: object) -> object:
    own = primitive in (fp8_dot_general_p, half_dot_general_p)
    return policy(jax.lax.dot_general_p if own else primitive, *args, **params)

  return asked


def _abstract(lhs: ShapedArray, rhs: ShapedArray, **parameters: Any) -> ShapedArray:
  return _compat.dot_general_type(lhs, rhs, **parameters)


@functools.partial(jax.jit, static_argnames=("parameters",))
def _compiled(lhs: Array, rhs: Array, parameters: tuple[tuple[str, Any], ...]) -> Array:
  return half_dot_general_p.bind(lhs, rhs, **dict(parameters))


def _eager(lhs: Array, rhs: Array, **parameters: Any) -> Array:
  with jax.disable_jit(False):  # or `_compiled` would end here again
    return _compiled(lhs, rhs, tuple(parameters.items()))


def _plain(lhs: Array, rhs: Array, **parameters: Any) -> Array:
  return jax.lax.dot_general_p.bind(lhs, rhs, **parameters)


def _in_float32(lhs: Array, rhs: Array, **parameters: Any) -> Array:
  wide = (x.astype(jnp.float32) for x in (lhs, rhs))
  out = _plain(*wide, **{**parameters, "preferred_element_type": np.dtype(np.float32)})
  return out.astype(parameters["preferred_element_type"] or lhs.dtype)


def _jvp(
  primals: Sequence[Array], tangents: Sequence[Array | ad.Zero], **parameters: Any
) -> tuple[Array, Array | ad.Zero]:
  (lhs, rhs), (d_lhs, d_rhs) = primals, tangents
  out = _plain(lhs, rhs, **parameters)
  terms = []
  if not isinstance(d_lhs, ad.Zero):
    terms.append(half_dot_general_p.bind(d_lhs, rhs, **parameters))
  if not isinstance(d_rhs, ad.Zero):
    terms.append(half_dot_general_p.bind(lhs, d_rhs, **parameters))
  return out, functools.reduce(ad.add_jaxvals, terms) if terms else ad.Zero(jax.typeof(out))


def _transpose(
  ct: Array | ad.Zero,
  lhs: Array | ad.UndefinedPrimal,
  rhs: Array | ad.UndefinedPrimal,
  *,
  dimension_numbers: Dims,
  out_sharding: NamedSharding | None,
  **parameters: Any,
) -> list[Array | None]:
  """Returns the cotangent of one operand, by the same product and transpose as JAX's of a `dot_general`."""
  if isinstance(ct, ad.Zero):
    return [None, None]
  side = 0 if isinstance(lhs, ad.UndefinedPrimal) else 1
  x, y = ((lhs, rhs), (rhs, lhs))[side]
  (x_contract, y_contract), (x_batch, y_batch) = ((pair[side], pair[1 - side]) for pair in dimension_numbers)
  x_free = free_dims(x.aval.ndim, dimension_numbers, side)
  y_free = free_dims(cast(Array, y).ndim, dimension_numbers, 1 - side)
  n = len(x_batch)
  first = n + len(x_free) * (side == 0)
  ct_of_y = tuple(range(first, first + len(y_free)))
  layout = [*x_batch, *x_free, *(x_contract[i] for i in np.argsort(y_contract))]
  permutation = tuple(int(i) for i in np.argsort(layout))
  out = half_dot_general_p.bind(
    ct,
    y,
    dimension_numbers=((ct_of_y, tuple(y_free)), (tuple(range(n)), y_batch)),
    out_sharding=_compat.permuted_sharding(x.aval, permutation),
    **parameters,
  )
  out = jax.lax.convert_element_type(jax.lax.transpose(out, permutation), x.aval.dtype)
  return [out, None] if side == 0 else [None, out]


def _batch(
  axis_data: Any,
  operands: Sequence[Array],
  axes: Sequence[int | None],
  *,
  dimension_numbers: Dims,
  out_sharding: NamedSharding | None,
  **parameters: Any,
) -> tuple[Array, int | None]:
  lhs, rhs = operands
  if axes[0] is None and axes[1] is None:  # a rule that takes `axis_data` is called for these, too
    parameters |= {"dimension_numbers": dimension_numbers, "out_sharding": out_sharding}
    return half_dot_general_p.bind(lhs, rhs, **parameters), None
  dims, axis = batched_dims((lhs.ndim, rhs.ndim), axes, dimension_numbers)
  sharding = _compat.batched_sharding(out_sharding, axis_data, axis)
  out = half_dot_general_p.bind(lhs, rhs, dimension_numbers=dims, out_sharding=sharding, **parameters)
  return out, axis


half_dot_general_p.def_impl(_eager)
half_dot_general_p.def_abstract_eval(_abstract)
ad.primitive_jvps[half_dot_general_p] = _jvp
ad.primitive_transposes[half_dot_general_p] = _transpose
batching.fancy_primitive_batchers[half_dot_general_p] = _batch
mlir.register_lowering(half_dot_general_p, mlir.lower_fun(_plain, multiple_results=False))
mlir.register_lowering(
  half_dot_general_p, mlir.lower_fun(_in_float32, multiple_results=False), platform="cpu"
)
