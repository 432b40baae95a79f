"""Gradients at two loss scales: alike for linear backward rules, and named where a rule is not linear."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._types import Array, PyTree
from mpjax.loss_scale._two_scales import scale_dependent


@jax.custom_vjp
def clipped(x: Array) -> Array:
  return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.01, 0.01),))


def gradients_at(scale: float, bad: bool = False) -> PyTree:
  def loss(params: PyTree) -> Array:
    hidden = jnp.tanh(params["before"] * 2.0)
    return jnp.sum((clipped(hidden) if bad else hidden) * params["after"]) * scale

  params = {"before": jnp.linspace(0.1, 1.0, 8), "after": jnp.full(8, 0.003)}
  return jax.tree.map(lambda g: g / scale, jax.grad(loss)(params))


def test_linear_gradients_are_the_same_at_every_scale() -> None:
  assert scale_dependent(gradients_at, (1.0, 2.0**16), tolerance=0.0) == {}


def test_a_clip_of_cotangents_is_named_with_both_norms() -> None:
  found = scale_dependent(lambda scale: gradients_at(scale, bad=True), (1.0, 2.0**16))
  assert list(found) == ["before"]  # what lies behind the clip on the way back
  low, high = found["before"]
  slope = 2 / np.cosh(2 * np.linspace(0.1, 1.0, 8)) ** 2
  np.testing.assert_allclose(low, 0.003 * np.linalg.norm(slope), rtol=1e-5)
  np.testing.assert_allclose(high, 0.01 / 2**16 * np.linalg.norm(slope), rtol=1e-5)


def test_leaves_that_are_not_finite_or_only_noise_are_passed_over() -> None:
  def at(scale: float) -> PyTree:
    return {
      "infinite": jnp.full(3, jnp.inf if scale > 1 else 1.0),
      "noise": jnp.full(3, 1e-9 * scale),
      "large": jnp.ones(3),
      "_overwrite_with_gradient": {"amax": jnp.full(3, scale)},
      "whole": np.zeros(2, jax.dtypes.float0),
    }

  assert scale_dependent(at, (1.0, 4.0)) == {}
