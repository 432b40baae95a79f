"""`stochastic_round`: rounding that is right on average, in integer arithmetic, which compilers keep."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath
from jaxtyping import UInt32

from mpjax._types import Array, DTypeLike
from mpjax.patterns import path_text

_TARGETS = tuple(np.dtype(d) for d in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2))
_MANTISSA = 23  # bits of float32
_SIGN = np.uint32(0x80000000)


def stochastic_round(x: Array, key: Array, dtype: DTypeLike = jnp.bfloat16) -> Array:
  """Rounds to one of the two neighbours in `dtype`, with odds that make the mean of many draws `x`.

  ```python
  y = mpjax.stochastic_round(x, jax.random.key(0))  # bfloat16
  ```

  A value that `dtype` can represent does not change, nor do infinities and NaN if `dtype` has them, nor the
  sign of zero. A finite value beyond the largest finite one of `dtype` becomes that one. The bits depend only
  on `key` and the place in the array, and so are the same on any mesh.

  Args:
    x: floating array of any shape; float64 is rounded to float32 first.
    key: a key of `jax.random`.
    dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.

  Returns:
    An array of `x`'s shape in `dtype`.

  Raises:
    ValueError: for another dtype.
    TypeError: for an `x` that is not floating.
  """
  target = np.dtype(dtype)
  x = jnp.asarray(x)
  if target not in _TARGETS:
    raise ValueError(f"dtype={target.name!r}: expected one of {', '.join(d.name for d in _TARGETS)}")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"x is {x.dtype.name}: expected a floating array")
  if x.dtype == target:
    return x
  info = jnp.finfo(target)
  dropped = _MANTISSA - info.nmant
  value = x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(value, jnp.uint32)
  sign, magnitude = bits & _SIGN, bits & ~_SIGN
  noise = jax.random.bits(key, x.shape, jnp.uint16 if dropped == 16 else jnp.uint32)
  # Adds a number below 2^dropped to the dropped bits: the sum carries with the right odds.
  mask = np.uint32((1 << dropped) - 1)
  rounded = (magnitude + (noise.astype(jnp.uint32) & mask)) & ~mask
  if info.minexp > jnp.finfo(jnp.float32).minexp:
    smallest = np.float32(info.smallest_normal)
    step = np.float32(info.smallest_subnormal)
    small = jax.lax.bitcast_convert_type(magnitude, jnp.float32) / step
    odds = (noise >> 8).astype(jnp.float32) * np.float32(2.0**-24) + np.float32(2.0**-25)
    whole = jnp.floor(small)
    small = (whole + (small - whole > odds).astype(jnp.float32)) * step
    rounded = jnp.where(value * jnp.sign(value) < smallest, _bits_of(small), rounded)
  rounded = jnp.minimum(rounded, _bits_of(np.float32(info.max)))
  result = jax.lax.bitcast_convert_type(rounded | sign, jnp.float32)
  return jnp.where(jnp.isfinite(value), result, value).astype(target)


def leaf_key(seed: int, steps: Array, path: KeyPath) -> Array:
  """Returns the key of a leaf of a tree in a step, i32[], different for every leaf and step."""
  # Not the user's default implementation: its bits may depend on how an array is divided.
  key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), steps)
  return jax.random.fold_in(key, zlib.crc32(path_text(path).encode()))


def cheap_noise(key: Array, shape: tuple[int, ...]) -> UInt32[Array, "..."]:
  """Returns bits that are uniform over keys, and the same on any mesh; the high ones are mixed best.

  `jax.random.bits` takes so many operations that a TPU's compiler writes their results to memory.
  """
  first, second = jax.random.key_data(key)
  strides = np.cumprod((1, *shape[:0:-1]), dtype=np.uint32)[::-1]
  place = (jax.lax.broadcasted_iota(jnp.uint32, shape, i) * strides[i] for i in range(len(shape)))
  x = sum(place, first)
  x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
  return (x ^ (x >> 15) ^ second) * np.uint32(0x846CA68B)


def _bits_of(x: Array | np.float32) -> Array:
  return jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.uint32)
