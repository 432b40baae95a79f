"""Compares unscaled gradients at two loss scales, which differ if a backward rule is not linear."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, PyTree
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._overwritten import hide
from mpjax.patterns import named_leaves

# A gradient below this part of the largest norm is rounding noise around 0.
_ROUNDING = 1e-6


def scale_dependent(
  gradients_at: Callable[[float], PyTree], scales: tuple[float, float], tolerance: float = 0.05
) -> dict[str, tuple[float, float]]:
  """Returns the leaves whose unscaled gradient depends on the loss scale.

  A backward pass is linear in its first cotangent, so gradients divided by the scale are the same at every
  scale. They differ if a `custom_vjp` clips cotangents, and where float16 rounds, underflows or overflows:
  so `gradients_at` computes in float32, or both scales are in range. In float32, the gradients at two powers
  of two are equal.

  Args:
    gradients_at: (loss scale) -> the gradients of the scaled loss, divided by the scale in float32.
    scales: the two scales.
    tolerance: the largest norm of a leaf's difference, relative to the larger of its two norms.

  Returns:
    The norms at the first and at the second scale, by tree path (`blocks/0/kernel`). Leaves that are not
    finite at either scale, or that are overwritten, are ignored.
  """
  one, other = (named_leaves(hide(gradients_at(scale))) for scale in scales)
  norms = {
    path: np.asarray(jax.device_get(_norms(x, y)), np.float64)
    for (path, x), (_, y) in zip(one, other, strict=True)
    if is_inexact(x)
  }
  norms = {path: found for path, found in norms.items() if np.isfinite(found).all()}
  noise = _ROUNDING * max((max(low, high) for low, high, _ in norms.values()), default=0.0)
  return {
    path: (float(low), float(high))
    for path, (low, high, apart) in norms.items()
    if apart > max(tolerance * max(low, high), noise)
  }


@jax.jit
def _norms(x: Array, y: Array) -> tuple[Array, Array, Array]:
  wide = jnp.promote_types(x.dtype, jnp.float32)
  x, y = x.astype(wide), y.astype(wide)
  norm = lambda z: jnp.sqrt(jnp.sum(jnp.square(jnp.abs(z))))
  return norm(x), norm(y), norm(x - y)
