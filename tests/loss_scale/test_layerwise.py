"""Layer-wise adaptive loss scaling, against float32 gradients and the paper's formulas in float64."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special

import mpjax
from tests.casting._jaxprs import jit
from tests.loss_scale._deep_chain import (
  DEPTH,
  PARAMS,
  RNG,
  SCALING,
  TRUTH,
  WIDTH,
  X,
  Y,
  attenuate,
  dense,
  error,
  plain_loss,
  scaled_loss,
)


@pytest.mark.slow
def test_every_layer_of_a_chain_that_no_single_scale_can_train_gets_its_gradient():
  grads = jax.jit(jax.grad(scaled_loss), static_argnums=2)(PARAMS, X, jnp.float16)
  assert max(error(grads, TRUTH)) < 0.05
  assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, PARAMS)
  scaled = jit(jax.grad(lambda p, scale: plain_loss(p, X, jnp.float16) * scale))
  for exponent in range(0, 40, 4):
    single = jax.tree.map(lambda g: g / 2.0**exponent, scaled(PARAMS, np.float32(2.0**exponent)))
    lost = not single[0]["w"].any()
    assert lost or not mpjax.all_finite(single), exponent


@pytest.mark.slow
def test_the_caps_of_the_paper_are_too_tight_for_a_deep_chain():
  tight = mpjax.layerwise_loss_scale(max_layer_scale=16, max_scale=1024)
  grads = jax.grad(functools.partial(scaled_loss, scaling=tight))(PARAMS, X, jnp.float16)
  assert not grads[0]["w"].any()


def test_a_smaller_share_of_underflow_is_more_exact():
  errors = [
    max(error(jax.grad(functools.partial(scaled_loss, scaling=scaling))(PARAMS, X, jnp.float16), TRUTH))
    for scaling in (SCALING, mpjax.layerwise_loss_scale(underflow=1e-5))
  ]
  assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_where_nothing_underflows_it_changes_no_bit(dtype):
  grads = jax.grad(scaled_loss)(PARAMS, X, dtype, 1.0)
  expected = jax.grad(plain_loss)(PARAMS, X, dtype, 1.0)
  jax.tree.map(np.testing.assert_array_equal, grads, expected)


def test_the_forward_pass_is_unchanged():
  assert float(scaled_loss(PARAMS, X, jnp.float16)) == float(plain_loss(PARAMS, X, jnp.float16))


def test_the_gradient_of_the_input_is_unscaled():
  grads = jax.grad(scaled_loss, argnums=1)(PARAMS, X, jnp.float16)
  expected = jax.grad(plain_loss, argnums=1)(PARAMS, X, jnp.float32)
  assert error([grads], [expected])[0] < 0.05


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
  size=st.integers(-24, 12),
  width=st.integers(-8, 8),
  shape=st.tuples(*[st.integers(1, 9)] * 2),
  underflow=st.sampled_from([1e-4, 1e-3, 1e-2]),
  passed=st.integers(-10, 60),
  seed=st.integers(0, 99),
)
def test_a_scale_is_the_papers_formula(size, width, shape, underflow, passed, seed):
  rng = np.random.default_rng(seed)
  g = np.float16(rng.normal(size=(5, shape[1])) * 2.0**size)
  w = np.float32(rng.normal(size=shape) * 2.0**width)
  scaling = mpjax.layerwise_loss_scale(underflow=underflow, max_scale=2.0**64, max_layer_scale=2.0**9)
  scale = float(scaling.measure(jnp.asarray(g), jnp.asarray(w), jnp.float32(2.0**passed)))
  wide, w = np.float64(g), np.float64(w)
  sigma = math.sqrt((wide.var() + wide.mean() ** 2) * (w.var() + w.mean() ** 2))
  if sigma == 0:
    assert scale == 1
    return
  expected = max(2.0**-24 / (math.sqrt(2) * special.erfinv(underflow) * sigma), 1)
  overflow = min(65504 / shape[1] / (abs(wide).max() * abs(w).max()), 65504 / abs(wide).max())
  expected = min(expected, overflow, 2.0 ** (64 - passed), 2.0**9)
  assert math.frexp(scale)[0] == 0.5
  # Between powers of two the rounding of float32 may decide.
  assert expected / 2 * (1 - 1e-5) <= scale <= expected * (1 + 1e-5)


@pytest.mark.parametrize("value", [0.0, np.inf, np.nan])
def test_zero_and_nonfinite_gradients_are_passed_on_as_they_are(value):
  x = X.at[0, 0].set(1.0)
  grads = jax.grad(lambda p: scaled_loss(p, x, jnp.float16) * value)(PARAMS)
  if value == 0:
    assert not any(g.any() for g in jax.tree.leaves(grads))
  else:
    assert not mpjax.all_finite(grads)


def test_with_a_dynamic_loss_scale_round_it():
  """Both: the layers adapt, and a step that overflows all the same is skipped."""
  grads = jax.grad(lambda p: scaled_loss(p, X, jnp.float16) * 2.0**10)(PARAMS)
  assert max(error(jax.tree.map(lambda g: g / 2.0**10, grads), TRUTH)) < 0.05


def test_a_convolution():
  kernel = jnp.asarray(RNG.normal(size=(3, 3, 4, 8)), jnp.float32)
  image = jnp.asarray(RNG.normal(size=(2, 8, 8, 4)), jnp.float32)
  convolve = lambda k, x: jax.lax.conv_general_dilated(
    x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )

  def loss(kernel, image, dtype):
    h = SCALING.layer(convolve, kernel, SCALING.start(image, dtype))
    h = SCALING.layer(convolve, kernel.swapaxes(2, 3), h)
    return SCALING.finish(h).mean() * 2.0**-16

  half, full = (
    jit(jax.grad(functools.partial(loss, dtype=d), argnums=(0, 1)))(kernel, image)
    for d in (jnp.float16, jnp.float32)
  )
  assert max(error(half, full)) < 0.02


def test_scales_can_be_measured_now_and_reused_later():
  def loss(params, scales):
    h = SCALING.start(X, jnp.float16)
    for p, scale in zip(params, scales, strict=True):
      h = SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, p, h, scale=scale))
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  step = jax.jit(jax.grad(loss, argnums=(0, 1)))
  measured, scales = step(PARAMS, [jnp.zeros([])] * DEPTH)
  assert all(math.frexp(float(s))[0] == 0.5 for s in scales)
  assert max(map(float, scales)) > 1
  reused, again = step(PARAMS, scales)
  jax.tree.map(np.testing.assert_array_equal, (reused, again), (measured, scales))
  doubled, _ = step(PARAMS, [s / 2 for s in scales])
  assert max(error(doubled, measured)) > 0


def test_large_inputs_and_many_rows_do_not_overflow_the_sum():
  x = jnp.full((4096, 8), 50.0)
  loss = lambda w: jnp.mean(
    SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, SCALING.start(x, jnp.float16)))
  )
  np.testing.assert_allclose(jax.grad(loss)(jnp.full((8, 4), 0.01)), np.full((8, 4), 12.5), rtol=0.01)


def test_a_product_with_float32_output_is_scaled_for_its_half_precision_input():
  wide = lambda w, v: jnp.dot(v, w, preferred_element_type=jnp.float32)

  def loss(first, second):
    h = SCALING.apply(
      lambda v: v.astype(jnp.float16),
      SCALING.layer(wide, first, SCALING.start(jnp.ones((8, 16)), jnp.float16)),
    )
    return jnp.mean(SCALING.finish(SCALING.layer(wide, second, h)))

  grad = jax.grad(loss)(jnp.full((16, 16), 0.1), jnp.full((16, 16), 2.0**-23))
  np.testing.assert_allclose(grad, np.full((16, 16), 2.0**-23), rtol=0.01)


WIDE_ENDS = {
  "layer": lambda p, h: SCALING.finish(SCALING.layer(lambda p, v: dense(p, v).astype(jnp.float32), p, h)),
  "product": lambda p, h: SCALING.finish(
    SCALING.layer(lambda p, v: jnp.dot(v, p["w"], preferred_element_type=jnp.float32) + p["b"], p, h)
  ),
  "apply": lambda p, h: SCALING.finish(
    SCALING.apply(lambda v: v.astype(jnp.float32), SCALING.layer(dense, p, h))
  ),
  "bfloat16": lambda p, h: SCALING.finish(SCALING.layer(lambda p, v: dense(p, v).astype(jnp.bfloat16), p, h)),
}


@pytest.mark.parametrize("end", WIDE_ENDS)
def test_a_gradient_that_enters_half_precision_before_the_end_is_scaled_there(end):
  loss = lambda p, dtype: jnp.mean(WIDE_ENDS[end](p, SCALING.start(X, dtype)) ** 2) * 1e-7
  expected = jax.grad(lambda p: jnp.mean(dense(p, X) ** 2) * 1e-7)(PARAMS[0])
  assert error([jax.grad(loss)(PARAMS[0], jnp.float16)], [expected])[0] < 0.01


def test_the_gradient_of_a_gradient_is_an_ordinary_one():
  """As of a gradient penalty (trap 31)."""
  penalty = lambda loss, dtype: (
    lambda ps: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(ps, X, dtype, 1.0)))
  )
  half = jit(jax.grad(penalty(scaled_loss, jnp.float16)))(PARAMS[:3])
  full = jit(jax.grad(penalty(plain_loss, jnp.float32)))(PARAMS[:3])
  assert max(error(half, full)) < 0.02


def test_half_precision_copies_of_parameters_become_nan_rather_than_zero():
  def loss(gain):
    low = gain.astype(jnp.float16)
    return (
      jnp.mean(SCALING.finish(SCALING.apply(lambda v: v * low, SCALING.start(X, jnp.float16))) ** 2) * 1e-7
    )

  assert np.isnan(jax.grad(loss)(jnp.ones(WIDTH))).all()


def test_the_gradient_of_a_single_number_does_not_overflow():
  ones = jnp.ones((512, 512))

  def loss(gain, dtype):
    return jnp.sum(
      SCALING.finish(SCALING.apply(lambda v: v * gain.astype(v.dtype), SCALING.start(ones, dtype)))
    )

  # Float16 sums of a CPU round more than those of an accelerator.
  np.testing.assert_allclose(jax.grad(loss)(jnp.float32(1), jnp.float16), 512 * 512, rtol=0.05)


@pytest.mark.slow
def test_a_deep_float16_network_trains_as_in_float32(monkeypatch):
  """The benchmarks' network in half as many layers: every single scale loses the first of them, or overflows."""
  from benchmarks.layerwise import _suite as benchmark

  monkeypatch.setattr(benchmark, "DEPTH", benchmark.DEPTH // 2)
  monkeypatch.setattr(benchmark, "ATTENUATION", benchmark.ATTENUATION**2)
  table = benchmark.gradient_table()
  assert max(table["layerwise"]["zeros"]) < 0.02
  for single in table["single"].values():
    assert single["zeros"][0] == 1 or not single["finite"]
  full, half = (
    benchmark.train(lambda *args, loss=loss, dtype=dtype: loss(*args, dtype), 500)
    for loss, dtype in ((benchmark.plain_loss, jnp.float32), (benchmark.layerwise_loss, jnp.float16))
  )
  assert half["skipped"] == 0
  assert full["eval_loss"] < 0.2  # 0.53 at first
  assert abs(half["eval_loss"] / full["eval_loss"] - 1) < 0.01
