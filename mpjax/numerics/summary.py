"""What is kept of an array: how many of its values lie above each of some magnitudes, and a sketch of it.

Both add up: over the steps of a loop, over micro-batches, over the uses of one value. So they can leave a
differentiated program as cotangents, which are added on their way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

_INF = 0x7F800000  # bits of float32's infinity; NaN are above
# A prime, so that no axis of an array falls into few of the sketch's buckets.
SKETCH = 1021
# Of arrays that are longer, the CPU counts so many values at a time, which bounds its temporary memory.
_BLOCK = 1 << 18


@dataclasses.dataclass(frozen=True)
class Summary:
  """What to keep of an array.

  Attributes:
    edges: float32 bit patterns of positive numbers, ascending: how many magnitudes are at least so large is
      counted for each.
    sketch: length of the sketch; 0 for none.
  """

  edges: tuple[int, ...]
  sketch: int = 0

  @staticmethod
  def of(magnitudes: Sequence[float], sketch: int = 0) -> Summary:
    """One that counts at some magnitudes, besides values that are not zero, infinities and NaN.

    Args:
      magnitudes: positive and finite; each is rounded up to float32, so that the count at an edge between
        two float32 numbers is right.
      sketch: length of the sketch.
    """
    exact = np.asarray(magnitudes, np.float64)
    with np.errstate(over="ignore", under="ignore"):
      rounded = exact.astype(np.float32)
      below = rounded.astype(np.float64) < exact
    bits = rounded.view(np.uint32) + below
    return Summary(tuple(sorted({1, _INF, _INF + 1, *map(int, bits)})), sketch)

  @property
  def size(self) -> int:
    """Length of what is kept."""
    return len(self.edges) + 1 + self.sketch

  def __call__(self, x: jax.Array) -> jax.Array:
    """float32[size]: counts at each edge, the number of values, and the sketch.

    A count is exact up to 2**24 and to float32's rounding above. Entry i of the sketch is the sum of the
    values at i, i + sketch, ... with random signs (the same for every array of a size), non-finite ones left
    out: the squared distance of two sketches is that of the arrays within a relative standard error of
    sqrt(2 / sketch), and exactly so for arrays no longer than the sketch (Charikar, Chen, Farach-Colton,
    Finding Frequent Items in Data Streams, 2002; Alon, Matias, Szegedy 1996).
    """
    flat = x.reshape(-1)
    counts = _counts(self.edges, flat)
    parts = [counts.astype(jnp.float32), jnp.full([1], flat.size, jnp.float32)]
    if self.sketch:
      parts.append(_sketch(flat, self.sketch))
    return jnp.concatenate(parts)


def _counts(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """int32[edges]: how many magnitudes are at least so large."""
  return jax.lax.platform_dependent(
    flat,
    cpu=functools.partial(_counts_by_scatter, edges),
    default=functools.partial(_counts_by_comparison, edges),
  )


def _magnitude(x: jax.Array) -> jax.Array:
  """The bits of magnitudes in float32, which are in the order of the magnitudes."""
  return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)


def _counts_by_comparison(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """Every value with every edge: on accelerators one pass, in registers."""
  return jnp.sum(_magnitude(flat)[:, None] >= np.asarray(edges, np.uint32), axis=0, dtype=jnp.int32)


def _counts_by_scatter(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """A histogram by exponent and class of mantissa, summed from above: XLA:CPU fuses no comparisons."""
  array = np.asarray(edges, np.uint32)
  classes = sorted({0, *map(int, array & 0x7FFFFF)})
  width = len(classes)

  def histogram(x: jax.Array) -> jax.Array:
    bits = _magnitude(x)
    mantissa = bits & np.uint32(0x7FFFFF)
    index = (bits >> 23) * np.uint32(width)
    for start in classes[1:]:
      index += (mantissa >= np.uint32(start)).astype(jnp.uint32)
    return jnp.zeros(256 * width, jnp.int32).at[index].add(1, mode="promise_in_bounds")

  whole = flat.size // _BLOCK
  if whole > 1:
    blocks = flat[: whole * _BLOCK].reshape(whole, _BLOCK)
    first = histogram(flat[whole * _BLOCK :])
    bins = jax.lax.scan(lambda total, block: (total + histogram(block), None), first, blocks)[0]
  else:
    bins = histogram(flat)
  from_above = jnp.cumsum(bins[::-1])[::-1]
  starts = [int(edge >> 23) * width + classes.index(int(edge & 0x7FFFFF)) for edge in array]
  return from_above[np.asarray(starts)]


def _sketch(flat: jax.Array, length: int) -> jax.Array:
  i = jax.lax.iota(jnp.uint32, flat.size)
  # A hash of the position (the finaliser of lowbias32, C. Wellons, Prospecting for Hash Functions).
  i = (i ^ (i >> 16)) * np.uint32(0x7FEB352D)
  i = (i ^ (i >> 15)) * np.uint32(0x846CA68B)
  flat = flat.astype(jnp.float32)
  finite = jnp.where(jnp.isfinite(flat), flat, 0)
  signed = jnp.where((i >> 31) == 0, finite, -finite)
  rows = flat.size // length
  rest = signed[rows * length :]
  return signed[: rows * length].reshape(rows, length).sum(0) + jnp.pad(rest, (0, length - rest.size))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look(x: jax.Array, probe: jax.Array, summary: Summary) -> jax.Array:
  """`x` itself; the probe's cotangent is what is kept of `x` and, in a second row, of its cotangent.

  Args:
    x: floating.
    probe: float32[2, size], which nothing depends on.
    summary: what to keep.
  """
  return x


def _look_forward(x: jax.Array, probe: jax.Array, summary: Summary) -> tuple[jax.Array, jax.Array]:
  return x, summary(x)


def _look_backward(summary: Summary, kept: jax.Array, ct: jax.Array) -> tuple[jax.Array, jax.Array]:
  return ct, jnp.stack([kept, summary(ct)])


look.defvjp(_look_forward, _look_backward)
