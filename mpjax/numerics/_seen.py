"""What is kept of a tensor: how many values each power of two has, the largest, and a sketch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Num, UInt32

from mpjax import _compat
from mpjax.formats import FORMATS

# The formats for which reports have shares.
INTEREST = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
# Before recipes round to these formats, they scale each tensor by its largest value.
FP8 = tuple(name for name in INTEREST if name.startswith("float8"))
# Binades of the histograms: all values below the first are counted together, and so are those above the last.
BINS = tuple(range(-64, 32))
# Length of a sketch: it shares few factors with the widths of arrays, so that a column is spread over it.
SKETCH = 1016
_LONG = 1 << 24
_BIAS, _LAST = 127, 255  # of float32's exponents; the last is that of infinities and NaN
_INF = np.uint32(0x7F800000)  # bits of float32's infinity; NaN are above


def is_half(dtype: str) -> bool:
  """Returns whether a dtype has fewer than 19 bits, thus fewer digits than any float32 computation."""
  return dtype in FORMATS and FORMATS[dtype].bits < 19


class Shares(NamedTuple):
  """Fractions of a tensor's values that underflow, become subnormal or overflow in a format.

  Attributes:
    underflow: share of values that are not zero and are rounded to zero.
    subnormal: share of values that are rounded to a subnormal number, which has fewer digits.
    overflow: share of values that are rounded to infinity or NaN, or are not finite already.
  """

  underflow: float
  subnormal: float
  overflow: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
  """A summary of a tensor; on the device also of each step of a loop, with its axes in front.

  The sum of two summaries is that of both tensors together, without a sketch.

  Attributes:
    exponents: [256]: number of values by the exponent of float32: 127 + e for magnitudes from 2^e up to
      2^(e + 1), 0 for zeros and float32's subnormal numbers, of which arithmetic makes zeros, 255 for
      infinities and NaN.
    nan: number of NaN.
    top: largest finite magnitude.
    sketch: float32[1016]: entry i is the sum of the finite values at i, i + 1016, ..., with random signs that
      are the same for every array of a shape.

  The distance of two sketches estimates the distance of the arrays. It is exact for arrays no longer than the
  sketch. For longer arrays its relative standard error is at most sqrt(1 / (2 * 1016)) = 2.2%. If all of the
  difference is in one column, it is sqrt(1 / (2 * 127)) = 6.3%, and more if the width is a multiple of 127.

  Sources: Alon, Matias, Szegedy, The Space Complexity of Approximating the Frequency Moments, 1996; Charikar,
  Chen, Farach-Colton, Finding Frequent Items in Data Streams, 2002.
  """

  exponents: Any
  nan: Any
  top: Any
  sketch: Any = None

  def __getitem__(self, index: tuple[int, ...]) -> Seen:
    """Returns the summary of a step of the loops around the tensor."""
    return jax.tree.map(lambda leaf: leaf[index], self)

  def __add__(self, other: Seen) -> Seen:
    """Adds up two summaries on the host."""
    exponents = np.asarray(self.exponents, np.int64) + other.exponents
    return Seen(exponents, int(self.nan) + int(other.nan), max(self.top, other.top))

  @property
  def count(self) -> float:
    """Number of values."""
    return float(np.sum(self.exponents, dtype=np.int64))

  @property
  def zero(self) -> float:
    """Number of zeros."""
    return float(self.exponents[0])

  @property
  def there(self) -> float:
    """Number of values that are not zero."""
    return self.count - self.zero

  @property
  def inf(self) -> float:
    """Number of infinities."""
    return self.broken - float(self.nan)

  @property
  def broken(self) -> float:
    """Number of infinities and NaN."""
    return float(self.exponents[_LAST])

  @property
  def histogram(self) -> tuple[float, list[float]]:
    """Counts of finite nonzero values: below the first of `BINS`, and in each of them."""
    finite = np.asarray(self.exponents[:_LAST], np.float64)
    first, last = (_BIAS + e for e in (BINS[0], BINS[-1]))
    return float(finite[1:first].sum()), [*finite[first:last].tolist(), float(finite[last:].sum())]

  @property
  def range(self) -> tuple[int, int] | None:
    """The binades of the smallest and the largest finite nonzero value; `None` without such values."""
    there = np.flatnonzero(np.asarray(self.exponents[1:_LAST])) + 1 - _BIAS
    return (int(there[0]), int(there[-1])) if len(there) else None

  def at_least(self, magnitude: float) -> float:
    """Returns the number of values at or above a magnitude, with NaN.

    It is exact at powers of two; within a binade the logarithms are taken to be evenly spread, and the
    largest value is known.
    """
    if magnitude > self.top:
      return self.broken
    exponent = math.frexp(magnitude)[1] - 1
    if exponent <= -_BIAS:
      return self.there
    at = exponent + _BIAS
    above = float(np.sum(self.exponents[at + 1 :], dtype=np.int64))
    part = 1 + exponent - math.log2(magnitude)
    return max(above + part * float(self.exponents[at]), self.broken + 1)

  def shares(self, name: str, scale: float = 1.0) -> Shares:
    """Returns the shares of the values times a scale that underflow or overflow in a format.

    `name` is a key of `mpjax.formats.FORMATS`. Shares of a format's subnormal numbers and zeros are exact at
    scales that are powers of two, but for values halfway between two numbers of the format.
    """
    if not self.count:
      return Shares(0.0, 0.0, 0.0)
    known = FORMATS[name]
    edges = known.underflow_edge, known.normal_edge, known.overflow_edge
    above_zero, normal, overflow = (self.at_least(edge / scale) for edge in edges)
    part = lambda n: max(n, 0.0) / self.count
    return Shares(part(self.there - above_zero), part(above_zero - normal), part(overflow))

  def own_scale(self, name: str) -> float:
    """Returns the power of two that brings the largest finite value just below a format's largest number."""
    known = self.range
    if known is None:
      return 1.0
    return 2.0 ** (math.frexp(FORMATS[name].max)[1] - 1 - (known[1] + 1))

  def underflow(self, name: str, scale: float = 1.0) -> float:
    """Returns the share of the nonzero values that a format rounds to zero."""
    return self.shares(name, scale).underflow * self.count / self.there if self.there else 0.0

  def lost_norm(self, name: str, scale: float = 1.0) -> float:
    """Returns the norm of values that a format rounds to zero over the norm of all finite values."""
    binade = np.arange(1.0, _LAST) - _BIAS
    # Up to a factor that is equal for all binades: the mean square over the square of the lower edge.
    energy = self.exponents[1:_LAST] * 4.0**binade
    gone = energy[2.0 ** (binade + 1) <= FORMATS[name].underflow_edge / scale].sum()
    return math.sqrt(gone / energy.sum()) if gone else 0.0

  def kept(self, name: str, scale: float = 1.0) -> float:
    """Returns the share of the nonzero values that a format neither rounds to zero nor overflows."""
    shares = self.shares(name, scale)
    return 1 - (shares.underflow + shares.overflow) * self.count / (self.there or 1.0)


