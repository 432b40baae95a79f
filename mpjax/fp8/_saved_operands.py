"""Operands saved for a backward pass in FP8: one byte per element, and a scale for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NoReturn

import jax
import jax.numpy as jnp

from mpjax._types import Array, DTypeLike, PyTree
from mpjax.fp8._scaling import amax_of, quantise, scale_of


def keep_in_fp8(fun: Callable[..., PyTree], which: Sequence[bool], dtype: DTypeLike) -> Callable[..., PyTree]:
  """Returns `fun` with a backward pass that recomputes it, from operands saved in FP8.

  The value is that of `fun`; the gradient is the gradient at the rounded operands.

  Args:
    fun: any function of arrays.
    which: for each operand, whether it is saved in FP8; the others are saved as they are.
    dtype: an FP8 format.

  Returns:
    A function with `fun`'s value, for reverse-mode differentiation, once.
  """

  @jax.custom_vjp
  def kept(*operands: Array) -> PyTree:
    return fun(*operands)

  def forward(*operands: Array) -> tuple[PyTree, list[PyTree]]:
    return fun(*operands), [
      _narrow(x, dtype) if narrow else x for x, narrow in zip(operands, which, strict=True)
    ]

  def backward(saved: list[PyTree], cotangents: PyTree) -> tuple[PyTree, ...]:
    # Otherwise a compiler might widen early, and save the wide array.
    kept, cotangents = jax.lax.optimization_barrier(
      ([x for x, narrow in zip(saved, which, strict=True) if narrow], cotangents)
    )
    narrowed = iter(kept)
    operands = [_wide(*next(narrowed)) if narrow else x for x, narrow in zip(saved, which, strict=True)]
    return jax.vjp(fun, *operands)[1](cotangents)

  kept.defvjp(forward, backward)
  return kept


@jax.custom_jvp
def not_differentiable(x: jax.Array) -> jax.Array:
  """Returns `x`, saved for a backward pass in too few bits for a second differentiation."""
  return x


@not_differentiable.defjvp
def _(primals: Sequence[Array], tangents: Sequence[Array]) -> NoReturn:
  raise NotImplementedError(
    "a second derivative of a function with saved_activations: fp8, which saves too little for it: use "
    "saved_activations: compute"
  )


def _narrow(x: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array, jax.Array]:
  x = not_differentiable(x)
  scale = scale_of(amax_of(x), dtype)
  return quantise(x, scale, dtype), scale, jnp.zeros([0], x.dtype)


def _wide(q: jax.Array, scale: jax.Array, like: jax.Array) -> jax.Array:
  return (q.astype(jnp.float32) / scale).astype(like.dtype)
