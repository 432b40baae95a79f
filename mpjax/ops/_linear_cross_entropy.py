"""`linear_cross_entropy`: the loss behind the last layer of a large vocabulary, without whole logits.

Rows go through the layer, the softmax and, where gradients are asked for, through both products of the
backward pass in one go, some of them at a time (as in Liger-Kernel, arXiv 2410.10989). What is kept is the
gradients: nothing is computed twice, and of the logits only those of one chunk exist at a time.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from mpjax import _compat
from mpjax.casting import half_precision
from mpjax.casting._half_products import half_dot_general_p
from mpjax.dtypes import at_least_float32
from mpjax.ops._check_arguments import check_arguments

# Where the gradient is formed before the loss scale is known: float16 holds softmax less one-hot down to
# 2^-24 times this. A z-loss may make it 63 times as large as without one.
_FLOAT16_SCALE = 1024.0
_TILE = 16  # rows that a TPU keeps together in half precision


def linear_cross_entropy(
  x: Array,
  kernel: Array,
  labels: Array,
  *,
  bias: Array | None = None,
  where: Array | None = None,
  rows: int = 1024,
  label_smoothing: float = 0.0,
  z_loss: float = 0.0,
) -> Array:
  """Computes the mean cross entropy of `x @ kernel + bias`, some rows at a time: no logits exist whole.

  ```python
  loss = mpjax.linear_cross_entropy(hidden, params["head"], tokens, where=tokens != PAD)
  ```

  Products and logits are in the compute dtype of the policy under `autocast`, else in the dtype of `x` and
  `kernel`. The softmax and all sums are float32, that of the kernel's gradient too. Under `grad`, loss and
  gradients come from one pass over the rows, which computes nothing twice: beside the gradients it needs the
  logits of one chunk, and the kernel in the compute dtype. There is no forward mode, and no FP8 product.

  Args:
    x: what the last layer reads, floating [..., D].
    kernel: of that layer, floating [D, V]. `V` may be divided over a mesh.
    labels: the right class of each row, integer [...]. In a row that counts, one that is not in 0 to V - 1
      is an error where its value is known, and makes loss and gradients NaN under `jit`.
    bias: of the layer, floating [V].
    where: which rows count, bool [...]; all, if not given. The loss of no rows is 0.
    rows: how many go through the layer together, at the most; of all devices, where a mesh divides them
      outside of `shard_map`.
    label_smoothing: what is taken from the label, and given to all classes alike.
    z_loss: weight of the square of the logarithm of the softmax's sum.

  Returns:
    float32 [] (float64 of float64).

  Raises:
    TypeError: for an array of another kind, or a number that is none.
    ValueError: for shapes that do not fit together, and numbers and labels out of range.
  """
  check_arguments(x, kernel, labels, bias, where, rows, label_smoothing, z_loss)
  own = x.dtype
  wide = at_least_float32(own if own == kernel.dtype else jnp.promote_types(own, kernel.dtype))
  arrays = (kernel, bias, labels, where)

  def loss(x: Array) -> Array:
    # Where autocast has cast it, that is the compute dtype; the kernel is cast behind the derivative rule.
    half = own == kernel.dtype or x.dtype != own
    layer = _Layer(np.dtype(x.dtype if half else wide), wide, rows, float(label_smoothing), float(z_loss))
    of_arrays = functools.partial(_of_arrays, layer)
    if any(_compat.is_explicit(jax.typeof(a)) for a in (x, *arrays) if a is not None):
      of_arrays = jax.sharding.auto_axes(of_arrays, out_sharding=PartitionSpec())
    return of_arrays(x, *arrays)

  return half_precision(loss)(x)


class _Layer(NamedTuple):
  """What is static: the dtypes of products and of sums, and the numbers that `linear_cross_entropy` takes."""

  dtype: np.dtype
  wide: np.dtype
  rows: int
  label_smoothing: float
  z_loss: float


class _Gradients(NamedTuple):
  """Gradients of the loss, but for a factor that is not in them where float16 could not hold them."""

  x: Float[Array, "N D"]
  kernel: Float[Array, "D V"]
  bias: Float[Array, " V"] | None


class _Rows(NamedTuple):
  """Rows, or a chunk of them."""

  x: Float[Array, "... D"]
  labels: Int[Array, "..."]
  counted: Bool[Array, "..."]


def _of_arrays(
  layer: _Layer, x: Array, kernel: Array, bias: Array | None, labels: Array, where: Array | None
) -> Float[Array, ""]:
  """Returns the loss of arrays as the user has them."""
  operands = (
    jnp.reshape(x, (labels.size, x.shape[-1])).astype(layer.wide),
    jnp.asarray(kernel, layer.wide),
    None if bias is None else jnp.asarray(bias, layer.wide),
    jnp.reshape(labels, labels.size),
    jnp.ones(labels.size, bool) if where is None else jnp.reshape(where, labels.size),
  )
  return _mean_loss(layer, *_compat.vary_like(operands, operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mean_loss(
  layer: _Layer,
  x: Float[Array, "N D"],
  kernel: Float[Array, "D V"],
  bias: Float[Array, " V"] | None,
  labels: Int[Array, " N"],
  counted: Bool[Array, " N"],
) -> Float[Array, ""]:
  return _pass(layer, kernel, bias, _Rows(x, labels, counted), with_gradients=False)[0]


def _forward(
  layer: _Layer, x: Array, kernel: Array, bias: Array | None, labels: Array, counted: Array
) -> tuple[Array, tuple[_Gradients | None, Array | None]]:
  loss, gradients = _pass(layer, kernel, bias, _Rows(x, labels, counted), with_gradients=True)
  left = 1 / (_FLOAT16_SCALE * _size(counted, x.dtype)) if layer.dtype == np.float16 else None
  return loss, (gradients, left)


def _backward(
  layer: _Layer, kept: tuple[_Gradients | None, Array | None], cotangent: Float[Array, ""]
) -> tuple[Array | None, ...]:
  gradients, left = kept
  factor = cotangent if left is None else cotangent * left
  return (*jax.tree.map(lambda g: g.astype(factor.dtype) * factor, gradients), None, None)


_mean_loss.defvjp(_forward, _backward)


def _size(counted: Bool[Array, " N"], dtype: np.dtype) -> Float[Array, ""]:
  return jnp.maximum(counted.sum(dtype=dtype), 1)


def _pass(
  layer: _Layer,
  kernel: Float[Array, "D V"],
  bias: Float[Array, " V"] | None,
  all_rows: _Rows,
  *,
  with_gradients: bool,
) -> tuple[Float[Array, ""], _Gradients | None]:
  """Returns the mean loss, and its gradients if asked for."""
  wide, classes, smoothing = kernel.dtype, kernel.shape[1], layer.label_smoothing
  size = _size(all_rows.counted, wide)
  weight = kernel.astype(layer.dtype)
  chunks = _divided(all_rows._replace(x=all_rows.x.astype(layer.dtype)), layer.rows)

  def chunk(carry: tuple[Array, _Gradients | None], i: Array) -> tuple[tuple[Array, _Gradients | None], None]:
    total, sums = carry
    taken = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 1, keepdims=False), chunks)
    x, labels, counted = (a.reshape(-1, *a.shape[2:]) for a in taken)
    logits = _product(x, weight, (1, 0), layer.dtype).astype(wide)  # [R, V]
    logits = logits if bias is None else logits + bias
    # By comparison: to gather would gather a divided vocabulary.
    hit = jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None]
    top = logits.max(-1, keepdims=True)
    powers = jnp.exp(logits - top)
    power = powers.sum(-1, keepdims=True)
    log_sum = jnp.where((labels >= 0) & (labels < classes), jnp.log(power[:, 0]) + top[:, 0], jnp.nan)
    losses = log_sum - (1 - smoothing) * jnp.where(hit, logits, 0).sum(-1) + layer.z_loss * log_sum**2
    if smoothing:
      losses -= smoothing * logits.mean(-1)
    total += jnp.where(counted, losses, 0).sum()
    if sums is None:
      return (total, None), None
    of_sum = (1 + 2 * layer.z_loss * log_sum[:, None]) / power
    slope = powers * of_sum - jnp.where(hit, 1 - smoothing, 0) - smoothing / classes
    slope = jnp.where(
      counted[:, None], slope * (_FLOAT16_SCALE if layer.dtype == np.float16 else 1 / size), 0
    )
    narrow = slope.astype(layer.dtype)
    of_x = _product(narrow, weight, (1, 1), wide).astype(sums.x.dtype).reshape(taken.x.shape)
    sums = _Gradients(
      jax.lax.dynamic_update_index_in_dim(sums.x, of_x, i, 1),
      sums.kernel + _product(x, narrow, (0, 0), wide),
      None if sums.bias is None else sums.bias + slope.sum(0),
    )
    return (total, sums), None

  sums = None
  if with_gradients:
    of_x = jnp.zeros(chunks.x.shape, wide if layer.dtype == np.float16 else layer.dtype)
    of_bias = None if bias is None else jnp.zeros_like(bias)
    sums = _Gradients(of_x, jnp.zeros_like(kernel), of_bias)
  carry = _compat.vary_like((jnp.zeros([], wide), sums), (kernel, bias, all_rows))
  (total, sums), _ = jax.lax.scan(chunk, carry, jnp.arange(chunks.counted.shape[1]))
  if sums is not None:
    x = all_rows.x
    sums = sums._replace(x=sums.x.reshape(-1, x.shape[1])[: len(x)])
  return total / size, sums


def _divided(rows: _Rows, most: int) -> _Rows:
  """Divides rows [N, ...] into chunks of `most`: [groups, chunks, rows of a group in a chunk, ...].

  Rows of zeros, which do not count, may be added. Each chunk has rows from everywhere: where a mesh divides
  them, all devices have some of each.
  """
  count = len(rows.labels)
  chunks = -(-count // most)
  together = math.gcd(most, _TILE) if chunks > 1 else 1
  missing = -count % (chunks * together)

  def divided(a: Shaped[Array, "N ..."]) -> Shaped[Array, "groups chunks rows ..."]:
    padded = jnp.pad(a, [(0, missing), *[(0, 0)] * (a.ndim - 1)]) if missing else a
    return padded.reshape(-1, chunks, together, *a.shape[1:])

  return _Rows(*map(divided, rows))


def _product(
  lhs: Float[Array, "..."], rhs: Float[Array, "..."], contracted: tuple[int, int], dtype: np.dtype
) -> Float[Array, "..."]:
  """Returns a product of two matrices in `dtype`, which is not rounded before where theirs is half."""
  dims = (((contracted[0],), (contracted[1],)), ((), ()))
  if lhs.dtype.itemsize > 2:
    return jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
  return half_dot_general_p.bind(
    lhs,
    rhs,
    originals=(),
    dimension_numbers=dims,
    precision=None,
    preferred_element_type=np.dtype(dtype),
    out_sharding=None,
  )
