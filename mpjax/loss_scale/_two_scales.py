"""Compares unscaled gradients at two loss scales, which backward rules that are not linear tell apart."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, PyTree
from mpjax.loss_scale._finite import is_inexact
from mpjax.loss_scale._overwritten import hide
from mpjax.patterns import named_leaves

# Below this part of the largest norm, a gradient is what rounding has left of 0.
_ROUNDING = 1e-6


def scale_dependent(
  gradients_at: Callable[[float], PyTree], scales: tuple[float, float], tolerance: float = 0.05
) -> dict[str, tuple[float, float]]:
  """Returns the leaves whose unscaled gradient is another one at another loss scale.

  A backward pass is linear in the cotangent that it begins with, so that gradients divided by the scale are
  the same at every scale; a `custom_vjp` that clips cotangents makes them others. What float16 rounds, loses
  and lets overflow differs as well: `gradients_at` computes in float32, or the scales are both in range. In
  float32, gradients at powers of two differ by nothing at all.

  Args:
    gradients_at: makes of a loss scale the gradients of the loss times it, divided by it in float32.
    scales: the two scales.
    tolerance: the largest norm of a leaf's difference, of the larger of its two norms.

  Returns:
    The norms at the first and at the second scale, by tree path (`blocks/0/kernel`). Leaves that are not
    finite at either scale, or that are overwritten, are passed over.
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
