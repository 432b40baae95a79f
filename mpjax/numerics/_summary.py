"""Summaries of arrays: how many values reach each of some magnitudes, and a sketch of the array.

Both add up over the steps of a loop, over micro-batches and over the uses of one value. So they can leave a
differentiated program as cotangents, which JAX adds up.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpjax import _compat

_INF = 0x7F800000  # bits of float32's infinity; NaN are above
# Rows and columns in which values are summed for a sketch; the columns are a TPU's lanes. The sketch's length
# shares few factors with the widths of arrays, so that a column is spread over many entries.
_ROWS, _LANES = 127, 128
SKETCH = _ROWS * 8
# Longer arrays are summarised in pieces of this many values, to bound the temporary memory.
_BLOCK = 1 << 20


@dataclasses.dataclass(frozen=True)
class Summary:
  """The numbers to keep of an array.

  Attributes:
    edges: float32 bit patterns of positive numbers, ascending; for each, the values with at least this
      magnitude are counted.
    sketch: whether to keep a sketch, too.
    finite: whether to assume that every value is finite, which is faster. If a value is not finite, the sum
      is not finite, and all other figures are wrong.
  """

  edges: tuple[int, ...]
  sketch: bool = False
  finite: bool = False

  @staticmethod
  def of(magnitudes: Sequence[float], sketch: bool = False) -> Summary:
    """Returns a summary that counts at some magnitudes, and counts nonzero values, infinities and NaN.

    Args:
      magnitudes: positive and finite; each is rounded up to float32, so that the count at an edge between
        two float32 numbers is right.
      sketch: whether to keep a sketch, too.
    """
    exact = np.asarray(magnitudes, np.float64)
    with np.errstate(over="ignore", under="ignore"):
      rounded = exact.astype(np.float32)
      below = rounded.astype(np.float64) < exact
    bits = rounded.view(np.uint32) + below
    return Summary(tuple(sorted({1, _INF, _INF + 1, *map(int, bits)})), sketch)

  @property
  def size(self) -> int:
    """Length of the summary."""
    return len(self.edges) + 1 + (1 + SKETCH if self.sketch else 0)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Returns float32[size]: counts at each edge, number of values; with a sketch, also sum and sketch.

    A count is exact up to 2**24, and rounded to float32 above. The sum is over the finite values. Entry i of
    the sketch is the sum of the finite values at i, i + 1016, ..., with random signs that are the same for
    every array of a shape.

    The distance of two sketches estimates the distance of the arrays. It is exact for arrays no longer than
    the sketch. For longer arrays its relative standard error is at most sqrt(1 / (2 * 1016)) = 2.2%. If all
    of the difference is in one column, it is sqrt(1 / (2 * 127)) = 6.3%, and more if the width is a multiple
    of 127.

    Sources: Alon, Matias, Szegedy, The Space Complexity of Approximating the Frequency Moments, 1996;
    Charikar, Chen, Farach-Colton, Finding Frequent Items in Data Streams, 2002.
    """
    if _compat.is_explicit(jax.typeof(x)):  # counts do not depend on where the values lie
      return jax.sharding.auto_axes(self._of, out_sharding=jax.sharding.PartitionSpec())(x)
    return self._of(x)

  @functools.partial(jax.jit, static_argnums=0)  # traced once for all arrays of a shape
  def _of(self, x: jax.Array) -> jax.Array:
    total = _over_blocks(functools.partial(self._block, whole=x.size), x)
    parts = [total[0].astype(jnp.float32), jnp.full([1], x.size, jnp.float32)]
    if self.sketch:
      added, sketch = total[1:]
      parts += [added[None], sketch if sketch.ndim == 1 else sketch.reshape(-1, SKETCH).sum(0)]
    return jnp.concatenate(parts)

  def _block(self, block: jax.Array, start: jax.Array | np.uint32, *, whole: int) -> tuple[jax.Array, ...]:
    """Returns the counts and signed sums of a piece whose first value is at `start`."""
    flat = block.reshape(-1)
    edges = tuple(edge for edge in self.edges if edge < _INF) if self.finite else self.edges
    counts = jnp.pad(_counts(edges, flat), (0, len(self.edges) - len(edges)))
    if not self.sketch:
      return (counts,)
    flat = flat.astype(jnp.float32)
    finite = flat if self.finite else jnp.where(jnp.isfinite(flat), flat, 0)
    return counts, jnp.sum(finite), _signed_sums(finite, start, whole)