def see(
  x: Num[Array, "..."], apart: int = 0, scale: Any = 1.0, absent: UInt32[Array, "..."] | None = None
) -> Seen:
  """Summarises an array on its devices; few programs are compiled, since arrays are padded to few lengths.

  Args:
    x: floating array, of fewer than 2^32 values.
    apart: number of axes in front whose entries are summarised apart.
    scale: the values are divided by it, in float32.
    absent: for each of these entries the number of values, all zero, that do not count. By default none.
  """
  flat = padded(x, apart)
  padding = np.uint32(flat.shape[-1] - math.prod(x.shape[apart:]))
  lacking = np.full(x.shape[:apart], padding) if absent is None else absent + padding
  return see_padded(flat, lacking, jnp.float32(scale))


@functools.partial(jax.jit, static_argnums=1)
def padded(x: Num[Array, "..."], apart: int = 0) -> Float32[Array, "..."]:
  """Returns float32[*apart, n], with zeros at the end, for one of few n."""
  size = math.prod(x.shape[apart:])
  # Powers of two; of long arrays, multiples of one, which take less memory.
  length = SKETCH if size <= SKETCH else min(1 << (size - 1).bit_length(), -(-size // _LONG) * _LONG)

  def pad(x: Num[Array, "..."]) -> Float32[Array, "..."]:
    flat = x.astype(jnp.float32).reshape(*x.shape[:apart], size)
    return jnp.pad(flat, [(0, 0)] * apart + [(0, length - size)])

  return on_no_axes(pad, x)


def on_no_axes(fun: Callable[[Array], Array], x: Array) -> Array:
  """Returns `fun(x)`; if `x` lies on the explicit axes of a mesh, the result lies on none."""
  if _compat.is_explicit(jax.typeof(x)):
    return jax.sharding.auto_axes(fun, out_sharding=jax.sharding.PartitionSpec())(x)
  return fun(x)


@jax.jit
def see_padded(x: Float32[Array, "..."], absent: Any, scale: Float32[Array, ""]) -> Seen:
  """Summarises each row of float32[*apart, n]; see `see`."""
  if x.ndim > 1:
    rows = jax.lax.map(lambda row: see_padded(*row, scale), (x.reshape(-1, x.shape[-1]), absent.reshape(-1)))
    return jax.tree.map(lambda leaf: leaf.reshape(*x.shape[:-1], *leaf.shape[1:]), rows)
  x = x / scale
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0x7FFFFFFF)
  finite = jnp.where(bits < _INF, x, 0)
  counted = jax.lax.platform_dependent(bits >> 23, cpu=by_scatter, default=by_comparison)
  exponents = counted.at[0].add(-absent)
  nan, top = jnp.sum(bits > _INF, dtype=jnp.uint32), jnp.max(jnp.abs(finite))
  return Seen(exponents, nan, top, _sketch(finite))


def by_comparison(exponents: Num[Array, " n"]) -> UInt32[Array, "256"]:
  """Counts by comparing each value with each exponent: on accelerators a single pass, in registers."""
  return jnp.sum(exponents[:, None] == np.arange(_LAST + 1, dtype=np.uint32), axis=0, dtype=jnp.uint32)


def by_scatter(exponents: Num[Array, " n"]) -> UInt32[Array, "256"]:
  """Counts by adding to the bins: XLA for CPU does not fuse comparisons."""
  # Neighbours are often alike and go to two histograms: adding to one bin twice in a row would wait.
  index = 2 * exponents + jax.lax.iota(jnp.uint32, exponents.size) % 2
  bins = jnp.zeros(2 * (_LAST + 1), jnp.uint32).at[index].add(1, mode="promise_in_bounds")
  return bins.reshape(-1, 2).sum(-1, dtype=jnp.uint32)


def _sketch(finite: Float32[Array, " n"]) -> Float32[Array, "1016"]:
  i = jax.lax.iota(jnp.uint32, finite.size)
  # A hash of the position (lowbias32 of C. Wellons, Prospecting for Hash Functions).
  i = (i ^ (i >> 16)) * np.uint32(0x7FEB352D)
  i = (i ^ (i >> 15)) * np.uint32(0x846CA68B)
  signed = jnp.where((i >> 31) == 0, finite, -finite)
  return jnp.pad(signed, (0, -finite.size % SKETCH)).reshape(-1, SKETCH).sum(0)
