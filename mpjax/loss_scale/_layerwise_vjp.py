"""How gradients, and their scales in the cotangents of tokens, go backward through layer-wise scaling."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import Array, DTypeLike, PyTree
from mpjax.dtypes import at_least_float32
from mpjax.loss_scale._guard import is_inexact


def start(x: Array, dtype: np.dtype) -> tuple[Array, Array]:
  """Returns `x` in `dtype`, whose gradient is unscaled in float32, and a token."""
  kept = x.dtype
  cast = lambda x, token: (x.astype(dtype), token)

  def backward(_: None, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    g, token = cotangents
    g = divide(g.astype(at_least_float32(kept)), scale_of(token))
    return g.astype(kept), jnp.zeros_like(token)

  call = jax.custom_vjp(cast)
  # No forward rule calls its own function: the gradient of a gradient is an ordinary one, without scaling.
  call.defvjp(lambda x, token: (cast(x, token), None), backward)
  return call(x, tie(jnp.zeros([2], jnp.float32), x))


def fork(value: Array, token: Array, n: int) -> list[tuple[Array, Array]]:
  """Returns `n` copies, whose gradients are added at the largest of their scales at which the sum fits.

  If there is none, it is the largest power of two at which the sum fits in its dtype. An unused copy has a
  scale of 1, and adds nothing.
  """
  copies = lambda value, token: [(value, token)] * n

  def backward(_: None, cotangents: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    gradients, tokens = (jnp.stack(parts) for parts in zip(*cotangents, strict=True))
    scales = scale_of(tokens)
    tops = jnp.abs(gradients.reshape(n, -1)).max(1, initial=0).astype(jnp.float32)
    bound = float(jnp.finfo(gradients.dtype).max) / (tops / scales).sum()
    fitting = jnp.where(scales <= bound, scales, 0).max()
    target = jnp.where(fitting > 0, fitting, floor_power_of_two(bound))
    wide = gradients.astype(at_least_float32(gradients.dtype))
    total = times(wide, (target / scales).reshape(n, *[1] * (gradients.ndim - 1))).sum(0)
    return total.astype(gradients.dtype), jnp.stack([target, jnp.minimum(tokens[:, 1].max(), 1)])

  call = jax.custom_vjp(copies)
  call.defvjp(lambda value, token: (copies(value, token), None), backward)
  return call(value, token)


def tie(token: Array, like: Array) -> Array:
  """Returns `token`, batched under `vmap` and varying under `shard_map` where `like` is."""
  return jnp.where(True, token, jax.lax.stop_gradient(like).sum().astype(token.dtype))


def scale_of(token: Array) -> Array:
  """Returns the scale, f32[...], of tokens [..., 2]; 1 without a path, NaN for several paths."""
  scale, paths = token[..., 0], token[..., 1]
  known = jnp.where(paths == 1, scale, jnp.where(paths == 0, 1.0, 0.0))
  return known / (paths <= 1).astype(known.dtype)  # 0 / 0 for several; no other NaN, for jax_debug_nans


def times(g: Array, scale: Array) -> Array:
  """Multiplies `g` by a scale that may not fit in `g`'s dtype."""
  wide = at_least_float32(g.dtype)
  return (g.astype(wide) * scale.astype(wide)).astype(g.dtype)


def divide(tree: PyTree, scale: Array) -> PyTree:
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


def room_for_sums(g: Array, largest: Array, learnt: PyTree) -> Array:
  """Returns a power of two up to 1 that keeps every sum for the gradient of `learnt` in `g`'s range.

  The sums are computed in the dtype of the layer, and divided in float32 after. They are sums of `g` times an
  input, up to `largest`, over all axes but the last, or over all axes for a leaf of another size.
  """
  if has_wide_range(g.dtype) or not g.size:
    return jnp.ones_like(largest)
  columns = g.shape[-1] if g.ndim else 1
  if any(jnp.size(leaf) % columns for leaf in jax.tree.leaves(learnt) if is_inexact(leaf)):
    columns = 1
  top = jnp.abs(g.astype(jnp.float32)).reshape(-1, columns).sum(0).max()
  bound = float(jnp.finfo(g.dtype).max) / (top * largest)
  return jnp.where(bound < 1, floor_power_of_two(bound), 1.0)


def nan_if_shared(x: Array, g: Array) -> Array:
  """Returns `g`, or NaN if all shards share `x`, so that `g` is a sum of gradients with different scales."""
  if g.dtype == jax.dtypes.float0 or not _compat.varying_axes(g) - _compat.varying_axes(x):
    return g
  return jnp.full_like(x, jnp.nan)


def has_wide_range(dtype: DTypeLike) -> bool:
  """Returns whether `dtype` has the range of float32, in which no part of a gradient underflows."""
  return jnp.finfo(dtype).minexp < -100


def floor_power_of_two(x: Array) -> Array:
  """Returns the greatest power of two that is not above `x`."""
  return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)
