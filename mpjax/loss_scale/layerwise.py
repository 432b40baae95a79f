"""Layer-wise adaptive loss scaling: each layer's scale from the statistics of its weights and its gradient.

The gradient that travels backward carries the product of the scales that it has passed. That product
travels with it as the cotangent of a dummy scalar, the token, so that every layer can divide it out of the
gradients of its parameters. Forward, nothing is scaled.

Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mpjax import _compat
from mpjax.dtypes import cast_floating
from mpjax.loss_scale.config import HIGHEST, number


@jax.tree_util.register_pytree_node_class
class Scaled:
  """An activation between `start` and `finish`: a pytree, and so a carry of `jax.lax.scan`.

  Attributes:
    value: the activation, in the dtype that its layer computes in.
    token: array of shape [] and dtype float32; zero, its cotangent is the scale that `value`'s carries.
  """

  def __init__(self, value: jax.Array, token: jax.Array):
    self.value, self.token = value, token
    self._spent = False

  def spend(self) -> tuple[jax.Array, jax.Array]:
    """Value and token, once: two gradients, each with a scale of its own, cannot simply be added.

    Raises:
      ValueError: the second time.
    """
    if self._spent:
      raise ValueError(
        "this activation was used before: take one copy for each use, as in h1, h2 = scaling.fork(h)"
      )
    self._spent = True
    return self.value, self.token

  def tree_flatten(self) -> tuple[tuple[jax.Array, jax.Array], None]:
    """The two arrays."""
    return (self.value, self.token), None

  @classmethod
  def tree_unflatten(cls, _: None, children: tuple[jax.Array, jax.Array]) -> Scaled:
    """From the two arrays."""
    return cls(*children)


def layerwise_loss_scale(
  *,
  underflow: float = 1e-3,
  init_scale: float | None = None,
  max_layer_scale: float = 2.0**10,
  max_scale: float = 2.0**100,
) -> LayerwiseLossScale:
  """Layer-wise adaptive loss scaling for a model in plain JAX: no trial, no error, no skipped steps.

  The gradients that come out are those of the loss: nothing is scaled before and unscaled after.

  ```python
  scaling = mpjax.layerwise_loss_scale()

  def loss_fn(params, x, y):
    h = scaling.start(x, jnp.float16)
    for p in params:
      h = scaling.layer(lambda p, x: x @ p["w"] + p["b"], p, h)
      h = scaling.apply(jnp.tanh, h)
    return jnp.mean((scaling.finish(h) - y) ** 2)
  ```

  A layer's products are taken as normal with the standard deviation that independent weights and gradients
  give, and its scale as the least power of two for which the share of products that underflow stays under
  `underflow`, bounded so that no sum of products can overflow. The bounds follow the dtype of the gradient:
  layers that compute in float32 or bfloat16 get a scale of 1.

  Reference: Zhao et al., "Adaptive Loss Scaling for Mixed Precision Training", arXiv 1910.12385, where
  the first scale is 1, `max_layer_scale` 16 and `max_scale` 1024: too little for deep chains.

  Args:
    underflow: share of a layer's products that may underflow, between 0 and 1.
    init_scale: scale of the loss's own gradient, where it enters half precision; `None`: the power of two
      that brings its largest element to between 1/2 and 1.
    max_layer_scale: upper bound of one layer's scale.
    max_scale: upper bound of the product of scales, at most 2**126.

  Raises:
    ValueError: names the argument that is out of range.
  """
  return LayerwiseLossScale(underflow, init_scale, max_layer_scale, max_scale)


@dataclasses.dataclass(frozen=True)
class LayerwiseLossScale:
  """What `layerwise_loss_scale` returns; its attributes are that function's arguments."""

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

  def start(self, x: Any, dtype: Any = None) -> Scaled:
    """`x` as the first activation; the gradient with respect to `x` comes out unscaled.

    Args:
      x: floating array; in float32, if its own gradient matters, since it is divided in that dtype.
      dtype: what to compute in; `None`: that of `x`.
    """
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise ValueError(
        f"start takes a floating array, not {x.dtype}: look up embeddings first, and start from them"
      )
    token = _compat.vary_like(jnp.zeros([], jnp.float32), x)
    return Scaled(*_start(jnp.dtype(dtype or x.dtype), x, token))

  def layer(
    self,
    fun: Callable[[Any, jax.Array], jax.Array],
    params: Any,
    h: Scaled,
    *,
    kernel: Callable[[Any], jax.Array] | None = None,
    fan_in: int | None = None,
    scale: jax.Array | None = None,
  ) -> Scaled:
    """`fun(params, h)`, which rescales the gradient on its way back and unscales that of `params`.

    `fun` should be the matrix product or convolution and its bias; activation functions go to `apply`. A
    layer without a kernel, such as a norm with its gain, passes the scale on as it came.

    Args:
      fun: (params in `h`'s dtype, array) -> floating array; what it differentiates is in its arguments.
      params: master weights in float32 or wider; their gradients come out in that dtype.
      h: the activation.
      kernel: takes `params` to the array that the gradient is multiplied by; `None`: the only leaf of two
        or more dimensions, or none.
      fan_in: products summed in each element of the gradient that is passed on; `None`: what a kernel of
        shape [..., in, out] gives, its size over `in`.
      scale: f32[]; if positive, the layer's scale, measured before; if zero, it is measured. Either way the
        gradient with respect to `scale` is the scale that was used, so that a training loop can measure
        every so many steps and keep the rest.

    Raises:
      TypeError: if `h` does not come from `start`.
      ValueError: if a parameter is narrower than float32, or several leaves could be the kernel.
    """
    value, token = _spend(h)
    _check_master_weights(params)
    static = _Layer(self, fun, kernel or _only_kernel(params), fan_in, reuses=scale is not None)
    scale = jnp.zeros([], jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32)
    params, scale = _compat.vary_like((params, scale), value)
    return Scaled(*_layer(static, params, value, token, scale))

  def apply(self, fun: Callable[..., jax.Array], *hs: Scaled) -> Scaled:
    """`fun` of one or more activations, without parameters: activation functions, sums, attention.

    An activation that is used twice has to be `fork`ed first: its two gradients carry scales of their own.

    Raises:
      TypeError: if one of `hs` does not come from `start`.
      ValueError: if one of `hs` was used before.
    """
    values, tokens = zip(*map(_spend, hs), strict=True)
    return Scaled(fun(*values), functools.reduce(operator.add, tokens))

  def fork(self, h: Scaled, n: int = 2) -> tuple[Scaled, ...]:
    """`n` copies of an activation, whose gradients are brought to one scale before they are added.

    The scale is the largest of theirs at which none overflows, and, if there is none, the smallest of them
    halved as often as it takes.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
      raise ValueError(f"n={n!r}: expected a positive integer")
    return tuple(Scaled(*copy) for copy in _fork(n, *_spend(h)))

  def finish(self, h: Scaled) -> jax.Array:
    """The activation in float32 or wider, for the loss; the gradient that comes back gets `init_scale`."""
    return _finish(self, *_spend(h))

  def measure(
    self, g: jax.Array, kernel: jax.Array, passed: jax.Array, fan_in: int | None = None
  ) -> jax.Array:
    """The scale of a layer: section 4 of the paper.

    Args:
      g: gradient of the layer's output, with `passed` in it.
      kernel: the layer's weights.
      passed: f32[]; product of the scales so far.
      fan_in: as for `layer`.

    Returns:
      f32[]; a power of two, 1 for a gradient that is zero or not finite.
    """
    limits = jnp.finfo(g.dtype)
    kernel = kernel.astype(jnp.float32)
    wide = g.astype(jnp.float32)
    rms = lambda x: jnp.sqrt(jnp.mean(x * x))
    # The mean square is the variance plus the squared mean: the second moment of a product of independents.
    sigma = rms(wide) * rms(kernel)
    smallest = float(limits.smallest_subnormal) / statistics.NormalDist().inv_cdf((1 + self.underflow) / 2)
    largest = float(limits.max)
    terms = kernel.size // kernel.shape[-2] if fan_in is None else fan_in
    top = jnp.abs(wide).max()
    scale = jnp.maximum(smallest / sigma, 1.0)
    scale = jnp.minimum(scale, largest / terms / (top * jnp.abs(kernel).max()))
    # Beyond the paper: the scaled gradient itself has to fit, also where all weights are small.
    scale = jnp.minimum(scale, largest / top)
    scale = jnp.minimum(jnp.minimum(scale, self.max_scale / passed), self.max_layer_scale)
    usable = jnp.isfinite(top) & (sigma > 0)
    return jnp.where(usable, _power_of_two(scale), 1.0)


class _Layer(NamedTuple):
  """What is static in a layer."""

  scaling: LayerwiseLossScale
  fun: Callable[[Any, jax.Array], jax.Array]
  kernel: Callable[[Any], jax.Array] | None
  fan_in: int | None
  reuses: bool

  def run(self, params: Any, value: jax.Array) -> jax.Array:
    return self.fun(cast_floating(params, value.dtype), value)


def _layer(static: _Layer, params: Any, value: jax.Array, token: jax.Array, scale: jax.Array) -> Any:
  @jax.custom_vjp
  def call(params: Any, value: jax.Array, token: jax.Array, scale: jax.Array) -> Any:
    return static.run(params, value), token

  def forward(params: Any, value: jax.Array, token: jax.Array, scale: jax.Array) -> Any:
    out, backward = jax.vjp(static.run, params, value)
    return (out, token), (backward, params, scale)

  def backward(residuals: Any, cotangents: Any) -> Any:
    vjp, params, scale = residuals
    g, passed = cotangents
    unscaled = lambda p: p if p.dtype == jax.dtypes.float0 else p / passed.astype(p.dtype)
    grads = jax.tree.map(unscaled, vjp(g)[0])
    used = _compat.vary_like(jnp.ones([], jnp.float32), g)
    if static.kernel is not None:
      measure = lambda: static.scaling.measure(g, static.kernel(params), passed, static.fan_in)
      used = jax.lax.cond(scale > 0, lambda: scale, measure) if static.reuses else measure()
    return grads, vjp(_times(g, used))[1], passed * used, used

  call.defvjp(forward, backward)
  return call(params, value, token, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _start(dtype: Any, x: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
  return x.astype(dtype), token


def _start_backward(dtype: Any, like: jax.Array, cotangents: Any) -> tuple[jax.Array, jax.Array]:
  g, passed = cotangents
  wide = jnp.promote_types(like.dtype, jnp.float32)
  return (g.astype(wide) / passed.astype(wide)).astype(like.dtype), jnp.zeros_like(passed)


# An empty array stands for the dtype, which is no residual.
_start.defvjp(lambda dtype, x, token: (_start(dtype, x, token), x.ravel()[:0]), _start_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _finish(scaling: LayerwiseLossScale, value: jax.Array, token: jax.Array) -> jax.Array:
  return value.astype(jnp.promote_types(value.dtype, jnp.float32))


def _finish_backward(
  scaling: LayerwiseLossScale, like: jax.Array, g: jax.Array
) -> tuple[jax.Array, jax.Array]:
  if scaling.init_scale is not None:
    scale = jnp.full([], scaling.init_scale, jnp.float32)
  elif jnp.finfo(like.dtype).minexp < -100 or not g.size:
    scale = jnp.ones([], jnp.float32)  # nothing underflows in a dtype of float32's range
  else:
    top = jnp.abs(g).max().astype(jnp.float32)
    usable = jnp.isfinite(top) & (top > 0)
    scale = jnp.where(usable, jnp.minimum(0.5 / _power_of_two(top), scaling.max_scale), 1.0)
  scale = _compat.vary_like(scale, g)
  return _times(g, scale).astype(like.dtype), scale


_finish.defvjp(
  lambda scaling, value, token: (_finish(scaling, value, token), value.ravel()[:0]), _finish_backward
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fork(n: int, value: jax.Array, token: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
  return [(value, token)] * n


def _fork_backward(n: int, _: None, cotangents: Any) -> tuple[jax.Array, jax.Array]:
  gradients = jnp.stack([g for g, _ in cotangents])  # [n, ...]
  scales = jnp.stack([scale for _, scale in cotangents])  # f32[n]
  wide = gradients.astype(jnp.promote_types(gradients.dtype, jnp.float32))
  ratio = lambda scale: (scale / scales).reshape(n, *[1] * (wide.ndim - 1)).astype(wide.dtype)
  tops = jnp.abs(wide.reshape(n, -1)).max(1) if wide.size else jnp.zeros([n], wide.dtype)
  largest = float(jnp.finfo(gradients.dtype).max)
  # The sum of all has to fit, so each of them has to fit n times.
  fits = lambda scale: (tops / scales * scale).sum() < largest
  lowest = scales.min()
  candidates = jnp.concatenate([jnp.sort(scales)[::-1], lowest * 2.0 ** -jnp.arange(1.0, 64.0)])
  usable = jax.vmap(fits)(candidates)
  # Nothing fits where a gradient is not finite already: it goes on as it is.
  target = jnp.where(usable.any(), candidates[jnp.argmax(usable)], lowest)
  return (wide * ratio(target)).sum(0).astype(gradients.dtype), target


_fork.defvjp(lambda n, value, token: (_fork(n, value, token), None), _fork_backward)


def _times(g: jax.Array, scale: jax.Array) -> jax.Array:
  """`g` times a scale that may not fit in `g`'s dtype."""
  wide = jnp.promote_types(g.dtype, jnp.float32)
  return (g.astype(wide) * scale.astype(wide)).astype(g.dtype)


