"""`linear_cross_entropy`: the loss after the last layer of a large vocabulary, without whole logits.

A chunk of rows at a time goes through the layer, the softmax and, for gradients, both products of the
backward pass (as in Liger-Kernel, arXiv 2410.10989). Only the gradients are kept: nothing is computed twice,
and the logits of only one chunk exist at a time.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from mpjax import _compat
from mpjax._average import Average
from mpjax.casting import as_its_module
from mpjax.dtypes import at_least_float32
from mpjax.products import half_product

# The gradient's scale until the loss scale is known: float16 holds softmax less one-hot down to
# 2^-24 times this. A z-loss may make the gradient 63 times as large.
_FLOAT16_SCALE = 1024.0
# The gradient of x is also kept in float16: at most 2 times the largest weight, and normal from 2^-14 of
# this.
_FLOAT16_SCALE_OF_X = 16.0
_TILE = 16  # rows of a TPU's tile in half precision


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
  as_average: bool = False,
) -> Any:  # Array, or Average with `as_average`
  """Computes the mean cross entropy of `x @ kernel + bias`, a chunk of rows at a time, without whole logits.

  ```python
  hidden, tokens = jax.random.normal(jax.random.key(0), [8, 16]), jnp.arange(8)
  head = jnp.ones([16, 100])
  loss = mpjax.linear_cross_entropy(hidden, head, tokens, where=tokens != 0)
  ```

  Products and logits are in the policy's compute dtype under `autocast`, else in the dtype of `x` and
  `kernel`. The softmax and all sums are in float32, also the gradient of the kernel. Under `grad`, loss and
  gradients come from one pass over the rows, which computes nothing twice. Next to the gradients, it needs
  memory for the logits of one chunk, and the kernel in the compute dtype. It has no forward-mode derivative.
  Under an FP8 policy they are in the compute dtype, too.

  Args:
    x: input of the last layer, floating [..., D].
    kernel: kernel of that layer, floating [D, V]. `V` may be divided over a mesh.
    labels: the right class of each row, integer [...]. In a row that counts, a label outside 0 to V - 1
      makes loss and gradients NaN.
    bias: bias of the layer, floating [V].
    where: which rows count, bool [...]; by default all. The loss of no rows is 0.
    rows: the largest number of rows in a chunk; summed over devices, if a mesh divides them outside
      `shard_map`.
    label_smoothing: the probability to move from the label to all classes alike.
    z_loss: weight of the squared logarithm of the softmax's sum.
    as_average: return an `Average`, which a step adds up exactly over micro-batches and devices
      with different numbers of rows that count.

  Returns:
    float32 [] (float64 for float64): the mean. With `as_average`, an `Average` of the sum, which is the mean
    times the count, and the count, int32 []; for no rows both are 0.

  Raises:
    TypeError: for an array of another kind.
    ValueError: for shapes that do not match, and numbers out of range.
  """
  if rows < 1 or not 0 <= label_smoothing < 1 or not 0 <= z_loss < math.inf:
    raise ValueError(
      f"rows={rows}, label_smoothing={label_smoothing}, z_loss={z_loss}: expected at least 1 row, a "
      "smoothing from 0 to below 1, and a finite weight that is not negative"
    )
  _check_arrays(x=x, kernel=kernel, labels=labels, bias=bias, where=where)
  own = x.dtype
  wide = at_least_float32(own if own == kernel.dtype else jnp.promote_types(own, kernel.dtype))
  arrays = (kernel, bias, labels, where)

  def loss(x: Array) -> Array:
    # If autocast has cast it, that is the compute dtype; the kernel is cast inside the derivative rule.
    half = own == kernel.dtype or x.dtype != own
    layer = _Layer(np.dtype(x.dtype if half else wide), rows, float(label_smoothing), float(z_loss))

    def of_arrays(
      x: Array, kernel: Array, bias: Array | None, labels: Array, where: Array | None
    ) -> Float[Array, ""]:
      operands = (
        jnp.reshape(x, (labels.size, x.shape[-1])).astype(wide),
        jnp.asarray(kernel, wide),
        None if bias is None else jnp.asarray(bias, wide),
        jnp.reshape(labels, labels.size),
        jnp.ones(labels.size, bool) if where is None else jnp.reshape(where, labels.size),
      )
      operands = _compat.vary_like(operands, operands)
      mean = _mean_loss(layer, *operands)
      # The rule's half-precision gradients are those of a mean, whose size does not depend on the number of
      # rows. They are multiplied by the count in float32. In here autocast rounds neither of the two.
      return mean * _size(operands[-1], mean.dtype) if as_average else mean

    if any(_compat.is_explicit(jax.typeof(a)) for a in (x, *arrays) if a is not None):
      of_arrays = jax.sharding.auto_axes(of_arrays, out_sharding=PartitionSpec())
    return of_arrays(x, *arrays)

  value = as_its_module(loss)(x)
  if not as_average:
    return value
  return Average(value, jnp.asarray(labels.size, jnp.int32) if where is None else where.sum(dtype=jnp.int32))


def _check_arrays(**arrays: Any) -> None:
  """Raises the errors that shapes and dtypes show; `bias` and `where` may be `None`."""
  arrays = {name: x for name, x in arrays.items() if x is not None or name not in ("bias", "where")}
  kinds = {"labels": (np.integer, "integers"), "where": (np.bool_, "booleans")}
  for name, array in arrays.items():
    kind, words = kinds.get(name, (np.floating, "floating numbers"))
    if not jnp.issubdtype(getattr(array, "dtype", np.void), kind):
      raise TypeError(f"{name}={_shown(array)}: expected an array of {words}")
  x, kernel = arrays["x"], arrays["kernel"]
  if x.ndim < 1 or not x.size:
    raise ValueError(f"x={_shown(x)}: expected rows of [..., D], at least one")
  if kernel.ndim != 2 or kernel.shape[0] != x.shape[-1] or not kernel.size:
    raise ValueError(f"kernel={_shown(kernel)}: expected [{x.shape[-1]}, V], as x={_shown(x)}")
  for name, like in ("bias", "kernel"), ("labels", "x"), ("where", "x"):
    shape = kernel.shape[1:] if name == "bias" else x.shape[:-1]
    if name in arrays and arrays[name].shape != shape:
      as_of = f"as {like}={_shown(arrays[like])}"
      raise ValueError(f"{name}={_shown(arrays[name])}: expected {list(shape)}, {as_of}")


def _shown(x: Any) -> str:
  return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else f"{x!r} ({type(x).__name__})"


class _Layer(NamedTuple):
  """The static part: the dtype of products, and the number options."""

  dtype: np.dtype
  rows: int
  label_smoothing: float
  z_loss: float


class _Gradients(NamedTuple):
  """Gradients of the loss, without a factor that float16 could not hold."""

  x: Float[Array, "N D"]
  kernel: Float[Array, "D V"]
  bias: Float[Array, " V"] | None


class _Rows(NamedTuple):
  """Rows, or a chunk of rows."""

  x: Float[Array, "... D"]
  labels: Int[Array, "..."]
  counted: Bool[Array, "..."]


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
  assert gradients is not None
  factor = of_x = cotangent
  if left is not None:
    factor, of_x = cotangent * left, cotangent * (left * (_FLOAT16_SCALE / _FLOAT16_SCALE_OF_X))
  scaled = lambda g, by: None if g is None else g.astype(by.dtype) * by
  of_kernel, of_bias = (scaled(g, factor) for g in (gradients.kernel, gradients.bias))
  return scaled(gradients.x, of_x), of_kernel, of_bias, None, None


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
  """Returns the mean loss, and its gradients if `with_gradients`."""
  wide, classes, smoothing = kernel.dtype, kernel.shape[1], layer.label_smoothing
  size = _size(all_rows.counted, wide)
  chunks = _divided(all_rows._replace(x=all_rows.x.astype(layer.dtype)), layer.rows)
  weight = kernel.astype(layer.dtype)

  def chunk(carry: tuple[Array, _Gradients | None], i: Array) -> tuple[tuple[Array, _Gradients | None], None]:
    total, sums = carry
    taken = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, 1, keepdims=False), chunks)
    x, labels, counted = (a.reshape(-1, *a.shape[2:]) for a in taken)
    x = jnp.where(counted[:, None], x, 0)  # an infinity times zero is not zero
    logits = _product(x, weight, (1, 0), layer.dtype).astype(wide)  # [R, V]
    logits = logits if bias is None else logits + bias
    # Selects by comparison: a gather would gather a divided vocabulary.
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
    of_x = _product(narrow, weight, (1, 1), wide)
    of_x = of_x * (_FLOAT16_SCALE_OF_X / _FLOAT16_SCALE) if layer.dtype == np.float16 else of_x
    of_x = of_x.astype(layer.dtype).reshape(taken.x.shape)
    sums = _Gradients(
      jax.lax.dynamic_update_index_in_dim(sums.x, of_x, i, 1),
      sums.kernel + _product(x, narrow, (0, 0), wide),
      None if sums.bias is None else sums.bias + slope.sum(0),
    )
    return (total, sums), None

  sums = None
  if with_gradients:
    of_bias = None if bias is None else jnp.zeros_like(bias)
    sums = _Gradients(jnp.zeros_like(chunks.x), jnp.zeros_like(kernel), of_bias)
  carry = _compat.vary_like((jnp.zeros([], wide), sums), (kernel, bias, all_rows))
  (total, sums), _ = jax.lax.scan(chunk, carry, jnp.arange(chunks.counted.shape[1]))
  if sums is not None:
    x = all_rows.x
    sums = sums._replace(x=sums.x.reshape(-1, x.shape[1])[: len(x)])
  return total / size, sums


def _divided(rows: _Rows, most: int) -> _Rows:
  """Divides rows [N, ...] into chunks of `most`: [groups, chunks, rows of a group in a chunk, ...].

  Rows of zeros, which do not count, may be added. Each chunk has rows from everywhere: if a mesh divides
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
  """Returns a product of two matrices in `dtype`, without an earlier rounding if the operands are half."""
  dims = (((contracted[0],), (contracted[1],)), ((), ()))
  if lhs.dtype.itemsize > 2:
    return jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=dtype)
  return half_product(lhs, rhs, dims, dtype)
