"""Runs a program with random rounding to half precision: Monte-Carlo arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import Array, JaxprEqn
from mpjax.jaxpr import as_traced, bind_again, call_kind, interpret, into_bodies
from mpjax.optim import stochastic_round

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_PRODUCTS = {"dot_general": jax.lax.dot_general_p, "conv_general_dilated": jax.lax.conv_general_dilated_p}
# Arithmetic whose result is float32 if its operands are float32.
_ARITHMETIC = frozenset(
  (
    *("add", "add_any", "sub", "mul", "div", "pow", "integer_pow", "square", "sqrt", "rsqrt", "cbrt", "exp"),
    *("exp2", "expm1", "log", "log1p", "tanh", "logistic", "erf", "erfc", "sin", "cos"),
    *("tan", "sinh", "cosh", "asinh", "acosh", "atan", "atan2", "reduce_sum", "cumsum"),
  )
)


def with_random_rounding(fun: Callable[..., Any], *args: Any) -> Callable[..., Any]:
  """Returns a function of (key, *args): `fun` with random rounding to half precision.

  A matrix product, a convolution, an arithmetic operation and a cast with a half-precision result are
  computed in float32 and rounded to one of the two neighbours, so that the mean is right. The inside of a
  `shard_map`, a kernel or an FP8 product does not change.

  Args:
    fun: any function of arrays.
    args: arguments for tracing; shapes will do.
  """
  closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
  structure = jax.tree.structure(shapes)

  def run(key: Array, *args: Any) -> Any:
    return jax.tree.unflatten(structure, interpret(closed, jax.tree.leaves(args), _AtRandom(key)))

  return run


class _AtRandom:
  """The rule of `interpret` under a key."""

  def __init__(self, key: Array):
    self._key = key

  def __call__(self, equation: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    if call_kind(equation) is not None:
      return into_bodies(equation, operands, self)
    dtype = getattr(equation.outvars[0].aval, "dtype", None) if len(equation.outvars) == 1 else None
    if dtype not in _HALF:
      return bind_again(equation, operands)
    with as_traced(equation):
      wide = _in_float32(equation, operands)
      return bind_again(equation, operands) if wide is None else [self._rounded(wide, dtype)]

  def _rounded(self, x: Array, dtype: Any) -> Array:
    # The key depends on the values, so that a recomputed value is rounded as the first time, and the steps of
    # a loop are rounded differently.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    return stochastic_round(x, jax.random.fold_in(self._key, jnp.sum(bits, dtype=jnp.uint32)), dtype)


def _in_float32(equation: JaxprEqn, operands: Sequence[Any]) -> Array | None:
  """Returns the result of an equation before its rounding to half precision; `None` if it is exact."""
  name = equation.primitive.name
  if name == "convert_element_type":
    return jnp.asarray(operands[0]) if operands[0].dtype == jnp.float32 else None
  wide = [jnp.asarray(x, jnp.float32) if jnp.result_type(x) in _HALF else x for x in operands]
  if name in _PRODUCTS:
    params = {key: value for key, value in equation.params.items() if key != "originals"}
    params |= {
      "preferred_element_type": jnp.dtype(jnp.float32),
      "precision": (jax.lax.Precision.HIGHEST,) * 2,
    }
    return _PRODUCTS[name].bind(*wide[:2], **params)
  if name in _ARITHMETIC:
    (out,) = _compat.bind(equation, wide)
    return out if out.dtype == jnp.float32 else None
  return None
