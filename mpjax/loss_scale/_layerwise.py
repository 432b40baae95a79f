"""Layer-wise adaptive loss scaling: each layer's scale from the statistics of its weights and its gradient.

The gradient that travels backward carries the product of the scales that it has passed. That product
travels with it as the cotangent of a dummy array, the token, so that every layer can divide the gradients of
its parameters by it. The token also carries a count of the gradient's paths: if an activation was used
twice, two scales were added up, and the gradient becomes NaN instead of wrong. The forward pass is not
scaled.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat
from mpjax._types import Array, ArrayLike, DTypeLike, PyTree
from mpjax.dtypes import at_least_float32, cast_floating
from mpjax.jaxpr import closure_as_argument
from mpjax.loss_scale._guard import is_inexact
from mpjax.policy import HIGHEST, number


@jax.tree_util.register_dataclass
@dataclasses.dataclass(eq=False)
class Scaled:
  """An activation between `start` and `finish`: a pytree, and so a carry of `jax.lax.scan`.

  Attributes:
    value: the activation, in the dtype that its layer computes in.
    token: array of shape [2] and dtype float32; zeros. Its cotangents are the scale of `value`'s gradient and
      the number of paths that it came by.
  """

  value: jax.Array
  token: jax.Array
  _spent = False


def layerwise_loss_scale(
  *,
  underflow: float = 1e-3,
  init_scale: float | None = None,
  max_layer_scale: float = 2.0**10,
  max_scale: float = 2.0**100,
) -> LayerwiseLossScale:
  """Scales the gradients of a model in plain JAX layer by layer, without trial and error.

  The resulting gradients are those of the loss itself: there is nothing to scale before or to unscale after.
  An activation, or the inside of a function given to `apply`, can still overflow;
  `mpjax.static_loss_scale(tx, 1)` skips such steps. Compute the loss itself after `finish`, in float32. The
  gradient of a gradient is not scaled.

  ```python
  scaling = mpjax.loss_scale.layerwise_loss_scale()

  def loss_fn(params, x, y):
    h = scaling.start(x, jnp.float16)
    for p in params:
      h = scaling.layer(lambda p, x: x @ p["w"] + p["b"], p, h)
      h = scaling.apply(jnp.tanh, h)
    return jnp.mean((scaling.finish(h) - y) ** 2)
  ```

  The method models a layer's products as normal, with the standard deviation of independent weights and
  gradients. A layer's scale is the smallest power of two that keeps the share of products that underflow
  below `underflow`, bounded so that no sum of products can overflow. The bounds follow the dtype of the
  gradient: layers that compute in float32 or bfloat16 get a scale of 1.

  Reference: Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385. There
  the first scale is 1, `max_layer_scale` 16 and `max_scale` 1024: too little for deep chains.

  Args:
    underflow: share of a layer's products that may underflow, between 0 and 1.
    init_scale: scale of the loss's own gradient, where it enters half precision; `None` chooses the power of
      two that brings its largest element to between 1/2 and 1.
    max_layer_scale: upper bound of one layer's scale.
    max_scale: upper bound of the product of scales, at most 2**126.

  Raises:
    ValueError: if an argument is out of range; names it.
  """
  return LayerwiseLossScale(underflow, init_scale, max_layer_scale, max_scale)


@dataclasses.dataclass(frozen=True)
class LayerwiseLossScale:
  """Layer-wise loss scaling, from `layerwise_loss_scale`, whose arguments are its attributes."""

  underflow: float
  init_scale: float | None
  max_layer_scale: float
  max_scale: float

  def __post_init__(self) -> None:
    for name, value in vars(self).copy().items():
      if name != "init_scale" or value is not None:
        object.__setattr__(self, name, number(name, value))
    if not 0 < self.underflow < 1:
      raise ValueError(f"underflow={self.underflow!r}: expected a share between 0 and 1")
    for name in ("max_layer_scale", "max_scale"):
      if not 1 <= getattr(self, name) <= HIGHEST:
        raise ValueError(f"{name}={getattr(self, name)!r}: expected a number from 1 to 2**126")
    if self.init_scale is not None and not 0 < self.init_scale <= self.max_scale:
      raise ValueError(f"init_scale={self.init_scale!r}: expected a positive number up to {self.max_scale!r}")

  def start(self, x: ArrayLike, dtype: DTypeLike | None = None) -> Scaled:
    """Returns `x` as the first activation; the gradient with respect to `x` comes out unscaled.

    Args:
      x: floating array; in float32, if its own gradient matters, since that is unscaled in the dtype of `x`.
      dtype: the dtype to compute in; `None`: that of `x`.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(f"start takes a floating array, not {x.dtype}: start after looking up embeddings")
    dtype = jnp.dtype(dtype or x.dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"start computes in a floating dtype, not {dtype}")
    return Scaled(*_start(x, dtype))

  def layer(
    self,
    fun: Callable[[PyTree, Array], Array],
    params: PyTree,
    h: Scaled,
    *,
    kernel: Callable[[PyTree], Array] | None = None,
    fan_in: int | None = None,
  ) -> Scaled:
    """Applies `fun(params, h)`; rescales the gradient on its way back, and unscales that of `params`.

    `fun` should be the matrix product or convolution and its bias; activation functions go to `apply`. A
    layer without a kernel, such as a norm with its gain, does not change the scale. Arrays that `fun`
    closes over are treated as its parameters (under `shard_map`, if they differ between shards).

    Args:
      fun: (params in `h`'s dtype, array) -> floating array.
      params: master weights in float32 or wider; their gradients come out in that dtype.
      h: the activation.
      kernel: takes from `params` the array that the gradient is multiplied by; `None`: the only leaf of two
        or more dimensions, if there is one.
      fan_in: the number of products summed in each element of the gradient that is passed on; `None`: for a
        kernel of shape [..., in, out], its size divided by `in`.

    Raises:
      TypeError: if `h` does not come from `start`, or `fun` does not return one floating array.
      ValueError: if a parameter is narrower than float32 or sharded otherwise than `h`, if several leaves
        could be the kernel, if `h` was used before, or if `fun` communicates between devices.
    """
    value, token = _spend(h)
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
      dtype = jnp.result_type(leaf)
      if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise ValueError(
          f"parameter {jax.tree_util.keystr(path)} is {dtype}: its gradient would be unscaled in that dtype "
          "and underflow; pass the float32 master weights, which are cast to the activation's dtype"
        )
    stray = _compat.varying_axes(params) - _compat.varying_axes(value)
    if stray:
      raise ValueError(
        f"parameters differ along the mesh axes {sorted(stray)} and the activation does not: under tensor "
        "parallelism each shard would choose its own scale for one gradient"
      )
    kernel = kernel or _only_kernel(params)
    if kernel is not None and fan_in is None and jnp.ndim(kernel(params)) < 2:
      raise ValueError("the fan-in of a kernel of less than two dimensions is unknown: pass fan_in=...")
    cast = lambda p, x: fun(cast_floating(p, x.dtype), x)
    return self._call(cast, _compat.vary_like(params, value), [(value, token)], kernel, fan_in)

  def apply(self, fun: Callable[..., jax.Array], *hs: Scaled) -> Scaled:
    """Applies `fun` to one or more activations: activation functions, sums, attention, dropout.

    Arrays that `fun` closes over also get an unscaled gradient (in float32; in half precision NaN where it
    would underflow). `fork` an activation before you use it twice: its two gradients have different scales.

    Raises:
      TypeError: if one of `hs` does not come from `start`, or `fun` does not return one floating array.
      ValueError: if one of `hs` was used before, or `fun` communicates between devices.
    """
    return self._call(lambda _, *values: fun(*values), (), [_spend(h) for h in hs])

  def fork(self, h: Scaled, n: int = 2) -> tuple[Scaled, ...]:
    """Returns `n` copies of an activation, whose gradients are brought to one scale before they are added.

    This is the largest of their scales at which the sum does not overflow. If there is none, it is a smaller
    power of two.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
      raise ValueError(f"n={n!r}: expected a positive integer")
    return tuple(Scaled(*copy) for copy in _fork(*_spend(h), n))

  def finish(self, h: Scaled) -> jax.Array:
    """Returns the activation in float32 or wider, for the loss; `init_scale` multiplies its gradient."""
    return self.apply(lambda value: value.astype(at_least_float32(value.dtype)), h).value

  def _call(
    self,
    fun: Callable[..., Array],
    params: PyTree,
    spent: Sequence[tuple[Array, Array]],
    kernel: Callable[[PyTree], Array] | None = None,
    fan_in: int | None = None,
  ) -> Scaled:
    """Returns `fun(params, *values)`, with the backward pass of the paper, of values and their tokens."""
    values, tokens = zip(*spent, strict=True)
    dtypes = [value.dtype for value in values]
    closed, constants, axes = closure_as_argument(fun, params, *values)
    run = lambda learnt, values: closed(*learnt, *values)
    learnt = constants, params
    out = jax.eval_shape(run, learnt, values)
    if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.floating):
      raise TypeError(f"a function between start and finish has to return one floating array, not {out}")
    if axes:
      raise ValueError(
        f"a function between start and finish communicates along {sorted(axes)}: every shard has its own "
        "scales there, so no gradient can cross; communicate before start or after finish"
      )

    @jax.custom_vjp
    def call(learnt: PyTree, values: tuple[Array, ...], token: Array) -> Any:
      out = run(learnt, values)
      return out, _tie(token, out)

    def forward(learnt: PyTree, values: tuple[Array, ...], token: Array) -> Any:
      out, pullback = jax.vjp(run, learnt, values)
      # At least 64: a norm can bring a small activation to that size.
      tops = [jnp.abs(value).max(initial=64).astype(jnp.float32) for value in values]
      return (out, _tie(token, out)), (pullback, learnt, functools.reduce(jnp.maximum, tops))

    def backward(residuals: Any, cotangents: tuple[Array, Array]) -> Any:
      pullback, learnt, largest = residuals
      g, passed = cotangents[0], _scale_of(cotangents[1])
      half = max((g.dtype, *dtypes), key=lambda dtype: jnp.finfo(dtype).minexp)
      if _has_wide_range(g.dtype) and not _has_wide_range(half):
        first = self.enter(g, passed)  # the gradient enters half precision here
        g, passed = _times(g, first), passed * first
      used = jnp.ones_like(passed)
      if kernel is not None:
        used = self.measure(g.astype(half), kernel(learnt[1]), passed, fan_in)
      room = _room_for_sums(g, largest, learnt)
      of_learnt = _divide(pullback(_times(g, room))[0], passed * room)
      of_learnt = jax.tree.map(_nan_if_shared, learnt, of_learnt)
      of_token = jnp.stack([passed * used, jnp.ones_like(used)])
      return of_learnt, pullback(_times(g, used))[1], of_token

    call.defvjp(forward, backward)
    return Scaled(*call(learnt, values, functools.reduce(operator.add, tokens)))

  def enter(self, g: jax.Array, passed: jax.Array) -> jax.Array:
    """Returns the scale, f32[], of a gradient that enters half precision; 1 if it is zero or not finite.

    `g` is the gradient, multiplied by `passed`, f32[], the product of the scales so far. See `init_scale`.
    """
    if self.init_scale is not None:
      return self.init_scale / passed
    top = jnp.abs(g).max(initial=0).astype(jnp.float32)
    scale = jnp.minimum(0.5 / _floor_power_of_two(top), self.max_scale / passed)
    return jnp.where(jnp.isfinite(top) & (top > 0), scale, 1.0)

  def measure(
    self, g: jax.Array, kernel: jax.Array, passed: jax.Array, fan_in: int | None = None
  ) -> jax.Array:
    """Returns the scale of a layer, f32[]: a power of two; 1 for a gradient that is zero or not finite.

    `g` is the gradient of the layer's output, in the dtype of the layer, multiplied by `passed`, f32[], the
    product of the scales so far. `kernel` and `fan_in` are the weights and what `layer` takes.
    """
    if not g.size or _has_wide_range(g.dtype):
      return jnp.ones_like(passed)
    limits = jnp.finfo(g.dtype)
    g, kernel = g.astype(jnp.float32), kernel.astype(jnp.float32)
    rms = lambda x: jnp.sqrt(jnp.mean(x * x))
    # The second moment of a product of independents: the mean square is the variance plus the squared mean.
    sigma = rms(g) * rms(kernel)
    smallest = float(limits.smallest_subnormal) / statistics.NormalDist().inv_cdf((1 + self.underflow) / 2)
    terms = max(1, kernel.size // max(1, kernel.shape[-2])) if fan_in is None else fan_in
    top, largest = jnp.abs(g).max(), float(limits.max)
    # Not in the paper: the scaled gradient itself must fit, also where all weights are below 1 / terms.
    fits = largest / (top * jnp.maximum(jnp.abs(kernel).max() * terms, 1.0))
    most = jnp.minimum(jnp.minimum(fits, self.max_scale / passed), self.max_layer_scale)
    scale = jnp.minimum(jnp.maximum(smallest / sigma, 1.0), most)
    return jnp.where(jnp.isfinite(top) & (sigma > 0), _floor_power_of_two(scale), 1.0)


def _spend(h: object) -> tuple[Array, Array]:
  """Returns value and token, once: two gradients with different scales cannot simply be added."""
  if not isinstance(h, Scaled):
    raise TypeError(f"expected an activation from scaling.start(x), got {type(h).__name__}")
  if jnp.shape(h.token) != (2,):
    raise ValueError(
      f"a stack of {jnp.shape(h.token)[:-1]} activations, as from vmap or the outputs of scan: take "
      "it apart by vmap too, as in jax.vmap(scaling.finish)(stack)"
    )
  if h._spent:
    raise ValueError("this activation was used before: copy it for each use, as in h1, h2 = scaling.fork(h)")
  h._spent = True
  return h.value, h.token


def _only_kernel(params: PyTree) -> Callable[[PyTree], Array] | None:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  found = [i for i, (_, leaf) in enumerate(leaves) if jnp.ndim(leaf) >= 2 and is_inexact(leaf)]
  if len(found) > 1:
    names = ", ".join(jax.tree_util.keystr(leaves[i][0]) for i in found)
    raise ValueError(
      f"several parameters could be the kernel of this layer: {names}; split the layer, or pass the "
      "one that the gradient is multiplied by, as in kernel=lambda p: p['w']"
    )
  return (lambda p: jax.tree.leaves(p)[found[0]]) if found else None


def _start(x: Array, dtype: np.dtype) -> tuple[Array, Array]:
  """Returns `x` in `dtype`, whose gradient is unscaled in float32, and a token."""
  kept = x.dtype
  cast = lambda x, token: (x.astype(dtype), token)

  def backward(_: None, cotangents: tuple[Array, Array]) -> tuple[Array, Array]:
    g, token = cotangents
    g = _divide(g.astype(at_least_float32(kept)), _scale_of(token))
    return g.astype(kept), jnp.zeros_like(token)

  call = jax.custom_vjp(cast)
  # No forward rule calls its own function: the gradient of a gradient is an ordinary one, without scaling.
  call.defvjp(lambda x, token: (cast(x, token), None), backward)
  return call(x, _tie(jnp.zeros([2], jnp.float32), x))


def _fork(value: Array, token: Array, n: int) -> list[tuple[Array, Array]]:
  """Returns `n` copies, whose gradients are added at the largest of their scales at which the sum fits.

  If there is none, it is the largest power of two at which the sum fits in its dtype. An unused copy has a
  scale of 1, and adds nothing.
  """
  copies = lambda value, token: [(value, token)] * n

  def backward(_: None, cotangents: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    gradients, tokens = (jnp.stack(parts) for parts in zip(*cotangents, strict=True))
    scales = _scale_of(tokens)
    tops = jnp.abs(gradients.reshape(n, -1)).max(1, initial=0).astype(jnp.float32)
    bound = float(jnp.finfo(gradients.dtype).max) / (tops / scales).sum()
    fitting = jnp.where(scales <= bound, scales, 0).max()
    target = jnp.where(fitting > 0, fitting, _floor_power_of_two(bound))
    wide = gradients.astype(at_least_float32(gradients.dtype))
    total = _times(wide, (target / scales).reshape(n, *[1] * (gradients.ndim - 1))).sum(0)
    return total.astype(gradients.dtype), jnp.stack([target, jnp.minimum(tokens[:, 1].max(), 1)])

  call = jax.custom_vjp(copies)
  call.defvjp(lambda value, token: (copies(value, token), None), backward)
  return call(value, token)


def _tie(token: Array, like: Array) -> Array:
  """Returns `token`, batched under `vmap` and varying under `shard_map` where `like` is."""
  return jnp.where(True, token, jax.lax.stop_gradient(like).sum().astype(token.dtype))


def _scale_of(token: Array) -> Array:
  """Returns the scale, f32[...], of tokens [..., 2]; 1 without a path, NaN for several paths."""
  scale, paths = token[..., 0], token[..., 1]
  known = jnp.where(paths == 1, scale, jnp.where(paths == 0, 1.0, 0.0))
  return known / (paths <= 1).astype(known.dtype)  # 0 / 0 for several; no other NaN, for jax_debug_nans


def _times(g: Array, scale: Array) -> Array:
  """Multiplies `g` by a scale that may not fit in `g`'s dtype."""
  wide = at_least_float32(g.dtype)
  return (g.astype(wide) * scale.astype(wide)).astype(g.dtype)


