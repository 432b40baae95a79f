"""`Quantized`: an array of an optimiser's state in 8 bits with float32 scales, or rounded to bfloat16.

Codes have the array's shape, and each group of entries along its last dimension has a scale. So an array that
is divided over devices by rows or columns is quantised without a collective, and to the same codes. The
scale is the group's largest entry, in float32 and so exact: a half-precision scale would stop following a
moment that moves by less than half a unit in its last place.

Codes in int8 are small floating-point numbers, eight per binade, made by shifts of a float32's bits: no
compiler rounds them differently, and a program can recompute them faster than store them. A group
without a negative entry, as of second moments, uses all 255 codes, over 32 binades, and has a positive scale.
Other groups use 127 codes and a sign, over 16 binades, and have a negative scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import KeyPath
from jaxtyping import Float32

from mpjax import _compat
from mpjax._types import Array, PyTree
from mpjax.dtypes import cast_like
from mpjax.optim._stochastic import leaf_key, stochastic_round

SEED = 0  # rounding noise need not differ between runs
_SHIFT = 20  # leaves three bits of a float32's mantissa
_ONE = 127 << 3  # float32 1.0, shifted: the code of the largest entry
_UNSIGNED, _SIGNED = 255, 127  # the largest codes
_E4M3_TOP = 256.0  # the code of the largest entry: a power of two scales exactly, in any order
_E4M3_SMALLEST = float(jnp.finfo(jnp.float8_e4m3fn).smallest_subnormal)
_SUBLANES = 8  # rows of a TPU's tile of float32
_MOST_GROUPS = 256  # per row; with more, a product costs more than moving the row
_TINY, _LARGEST = float(jnp.finfo(jnp.float32).tiny), float(jnp.finfo(jnp.float32).max)


class Quantized(NamedTuple):
  """A stored array; or a tree of this form that describes each part, such as its sharding.

  Attributes:
    codes: array of the original shape; int8, float8_e4m3fn or bfloat16; always finite, except in bfloat16.
    scales: f32[..., groups], one for each group of entries along the last dimension; `None` in bfloat16. Not
      finite if an entry of the group was not.
  """

  codes: PyTree
  scales: PyTree


def is_quantized(x: object) -> bool:
  """Returns whether an object is a `Quantized`; use it as `is_leaf`.

  ```python
  tx = mpjax.quantized_state(optax.adamw(1e-3), min_size=0)
  leaves = jax.tree.leaves(tx.init(params), is_leaf=mpjax.optim.is_quantized)
  ```

  Args:
    x: any object.

  Returns:
    A Python bool.
  """
  return isinstance(x, Quantized)


def rebuild(tree: PyTree) -> PyTree:
  """Returns a tree with a `Quantized` for each mapping that `nnx.update` made of one."""
  is_mapping = lambda x: isinstance(x, Mapping) and set(x) in ({"codes", "scales"}, {"codes"})
  is_leaf = lambda x: is_quantized(x) or is_mapping(x)
  make = lambda x: Quantized(x["codes"], dict(x).get("scales")) if is_mapping(x) else x
  return jax.tree.map(make, tree, is_leaf=is_leaf)


def scales_of(x: Float32[Array, "..."], groups: int) -> Float32[Array, "..."]:
  """Returns the scales of the groups of each row of an array; they have equal sizes, except the last one."""
  least = _by_group(jnp.min, x, groups)
  # Compares bits, of which a NaN has the largest: XLA's maximum for a CPU loses a NaN.
  magnitudes = jax.lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
  largest = jax.lax.bitcast_convert_type(_by_group(jnp.max, magnitudes, groups), jnp.float32)
  # A group of subnormal entries is zero, as in arithmetic on most devices.
  largest = jnp.where(largest < _TINY, 0.0, largest)
  return jnp.where(least < 0, -largest, largest)


def scales_like(stored: Array | Quantized, x: Array) -> Float32[Array, "..."] | None:
  """Returns the scales of an array in the groups of a stored one; `None` if that has no scales."""
  if not isinstance(stored, Quantized) or stored.scales is None:
    return None
  return scales_of(x.astype(jnp.float32), stored.scales.shape[-1])


def quantize(
  x: Float32[Array, "..."], scales: Float32[Array, "..."] | None, dtype: np.dtype, key: Array
) -> Quantized:
  """Stores an array as codes, by the scales of `scales_of`; without any by the key, in bfloat16."""
  if scales is None:
    return Quantized(stochastic_round(x, key), None)
  divides = jnp.isfinite(scales) & (scales != 0)
  size = jnp.abs(jnp.where(divides, scales, 1))
  # Four times the inverse: that of the largest scales is subnormal, which devices flush to 0.
  inverse = jnp.where(size > 1, 1 / (0.25 * size), jnp.minimum(4 / size, _LARGEST)) * jnp.sign(scales)
  inverse = _spread(jnp.where(divides, inverse, 0), x)
  y = jnp.where(inverse == 0, 0.0, x * jnp.abs(inverse) * 0.25)  # 0 * infinity is NaN
  if dtype == jnp.float8_e4m3fn:
    # Does not round a second moment to 0: the update would divide by epsilon alone.
    y = jnp.where((inverse > 0) & (y > 0), jnp.maximum(y, _E4M3_SMALLEST / _E4M3_TOP), y) * _E4M3_TOP
    return Quantized(jnp.clip(y, -_E4M3_TOP, _E4M3_TOP).astype(dtype), scales)
  return Quantized(_encode(y, inverse < 0), scales)


def quantize_like(
  stored: Array | Quantized, x: Array, scales: Float32[Array, "..."] | None, path: KeyPath, steps: Array
) -> Array | Quantized:
  """Stores an array in the form of another: in the same codes, or in the same dtype if that has none.

  Takes the scales of `scales_like`. The path and the number of updates are for the noise of rounding to
  bfloat16.
  """
  if not isinstance(stored, Quantized):
    return cast_like(x, stored)
  return quantize(x.astype(jnp.float32), scales, stored.codes.dtype, leaf_key(SEED, steps, path))


def dequantize(stored: Quantized) -> Float32[Array, "..."]:
  """Returns a stored array in float32."""
  codes, scales = stored
  if scales is None:
    return codes.astype(jnp.float32)
  scales = _spread(scales, codes)
  if codes.dtype == jnp.float8_e4m3fn:
    # Divided by 256 on bits: a compiler may divide the scale first, and flush it.
    wide = codes.astype(jnp.float32)
    value = jax.lax.bitcast_convert_type(
      jax.lax.bitcast_convert_type(wide, jnp.int32) - (8 << 23), jnp.float32
    )
    return jnp.where(wide == 0, 0.0, value) * jnp.abs(scales)
  return _decode(codes, scales < 0) * jnp.abs(scales)


def unstored(state: PyTree) -> PyTree:
  """Dequantises every `Quantized` leaf to float32; the next step quantises it again."""
  return jax.tree.map(lambda x: dequantize(x) if is_quantized(x) else x, state, is_leaf=is_quantized)


def _encode(y: Float32[Array, "..."], has_sign: Array) -> Array:
  """Returns the nearest codes (int8) of numbers from -1 to 1."""
  offset = _offset(has_sign)
  bits = jax.lax.bitcast_convert_type(jnp.abs(y), jnp.int32)
  code = jnp.minimum((bits + (1 << (_SHIFT - 1))) >> _SHIFT, _ONE) - offset
  # Below half of the smallest code: 0 in a group with signs, never 0 otherwise, since updates divide by
  # roots.
  half_of_smallest = jnp.where(has_sign, (_ONE - _SIGNED + 1 - 8) << _SHIFT, 1)
  code = jnp.where(bits < half_of_smallest, 0, jnp.maximum(code, 1))
  return jnp.where(y < 0, -code, code).astype(jnp.int8)


def _decode(codes: Array, has_sign: Array) -> Float32[Array, "..."]:
  """Returns the values of codes, from -1 to 1."""
  wide = codes.astype(jnp.int32)
  code = jnp.where(has_sign, jnp.abs(wide), wide & 0xFF)
  value = jax.lax.bitcast_convert_type((code + _offset(has_sign)) << _SHIFT, jnp.float32)
  return jnp.where(code == 0, 0.0, jnp.where(has_sign & (wide < 0), -value, value))


def _offset(has_sign: Array) -> Array:
  return jnp.where(has_sign, _ONE - _SIGNED, _ONE - _UNSIGNED)


def _by_group(reduce: Callable[..., Array], x: Array, groups: int) -> Array:
  """Reduces each group of the last dimension: [..., n] to [..., groups]."""
  kind = jax.typeof(x)
  sharding, spec = kind.sharding, kind.sharding.spec
  if x.ndim and spec[-1] is not None:
    axes = spec[-1] if isinstance(spec[-1], tuple) else (spec[-1],)
    whole = groups % math.prod(sharding.mesh.shape[axis] for axis in axes)
    spec = PartitionSpec(*spec[:-1], None if whole else spec[-1])
  spec = spec if x.ndim else PartitionSpec(None)
  out = kind.update(shape=(*x.shape[:-1], groups), sharding=sharding.update(spec=spec))
  return _compat.with_auto_axes(lambda x: _reduced(reduce, x, groups), out)(x)


def _spread(of_groups: Array, like: Array) -> Array:
  """Gives each entry of an array the value of its group: [..., groups] to the shape of `like`."""
  return _compat.with_auto_axes(lambda x: _repeated(x, like.shape), jax.typeof(like))(of_groups)


def _reduced(reduce: Callable[..., Array], x: Array, groups: int) -> Array:
  if not x.ndim:
    return reduce(x).reshape(1)
  if not groups:
    return jnp.zeros((*x.shape[:-1], 0), x.dtype)
  size = math.ceil(x.shape[-1] / groups)
  padding = groups * size - x.shape[-1]
  if padding:
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)], mode="edge")
  lead = x.shape[:-1]
  plain = lambda x: reduce(x.reshape(*lead, groups, size), axis=-1)

  def by_tiles(x: Array) -> Array:
    # The same in the order that a TPU uses in memory, so that it moves no entry.
    tiles = x.reshape(-1, _SUBLANES, groups, size).transpose(0, 2, 1, 3)
    return reduce(tiles, axis=-1).transpose(0, 2, 1).reshape(*lead, groups)

  if math.prod(lead) % _SUBLANES or not x.size:
    return plain(x)
  return jax.lax.platform_dependent(x, tpu=by_tiles, default=plain)


def _repeated(of_groups: Array, shape: tuple[int, ...]) -> Array:
  if not shape:
    return of_groups.reshape(())
  n, groups = shape[-1], of_groups.shape[-1]
  if not n:
    return jnp.zeros(shape, of_groups.dtype)
  if groups == 1:
    return jnp.broadcast_to(of_groups, shape)
  size = math.ceil(n / groups)

  def plain(of_groups: Array) -> Array:
    wide = jnp.broadcast_to(of_groups[..., None], (*of_groups.shape, size))
    return wide.reshape(*shape[:-1], groups * size)[..., :n]

  def by_product(of_groups: Array) -> Array:
    # A TPU fuses this with the loop that reads it, unlike a reshape of rows; exact, since all else is 0.
    place = jnp.arange(n)[None] // size == jnp.arange(groups)[:, None]
    return jnp.dot(of_groups, place.astype(of_groups.dtype), precision=jax.lax.Precision.HIGHEST)

  if groups > _MOST_GROUPS:
    return plain(of_groups)
  return jax.lax.platform_dependent(of_groups, tpu=by_product, default=plain)
