"""The derivatives of layer-wise scaling: how gradients, and their scales, go backward.

A token is an array of two zeros that accompanies an activation. Its cotangents are the scale of the
activation's gradient, and the number of paths that the gradient came by.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import Array, DTypeLike, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.loss_scale._finite import is_inexact


class Layer(NamedTuple):
  """The static part of a layer; `run` takes the arrays it closed over, the parameters and the activations."""

  run: Callable[..., jax.Array]
  enter: Callable[[jax.Array, jax.Array], jax.Array]
  measure: Callable[..., jax.Array]
  kernel: Callable[[PyTree], jax.Array] | None = None
  fan_in: int | None = None
  reuses: bool = False


def layer(
  static: Layer,
  learnt: tuple[PyTree, PyTree],
  values: tuple[jax.Array, ...],
  token: jax.Array,
  scale: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Returns output and token of `static.run(*learnt, *values)`, with the backward pass of the paper."""
  run = lambda learnt, values: static.run(*learnt, *values)
  dtype = max((value.dtype for value in values), key=lambda dtype: jnp.finfo(dtype).minexp)

  @jax.custom_vjp
  def call(
    learnt: PyTree, values: tuple[Array, ...], token: jax.Array, scale: jax.Array
  ) -> tuple[Array, Array]:
    out = run(learnt, values)
    return out, tie(token, out)

  def forward(
    learnt: PyTree, values: tuple[Array, ...], token: jax.Array, scale: jax.Array
  ) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    out, backward = jax.vjp(run, learnt, values)
    largest = _largest(values) if jax.tree.leaves(learnt) else None
    return (out, tie(token, out)), (backward, learnt, largest, scale)

  def backward(
    residuals: tuple[Any, ...], cotangents: tuple[Array, Array]
  ) -> tuple[PyTree, PyTree, Array, Array]:
    vjp, learnt, largest, scale = residuals
    g, token = cotangents
    passed = _sole(token)
    used = _compat.vary_like(jnp.ones([], jnp.float32), g)
    if has_wide_range(g.dtype) and not has_wide_range(dtype):
      first = static.enter(g, passed)  # the gradient enters half precision here, not at the end
      g, passed = _times(g, first), passed * first
    of_learnt, of_values = vjp(g)
    if static.kernel is not None:
      kernel, low = static.kernel, g.astype(dtype if has_wide_range(g.dtype) else g.dtype)
      measure = lambda: static.measure(low, kernel(learnt[1]), passed, static.fan_in)
      used = jax.lax.cond(scale > 0, lambda: scale, measure) if static.reuses else measure()
      of_values = vjp(_times(g, used))[1]
    if largest is not None:
      less = _fit_sums(g, largest, learnt)
      of_learnt = jax.tree.map(_unshared, learnt, divide(vjp(_times(g, less))[0], passed * less))
    return of_learnt, of_values, jnp.stack([passed * used, jnp.ones_like(used)]), used

  call.defvjp(forward, backward)
  return call(learnt, values, token, scale)


def _largest(values: tuple[jax.Array, ...]) -> jax.Array:
  """Returns the largest magnitude, f32[], at least 64: a norm can bring a small activation to that size."""
  tops = [jnp.abs(v).max().astype(jnp.float32) for v in values if v.size]
  return functools.reduce(jnp.maximum, tops, _compat.vary_like(jnp.full([], 64.0, jnp.float32), values[0]))


def _fit_sums(g: jax.Array, largest: jax.Array, learnt: PyTree) -> jax.Array:
  """Returns a power of two up to 1 that keeps every sum for a parameter's gradient in `g`'s range.

  The sums are computed in the dtype of the layer, and divided in float32 after. They are sums of `g` times an
  input over all axes but the last, for a vector over all axes but that, or over all for a single number.
  """
  if has_wide_range(g.dtype) or not g.size:
    return jnp.ones_like(largest)
  sizes = {jnp.size(leaf) for leaf in jax.tree.leaves(learnt) if is_inexact(leaf)}
  magnitudes = jnp.abs(g.astype(jnp.float32))
  if g.ndim == 0 or 1 in sizes:
    top = magnitudes.sum()
  else:
    kept = [axis for axis in range(g.ndim) if axis == g.ndim - 1 or g.shape[axis] in sizes]
    others = [tuple(other for other in range(g.ndim) if other != axis) for axis in kept]
    top = functools.reduce(jnp.maximum, [magnitudes.sum(axes).max() for axes in others])
  bound = float(jnp.finfo(g.dtype).max) / (top * largest)
  return jnp.where(bound < 1, floor_power_of_two(bound), 1.0)


def _unshared(x: jax.Array, g: jax.Array) -> jax.Array:
  """Returns `g`, or NaN if all shards share `x`, so that `g` is a sum of gradients with different scales."""
  if g.dtype == jax.dtypes.float0 or not _compat.varying_axes(g) - _compat.varying_axes(x):
    return g
  return jnp.full_like(x, jnp.nan)