def _divide(tree: PyTree, scale: Array) -> PyTree:
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


def _room_for_sums(g: Array, largest: Array, learnt: PyTree) -> Array:
  """Returns a power of two up to 1 that keeps every sum for the gradient of `learnt` in `g`'s range.

  The sums are computed in the dtype of the layer, and divided in float32 after. They are sums of `g` times an
  input, up to `largest`, over all axes but the last, or over all axes for a leaf of another size.
  """
  if _has_wide_range(g.dtype) or not g.size:
    return jnp.ones_like(largest)
  columns = g.shape[-1] if g.ndim else 1
  if any(jnp.size(leaf) % columns for leaf in jax.tree.leaves(learnt) if is_inexact(leaf)):
    columns = 1
  top = jnp.abs(g.astype(jnp.float32)).reshape(-1, columns).sum(0).max()
  bound = float(jnp.finfo(g.dtype).max) / (top * largest)
  return jnp.where(bound < 1, _floor_power_of_two(bound), 1.0)


def _nan_if_shared(x: Array, g: Array) -> Array:
  """Returns `g`, or NaN if all shards share `x`, so that `g` is a sum of gradients with different scales."""
  if g.dtype == jax.dtypes.float0 or not _compat.varying_axes(g) - _compat.varying_axes(x):
    return g
  return jnp.full_like(x, jnp.nan)


def _has_wide_range(dtype: DTypeLike) -> bool:
  """Returns whether `dtype` has the range of float32, in which no part of a gradient underflows."""
  return jnp.finfo(dtype).minexp < -100


def _floor_power_of_two(x: Array) -> Array:
  """Returns the greatest power of two that is not above `x`."""
  return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)
