"""Products of float32 operands in several passes, as other platforms compute them, on a CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from mpjax._types import Array
from mpjax.formats import FORMATS
from mpjax.formats._passes import Passes

_EXPONENT_BITS = 8  # bfloat16's, TensorFloat-32's and float32's
_MANTISSA_BITS = FORMATS["float32"].mantissa_bits


def multiply_in_passes(
  passes: Passes, lhs: Array, rhs: Array, multiply: Callable[[Array, Array], Array]
) -> Array:
  """Returns the sum of the products of the leading parts of float32 operands, the smallest first.

  As XLA does (`dot_algorithm_rewriter.cc`): parts are cut off, and only the last one is rounded; where an
  operand is infinite only the product of the first parts counts.

  Args:
    passes: how the operands are split.
    lhs: the first operand.
    rhs: the second operand.
    multiply: the product of two parts, summed in float32.
  """
  parts = [list(_parts(x, passes)) for x in (lhs, rhs)]
  pairs = sorted(itertools.product(range(passes.parts), repeat=2), key=sum)[: passes.products]
  first, *others = (multiply(parts[0][i], parts[1][j]) for i, j in pairs)
  if not others:
    return first
  rest = sum(others[-2::-1], others[-1])
  return first + jnp.where(jnp.isnan(rest), 0, rest)


def _parts(x: Array, passes: Passes) -> Iterator[Array]:
  """Yields the parts of a float32 array, as float32."""
  bits = FORMATS[passes.dtype].mantissa_bits
  mask = jnp.uint32(0xFFFFFFFF << (_MANTISSA_BITS - bits) & 0xFFFFFFFF)
  for _ in range(passes.parts - 1):
    words = jax.lax.bitcast_convert_type(x, jnp.uint32)
    part = jax.lax.bitcast_convert_type(words & mask, jnp.float32)
    yield part
    x = x - part
  yield jax.lax.reduce_precision(x, _EXPONENT_BITS, bits)
