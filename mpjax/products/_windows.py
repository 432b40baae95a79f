"""Convolutions whose windows do not overlap, as products."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax

from mpjax._types import JaxprEqn
from mpjax.jaxpr import shape_of
from mpjax.products._eligibility import Sizes


class Windows(NamedTuple):
  """A convolution whose windows do not overlap, so that it is a product.

  Attributes:
    lhs_spec: dimensions of the input: batch, channels, then space.
    rhs_spec: dimensions of the kernel: channels out, channels in, then space.
    out_spec: dimensions of the result: batch, channels, then space.
    strides: by dimension of space.
    kernel: size of a window, by dimension of space.
    out: size of the result, by dimension of space.
  """

  lhs_spec: tuple[int, ...]
  rhs_spec: tuple[int, ...]
  out_spec: tuple[int, ...]
  strides: tuple[int, ...]
  kernel: tuple[int, ...]
  out: tuple[int, ...]


def windows_of(equation: JaxprEqn) -> Windows | None:
  """Returns the windows of a `conv_general_dilated` if they do not overlap; `None` if they do."""
  p = equation.params
  spec = p["dimension_numbers"]
  lhs, rhs = map(shape_of, equation.invars)
  out = shape_of(equation.outvars[0])
  kernel = tuple(rhs[i] for i in spec.rhs_spec[2:])
  plain = (
    all(isinstance(size, int) for size in (*lhs, *rhs))
    and p["feature_group_count"] == p["batch_group_count"] == 1
    and all(pad == (0, 0) for pad in map(tuple, p["padding"]))
    and all(d == 1 for d in (*p["lhs_dilation"], *p["rhs_dilation"]))
    and all(k <= s for k, s in zip(kernel, p["window_strides"], strict=True))
  )
  if not plain:
    return None
  sizes = tuple(out[i] for i in spec.out_spec[2:])
  return Windows(spec.lhs_spec, spec.rhs_spec, spec.out_spec, tuple(p["window_strides"]), kernel, sizes)


def conv_sizes(windows: Windows, lhs_shape: tuple[int, ...], rhs_shape: tuple[int, ...]) -> Sizes:
  """Returns the sizes of the convolution's product."""
  rows = lhs_shape[windows.lhs_spec[0]] * math.prod(windows.out)
  depth = lhs_shape[windows.lhs_spec[1]] * math.prod(windows.kernel)
  return Sizes(rows, depth, rhs_shape[windows.rhs_spec[0]])


def conv_operands(lhs: jax.Array, rhs: jax.Array, windows: Windows) -> tuple[jax.Array, jax.Array]:
  """Returns the operands of the convolution as [batch, *out, depth] and [depth, channels]."""
  n = len(windows.out)
  x = lhs.transpose(
    windows.lhs_spec[0], *windows.lhs_spec[2:], windows.lhs_spec[1]
  )  # [batch, *space, channels]
  covered = [(o - 1) * s + k for o, s, k in zip(windows.out, windows.strides, windows.kernel, strict=True)]
  x = x[(slice(None), *(slice(size) for size in covered))]
  gaps = [o * s - size for o, s, size in zip(windows.out, windows.strides, covered, strict=True)]
  x = jax.numpy.pad(x, [(0, 0), *((0, gap) for gap in gaps), (0, 0)])
  split = [size for o, s in zip(windows.out, windows.strides, strict=True) for size in (o, s)]
  x = x.reshape(x.shape[0], *split, x.shape[-1])
  x = x[(slice(None), *(part for k in windows.kernel for part in (slice(None), slice(k))))]
  order = [0, *range(1, 2 * n + 1, 2), *range(2, 2 * n + 1, 2), 2 * n + 1]
  x = x.transpose(order).reshape(x.shape[0], *windows.out, -1)
  w = rhs.transpose(*windows.rhs_spec[2:], windows.rhs_spec[1], windows.rhs_spec[0])
  return x, w.reshape(-1, w.shape[-1])


def conv_result(out: jax.Array, windows: Windows) -> jax.Array:
  """Transposes [batch, *out, channels] to the layout of the convolution's result."""
  n = len(windows.out)
  layout = (windows.out_spec[0], *windows.out_spec[2:], windows.out_spec[1])
  permutation = [layout.index(i) for i in range(n + 2)]
  return out.transpose(permutation)