def _power_of_two(x: jax.Array) -> jax.Array:
  """The greatest power of two that is not above `x`."""
  return jnp.ldexp(jnp.ones_like(x), jnp.frexp(x)[1] - 1)


def _spend(h: Any) -> tuple[jax.Array, jax.Array]:
  if not isinstance(h, Scaled):
    raise TypeError(f"expected an activation from scaling.start(x), got {type(h).__name__}")
  return h.spend()


def _check_master_weights(params: Any) -> None:
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
      raise ValueError(
        f"parameter {jax.tree_util.keystr(path)} is {dtype}: its gradient would be unscaled in that dtype "
        "and underflow; pass the float32 master weights, which are cast to the activation's dtype"
      )


def _only_kernel(params: Any) -> Callable[[Any], jax.Array] | None:
  leaves = jax.tree_util.tree_flatten_with_path(params)[0]
  found = [i for i, (_, leaf) in enumerate(leaves) if jnp.ndim(leaf) >= 2]
  if len(found) > 1:
    names = ", ".join(jax.tree_util.keystr(leaves[i][0]) for i in found)
    raise ValueError(
      f"several parameters could be the kernel of this layer: {names}; make it several layers, or name the "
      "one that the gradient is multiplied by, as in layer(fun, params, h, kernel=lambda p: p['w'])"
    )
  return (lambda p: jax.tree.leaves(p)[found[0]]) if found else None