def _over_blocks(look_at: Callable[..., tuple[jax.Array, ...]], x: jax.Array) -> tuple[jax.Array, ...]:
  """Adds up `look_at(piece, position)` over pieces of an array, which are whole rows in memory order."""
  if x.size <= _BLOCK:
    return look_at(x, np.uint32(0))
  long = x.ndim == 1 or x.shape[-1] > _BLOCK
  rows = x.reshape(-1) if long else x.reshape(-1, x.shape[-1])
  width = 1 if long else x.shape[-1]
  height = _BLOCK // width
  n = rows.shape[0] // height

  def body(i: jax.Array, total: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    piece = jax.lax.dynamic_slice_in_dim(rows, i * height, height)
    more = look_at(piece, jnp.uint32(i) * np.uint32(height * width))
    return jax.tree.map(jnp.add, total, more)

  rest = rows[n * height :]
  first = look_at(rest, np.uint32(n * height * width % 2**32))
  return jax.lax.fori_loop(0, n, body, first)


def _counts(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """Returns int32[edges]: how many magnitudes reach each edge."""
  if len(edges) == 1:  # summed as float32, exact in a block: XLA:CPU does not vectorise sums of integers
    above = _magnitude(flat) >= np.uint32(edges[0])
    return jnp.sum(above, dtype=jnp.float32).astype(jnp.int32)[None]
  return jax.lax.platform_dependent(
    flat,
    cpu=functools.partial(_counts_by_scatter, edges),
    default=functools.partial(_counts_by_comparison, edges),
  )


def _magnitude(x: jax.Array) -> jax.Array:
  """Returns the float32 bits of magnitudes, which sort as the magnitudes do."""
  return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7FFFFFFF)


def _counts_by_comparison(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """Compares every value with every edge: on accelerators a single pass, in registers."""
  return jnp.sum(_magnitude(flat)[:, None] >= np.asarray(edges, np.uint32), axis=0, dtype=jnp.int32)


def _counts_by_scatter(edges: tuple[int, ...], flat: jax.Array) -> jax.Array:
  """Sums a histogram by exponent and mantissa class from the top: XLA:CPU does not fuse comparisons."""
  array = np.asarray(edges, np.uint32)
  classes = np.unique([0, *(array & 0x7FFFFF)])
  width = len(classes)

  bits = _magnitude(flat)
  mantissa = bits & np.uint32(0x7FFFFF)
  index = (bits >> 23) * np.uint32(width)
  for start in classes[1:]:
    index += (mantissa >= np.uint32(start)).astype(jnp.uint32)
  # Neighbours are often alike and go to two histograms: adding to one bin twice in a row would wait.
  index = 2 * index + jax.lax.iota(jnp.uint32, flat.size) % 2
  bins = jnp.zeros(256 * width * 2, jnp.int32).at[index].add(1, mode="promise_in_bounds")
  bins = bins.reshape(256, width, 2).sum(-1)
  exponents = array >> 23
  higher = np.arange(256) > exponents[:, None]
  same = classes >= (array & 0x7FFFFF)[:, None]
  # A cumulative sum would be a hundred operations to compile.
  return jnp.sum(higher * jnp.sum(bins, 1), 1) + jnp.sum(same * bins[exponents], 1)


def _signed_sums(finite: jax.Array, start: jax.Array | np.uint32, whole: int) -> jax.Array:
  """Adds up values with random signs: to float32[SKETCH] for an array no longer than that, else by rows."""
  i = jax.lax.iota(jnp.uint32, finite.size) + start
  # A hash of the position (lowbias32 of C. Wellons, Prospecting for Hash Functions).
  i = (i ^ (i >> 16)) * np.uint32(0x7FEB352D)
  i = (i ^ (i >> 15)) * np.uint32(0x846CA68B)
  signed = jnp.where((i >> 31) == 0, finite, -finite)
  if whole <= SKETCH:
    return jnp.pad(signed, (0, SKETCH - finite.size))
  lacking = -finite.size % (_ROWS * _LANES)
  return jnp.pad(signed, (0, lacking)).reshape(-1, _ROWS, _LANES).sum(0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def look(x: jax.Array, probe: jax.Array, summary: Summary, scale: float) -> jax.Array:
  """Returns `x`; the probe's cotangent is the summary of `x` and, in a second row, that of its cotangent.

  Args:
    x: a floating array.
    probe: float32[2, size]; nothing depends on it.
    summary: the summary.
    scale: the cotangent is divided by it, in float32, before it is summarised.
  """
  return x


def _look_forward(
  x: jax.Array, probe: jax.Array, summary: Summary, scale: float
) -> tuple[jax.Array, jax.Array]:
  return x, summary(x)


def _look_backward(
  summary: Summary, scale: float, kept: jax.Array, ct: jax.Array
) -> tuple[jax.Array, jax.Array]:
  seen = ct if scale == 1 else ct.astype(jnp.float32) / scale
  return ct, jnp.stack([kept, summary(seen)])


look.defvjp(_look_forward, _look_backward)