def divide(tree: PyTree, scale: jax.Array) -> PyTree:
  """Divides `tree` by `scale`, in the dtypes of `tree`; leaves that are not gradients stay as they are.

  Gives NaN where a half-precision gradient becomes too small for its dtype: parameters must be in float32.
  """

  def leaf(g: Array) -> Array:
    if not is_inexact(g):
      return g
    wide = at_least_float32(g.dtype)
    out = g.astype(wide) / scale.astype(jnp.finfo(wide).dtype)
    if wide != g.dtype:
      out = jnp.where((g != 0) & (jnp.abs(out) < float(jnp.finfo(g.dtype).tiny)), jnp.nan, out)
    return out.astype(g.dtype)

  return jax.tree.map(leaf, tree)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def start(dtype: np.dtype, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Casts `x` to `dtype`; its gradient is unscaled in float32."""
  return x.astype(dtype), token


def _start_backward(
  dtype: np.dtype, like: jax.Array, cotangents: tuple[Array, Array]
) -> tuple[jax.Array, jax.Array]:
  g, token = cotangents
  wide = at_least_float32(like.dtype)
  return divide(g.astype(wide), _sole(token)).astype(like.dtype), jnp.zeros_like(token)


# An empty array stands for the dtype, which cannot be a residual. No forward rule calls its own function: the
# gradient of a gradient is an ordinary one, without scaling.
start.defvjp(lambda dtype, x, token: ((x.astype(dtype), token), x.ravel()[:0]), _start_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def finish(enter: Callable[..., jax.Array], value: jax.Array, token: jax.Array) -> jax.Array:
  """Casts `value` to float32; its gradient is scaled in float32 before it is cast back."""
  return value.astype(at_least_float32(value.dtype))


def _finish_backward(
  enter: Callable[..., jax.Array], like: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  scale = _compat.vary_like(jnp.ones([], jnp.float32), g)
  if not has_wide_range(like.dtype):
    scale = enter(g, scale)
  return _times(g, scale).astype(like.dtype), jnp.stack([scale, jnp.ones_like(scale)])


finish.defvjp(
  lambda enter, value, token: (
    value.astype(at_least_float32(value.dtype)),
    value.ravel()[:0],
  ),
  _finish_backward,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fork(n: int, value: jax.Array, token: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
  """Returns `n` copies; their gradients are brought to one scale and added."""
  return [(value, token)] * n


def _fork_backward(n: int, _: None, cotangents: list[tuple[Array, Array]]) -> tuple[jax.Array, jax.Array]:
  gradients = jnp.stack([g for g, _ in cotangents])  # [n, ...]
  tokens = jnp.stack([token for _, token in cotangents])  # f32[n, 2]
  used = tokens[:, 1] > 0
  scales = jax.vmap(_sole)(tokens)
  # An unused copy has neither gradient nor scale: it takes the largest scale of the others.
  scales = jnp.where(used, scales, jnp.where(used.any(), jnp.max(jnp.where(used, scales, 0)), 1.0))
  wide = gradients.astype(at_least_float32(gradients.dtype))
  ratio = lambda scale: (scale / scales).reshape(n, *[1] * (wide.ndim - 1)).astype(wide.dtype)
  tops = jnp.abs(wide.reshape(n, -1)).max(1) if wide.size else jnp.zeros([n], wide.dtype)
  limit = float(jnp.finfo(gradients.dtype).max)
  # The sum must fit, as well as each summand.
  fits = lambda scale: (tops / scales * scale).sum() < limit
  lowest = scales.min()
  candidates = jnp.concatenate([jnp.sort(scales)[::-1], lowest * 2.0 ** -jnp.arange(1.0, 64.0)])
  usable = jax.vmap(fits)(candidates)
  # A gradient that is not finite already fits at no scale: it goes on as it is.
  target = jnp.where(usable.any(), candidates[jnp.argmax(usable)], lowest)
  total = (wide * ratio(target)).sum(0).astype(gradients.dtype)
  return total, jnp.stack([target, used.any().astype(jnp.float32)])


fork.defvjp(lambda n, value, token: ([(value, token)] * n, None), _fork_backward)


def tie(token: jax.Array, like: jax.Array) -> jax.Array:
  """Returns `token`, batched under `vmap` and varying under `shard_map` where `like` is."""
  return jnp.where(True, token, jax.lax.stop_gradient(like).sum().astype(token.dtype))


def _sole(token: jax.Array) -> jax.Array:
  """Returns the scale of a token that came by one path; 1 without a path, NaN for several."""
  scale, paths = token
  known = jnp.where(paths == 1, scale, jnp.where(paths == 0, 1.0, 0.0))
  return known / (paths <= 1).astype(known.dtype)  # 0 / 0 for several; no other NaN, for jax_debug_nans


def _times(g: jax.Array, scale: jax.Array) -> jax.Array:
  """Multiplies `g` by a scale that may not fit in `g`'s dtype."""
  wide = at_least_float32(g.dtype)
  return (g.astype(wide) * scale.astype(wide)).astype(g.dtype)


def has_wide_range(dtype: DTypeLike) -> bool:
  """Returns whether `dtype` has the range of float32, in which no part of a gradient underflows."""
  return jnp.finfo(dtype).minexp < -100


def floor_power_of_two(x: jax.Array) -> jax.Array:
  """Returns the greatest power of two that is not above `x`."""
  return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)
