"""Layer-wise adaptive loss scaling: each layer's scale from the statistics of its weights and its gradient.

The gradient that travels backward carries the product of the scales that it has passed. That product
travels with it as the cotangent of a dummy array, the token, so that every layer can divide the gradients of
its parameters by it. The token also carries a count of the gradient's paths: if an activation was used
twice, two scales were added up, and the gradient becomes NaN instead of wrong. The forward pass is not
scaled.

Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax._types import Array, ArrayLike, DTypeLike, PyTree
from mpjax.dtypes import cast_floating
from mpjax.jaxpr import closure_as_argument
from mpjax.loss_scale import _layerwise_vjp
from mpjax.loss_scale._finite import is_inexact
from mpjax.policy._loss_scaling import HIGHEST, number


@jax.tree_util.register_pytree_node_class
class Scaled:
  """An activation between `start` and `finish`: a pytree, and so a carry of `jax.lax.scan`.

  Attributes:
    value: the activation, in the dtype that its layer computes in.
    token: array of shape [2] and dtype float32; zeros. Its cotangents are the scale of `value`'s gradient and
      the number of paths that it came by.
  """

  def __init__(self, value: jax.Array, token: jax.Array):
    self.value, self.token = value, token
    self._spent = False

  def spend(self) -> tuple[jax.Array, jax.Array]:
    """Returns value and token, once: two gradients with different scales cannot simply be added.

    Raises:
      ValueError: the second time, or if this is a stack of activations.
    """
    if jnp.shape(self.token) != (2,):
      raise ValueError(
        f"a stack of {jnp.shape(self.token)[:-1]} activations, as from vmap or the outputs of scan: take "
        "it apart by vmap too, as in jax.vmap(scaling.finish)(stack)"
      )
    if self._spent:
      raise ValueError(
        "this activation was used before: make a copy for each use, as in h1, h2 = scaling.fork(h)"
      )
    self._spent = True
    return self.value, self.token

  def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
    """Returns the two arrays."""
    return (self.value, self.token), None

  @classmethod
  def tree_unflatten(cls, _: None, children: tuple[jax.Array, jax.Array]) -> Scaled:
    """Makes an activation from the two arrays."""
    return cls(*children)


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
  """Layer-wise loss scaling, from `layerwise_loss_scale`, whose arguments are its attributes.

  ```python
  scaling = mpjax.loss_scale.layerwise_loss_scale(max_layer_scale=2.0**8)
  ```
  """

  underflow: float
  init_scale: float | None
  max_layer_scale: float
  max_scale: float

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if field.name != "init_scale" or value is not None:
        object.__setattr__(self, field.name, number(field.name, value))
    if not 0 < self.underflow < 1:
      raise ValueError(f"underflow={self.underflow!r}: expected a share between 0 and 1")
    for name in ("max_layer_scale", "max_scale"):
      if not 1 <= getattr(self, name) <= HIGHEST:
        raise ValueError(f"{name}={getattr(self, name)!r}: expected a number from 1 to 2**126")
    if self.init_scale is not None and not 0 < self.init_scale <= self.max_scale:
      raise ValueError(
        f"init_scale={self.init_scale!r}: expected a positive number up to max_scale={self.max_scale!r}"
      )

  def start(self, x: ArrayLike, dtype: DTypeLike | None = None) -> Scaled:
    """Returns `x` as the first activation; the gradient with respect to `x` comes out unscaled.

    Args:
      x: floating array; in float32, if its own gradient matters, since that is unscaled in the dtype of `x`.
      dtype: the dtype to compute in; `None`: that of `x`.
    """
    x = jnp.asarray(x)
    if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
      raise ValueError(f"start computes in a floating dtype, not {jnp.dtype(dtype)}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"start takes a floating array, not {x.dtype}: look up embeddings first, and start with them"
      )
    return Scaled(
      *_layerwise_vjp.start(
        jnp.dtype(dtype or x.dtype), x, _layerwise_vjp.tie(jnp.zeros([2], jnp.float32), x)
      )
    )

  def layer(
    self,
    fun: Callable[[PyTree, Array], Array],
    params: PyTree,
    h: Scaled,
    *,
    kernel: Callable[[PyTree], Array] | None = None,
    fan_in: int | None = None,
    scale: jax.Array | None = None,
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
      scale: f32[]; if positive, the layer's scale, measured earlier; if zero, the scale is measured. In both
        cases the gradient with respect to `scale` is the scale in use (their sum, where gradients are summed
        over micro-batches, members or shards), so that a training loop can measure once every few steps.

    Raises:
      TypeError: if `h` does not come from `start`, or `fun` does not return one floating array.
      ValueError: if a parameter is narrower than float32 or sharded otherwise than `h`, if several leaves
        could be the kernel, if `h` was used before, or if `fun` communicates between devices.
    """
    value, token = _spend(h)
    _check_master_weights(params)
    stray = _compat.varying_axes(params) - _compat.varying_axes(value)
    if stray:
      raise ValueError(
        f"parameters differ along the mesh axes {sorted(stray)} and the activation does not: under tensor "
        "parallelism each shard would choose its own scale for one gradient"
      )
    picked = kernel or _only_kernel(params)
    if picked is not None and fan_in is None and jnp.ndim(picked(params)) < 2:
      raise ValueError("the fan-in of a kernel of less than two dimensions is unknown: pass fan_in=...")
    reuses = scale is not None
    scale = jnp.asarray(scale, jnp.float32) if reuses else jnp.zeros([], jnp.float32)
    params, scale = _compat.vary_like((params, scale), value)
    run, constants = _without_closure(lambda p, x: fun(cast_floating(p, x.dtype), x), params, value)
    static = _layerwise_vjp.Layer(run, self.enter, self.measure, picked, fan_in, reuses)
    return Scaled(*_layerwise_vjp.layer(static, (constants, params), (value,), token, scale))

  def apply(self, fun: Callable[..., jax.Array], *hs: Scaled) -> Scaled:
    """Applies `fun` to one or more activations: activation functions, sums, attention, dropout.

    Arrays that `fun` closes over also get an unscaled gradient (in float32; in half precision NaN where it
    would underflow). `fork` an activation before you use it twice: its two gradients have different scales.

    Raises:
      TypeError: if one of `hs` does not come from `start`, or `fun` does not return one floating array.
      ValueError: if one of `hs` was used before, or `fun` communicates between devices.
    """
    values, tokens = zip(*map(_spend, hs), strict=True)
    run, constants = _without_closure(lambda _, *values: fun(*values), (), *values)
    zero = _compat.vary_like(jnp.zeros([], jnp.float32), values[0])
    token = functools.reduce(operator.add, tokens)
    return Scaled(
      *_layerwise_vjp.layer(
        _layerwise_vjp.Layer(run, self.enter, self.measure), (constants, ()), values, token, zero
      )
    )

  def fork(self, h: Scaled, n: int = 2) -> tuple[Scaled, ...]:
    """Returns `n` copies of an activation, whose gradients are brought to one scale before they are added.

    This is the largest of their scales at which no gradient overflows. If there is none, the smallest is
    halved as often as necessary.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
      raise ValueError(f"n={n!r}: expected a positive integer")
    return tuple(Scaled(*copy) for copy in _layerwise_vjp.fork(n, *_spend(h)))

  def finish(self, h: Scaled) -> jax.Array:
    """Returns the activation in float32 or wider, for the loss; `init_scale` multiplies its gradient."""
    return _layerwise_vjp.finish(self.enter, *_spend(h))

  def enter(self, g: jax.Array, passed: jax.Array) -> jax.Array:
    """Returns the scale of a gradient in float32 or wider where it enters half precision (see `init_scale`).

    Args:
      g: the gradient, multiplied by `passed`.
      passed: f32[]; product of the scales so far.

    Returns:
      f32[]; 1 for a gradient that is empty, zero or not finite.
    """
    if self.init_scale is not None:
      return self.init_scale / passed
    if not g.size:
      return jnp.ones_like(passed)
    top = jnp.abs(g).max().astype(jnp.float32)
    usable = jnp.isfinite(top) & (top > 0)
    return jnp.where(
      usable, jnp.minimum(0.5 / _layerwise_vjp.floor_power_of_two(top), self.max_scale / passed), 1.0
    )

  def measure(
    self, g: jax.Array, kernel: jax.Array, passed: jax.Array, fan_in: int | None = None
  ) -> jax.Array:
    """Returns the scale of a layer, from the statistics of its gradient and weights (arXiv 1910.12385).

    Args:
      g: gradient of the layer's output in the dtype of the layer, multiplied by `passed`.
      kernel: the layer's weights.
      passed: f32[]; product of the scales so far.
      fan_in: as for `layer`.

    Returns:
      f32[]; a power of two, 1 for a gradient that is zero or not finite.
    """
    if not g.size or _layerwise_vjp.has_wide_range(g.dtype):
      return jnp.ones_like(passed)
    limits = jnp.finfo(g.dtype)
    kernel = kernel.astype(jnp.float32)
    wide = g.astype(jnp.float32)
    rms = lambda x: jnp.sqrt(jnp.mean(x * x))
    # The second moment of a product of independents: the mean square is the variance plus the squared mean.
    sigma = rms(wide) * rms(kernel)
    smallest = float(limits.smallest_subnormal) / statistics.NormalDist().inv_cdf((1 + self.underflow) / 2)
    largest = float(limits.max)
    terms = max(1, kernel.size // max(1, kernel.shape[-2])) if fan_in is None else fan_in
    top = jnp.abs(wide).max()
    scale = jnp.maximum(smallest / sigma, 1.0)
    scale = jnp.minimum(scale, largest / terms / (top * jnp.abs(kernel).max()))
    # Not in the paper: the scaled gradient itself must fit, also where all weights are small.
    scale = jnp.minimum(scale, largest / top)
    scale = jnp.minimum(jnp.minimum(scale, self.max_scale / passed), self.max_layer_scale)
    usable = jnp.isfinite(top) & (sigma > 0)
    return jnp.where(usable, _layerwise_vjp.floor_power_of_two(scale), 1.0)


def _without_closure(fun: Callable[..., Any], *arguments: PyTree) -> tuple[Callable[..., Array], list[Array]]:
  """Returns `fun` with the arrays that it closes over as its first argument, and these arrays."""
  run, constants, axes = closure_as_argument(fun, *arguments)
  out = jax.eval_shape(run, constants, *arguments)
  if not hasattr(out, "dtype") or not jnp.issubdtype(out.dtype, jnp.floating):
    raise TypeError(f"a function between start and finish has to return one floating array, not {out}")
  if axes:
    raise ValueError(
      f"a function between start and finish communicates along {sorted(axes)}: every shard has its own "
      "scales there, so no gradient can cross; communicate before start or after finish"
    )
  return run, constants


def _spend(h: object) -> tuple[jax.Array, jax.Array]:
  if not isinstance(h, Scaled):
    raise TypeError(f"expected an activation from scaling.start(x), got {type(h).__name__}")
  return h.spend()


def _check_master_weights(params: PyTree) -> None:
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
      raise ValueError(
        f"parameter {jax.tree_util.keystr(path)} is {dtype}: its gradient would be unscaled in that dtype "
        "and underflow; pass the float32 master weights, which are cast to the activation's dtype"
      )


def _only_kernel(params: PyTree) -> Callable[[PyTree], Array] | None:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  found = [i for i, (_, leaf) in enumerate(leaves) if jnp.ndim(leaf) >= 2 and is_inexact(leaf)]
  if len(found) > 1:
    names = ", ".join(jax.tree_util.keystr(leaves[i][0]) for i in found)
    raise ValueError(
      f"several parameters could be the kernel of this layer: {names}; split the layer, or pass the "
      "one that the gradient is multiplied by, as in layer(fun, params, h, kernel=lambda p: p['w'])"
    )
  return (lambda p: jax.tree.leaves(p)[found[0]]) if found else None
