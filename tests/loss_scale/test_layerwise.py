"""Layer-wise adaptive loss scaling, against gradients in float64 and the paper's formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

import mpjax
from tests.loss_scale import _deep_chain as chain
from tests.loss_scale._deep_chain import FIRST, LAYERS, SCALING, X, Y, attenuate, dense, error, jit, worst

HALF = jnp.float16


@functools.cache
def compiled(loss, dtype, **options):
  """(attenuation, factor) -> the loss times the factor, and its gradients of the layers and of the input."""
  of = lambda layers, x, by, factor: loss(layers, x, dtype, by, **options) * factor
  run = jit(jax.value_and_grad(of, argnums=(0, 1)))
  return lambda by=chain.BY, factor=1.0: run(LAYERS, X, by, np.float32(factor))


def test_every_layer_of_a_chain_that_no_single_scale_can_train_gets_its_gradient():
  expected, of_input = chain.exact_gradients()
  loss, (grads, of_x) = compiled(chain.scaled_loss, HALF)()
  assert worst(grads, expected) < 0.05
  assert error(of_x, of_input) < 0.05  # unscaled, too
  assert {g.dtype for g in jax.tree.leaves((grads, of_x))} == {np.dtype("float32")}
  assert loss == compiled(chain.plain_loss, HALF)()[0]
  for exponent in range(0, 40, 4):
    single = compiled(chain.plain_loss, HALF)(factor=2.0**exponent)[1][0]
    assert not single["w"][0].any() or not np.isfinite(single["w"]).all(), exponent


def test_the_underflow_and_the_caps_that_are_asked_for_are_kept():
  expected, _ = chain.exact_gradients()
  tight = mpjax.loss_scale.layerwise_loss_scale(max_layer_scale=16, max_scale=1024)  # the paper's
  assert not compiled(chain.scaled_loss, HALF, scaling=tight)()[1][0]["w"][0].any()
  rare = mpjax.loss_scale.layerwise_loss_scale(underflow=1e-5)
  errors = [worst(compiled(chain.scaled_loss, HALF, scaling=s)()[1][0], expected) for s in (SCALING, rare)]
  assert errors[1] < errors[0] / 2


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_where_nothing_underflows_it_changes_no_bit(dtype):
  ours, theirs = (compiled(loss, dtype)(by=np.float32(1)) for loss in (chain.scaled_loss, chain.plain_loss))
  jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_a_factor_of_the_loss_is_one_of_the_gradients():
  grads = lambda factor: compiled(chain.scaled_loss, HALF)(factor=factor)[1][0]
  assert not any(g.any() for g in jax.tree.leaves(grads(0.0)))
  for value in (np.inf, np.nan):
    assert not mpjax.all_finite(grads(value))
  # With a dynamic loss scale round it the layers adapt.
  expected, _ = chain.exact_gradients()
  assert worst(jax.tree.map(lambda g: g / 2.0**10, grads(2.0**10)), expected) < 0.05


def papers_scale(g, w, passed, underflow):
  """The formula of the paper, in float64, with the bounds beyond it; `None` for no gradient."""
  g, w = np.float64(g), np.float64(w)
  sigma = math.sqrt((g.var() + g.mean() ** 2) * (w.var() + w.mean() ** 2))
  if sigma == 0:
    return None
  wanted = max(2.0**-24 / (math.sqrt(2) * special.erfinv(underflow) * sigma), 1)
  top = abs(g).max()
  return min(wanted, 65504 / w.shape[1] / (top * abs(w).max()), 65504 / top, 2.0**64 / passed, 2.0**9)


def test_a_scale_is_the_papers_formula():
  rng = np.random.default_rng(1)
  seen = set()
  for underflow, shape in ((1e-4, (7, 3)), (1e-3, (1, 9)), (1e-2, (4, 1))):
    scaling = mpjax.loss_scale.layerwise_loss_scale(
      underflow=underflow, max_scale=2.0**64, max_layer_scale=2.0**9
    )
    measure = jit(scaling.measure)
    for _ in range(100):
      size, width, passed = rng.integers([-26, -36, -10], [13, 9, 61])
      g = np.float16(rng.normal(size=(5, shape[1])) * 2.0**size)
      w = np.float32(rng.normal(size=shape) * 2.0**width)
      scale = float(measure(g, w, np.float32(2.0**passed)))
      expected = papers_scale(g, w, 2.0**passed, underflow)
      seen.add(expected if expected is None else math.floor(math.log2(expected)))
      if expected is None:
        assert scale == 1
        continue
      assert math.frexp(scale)[0] == 0.5
      # Between powers of two the rounding of float32 may decide.
      assert expected / 2 * (1 - 1e-5) <= scale <= expected * (1 + 1e-5), (size, width, passed)
  assert seen >= {None, 0, 3, 9}
  for g in (np.full((5, 3), np.inf, np.float16), np.ones((0, 3), np.float16), np.ones((5, 3), np.float32)):
    assert measure(g, np.float32(rng.normal(size=(7, 3))), np.float32(1)) == 1


def test_a_convolution():
  kernel, image = (np.float32(chain.RNG.normal(size=shape)) for shape in ((3, 3, 4, 8), (2, 8, 8, 4)))
  convolve = lambda k, x: jax.lax.conv_general_dilated(
    x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )

  def loss(kernel, image, dtype):
    h = SCALING.layer(convolve, kernel, SCALING.start(image, dtype))
    h = SCALING.layer(convolve, kernel.swapaxes(2, 3), h)
    return SCALING.finish(h).mean() * 2.0**-16

  both = lambda *args: [jax.grad(loss, argnums=(0, 1))(*args, dtype) for dtype in (HALF, jnp.float32)]
  half, full = jit(both)(kernel, image)
  assert max(map(error, half, full)) < 0.02


def test_scales_can_be_measured_now_and_reused_later():
  def loss(layers, scales):
    def body(h, layer):
      p, scale = layer
      return SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, p, h, scale=scale)), None

    h, _ = jax.lax.scan(body, SCALING.start(X, HALF), (layers, scales))
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  step = jit(jax.grad(loss, argnums=(0, 1)))
  measured, scales = step(LAYERS, np.zeros(chain.DEPTH, np.float32))
  assert all(math.frexp(float(s))[0] == 0.5 for s in scales)
  assert max(scales) > 1
  jax.tree.map(np.testing.assert_array_equal, step(LAYERS, scales), (measured, scales))
  halved, used = step(LAYERS, np.asarray(scales) / 2)
  assert worst(halved, jax.tree.map(np.asarray, measured)) > 0
  np.testing.assert_array_equal(used, scales / 2)


def wide(w, v):
  """A product of which float32 comes out."""
  return jnp.dot(v, w, preferred_element_type=jnp.float32)


def from_ones(shape, dtype=HALF, value=1.0):
  return SCALING.start(jnp.full(shape, value), dtype)


def after_wide(first, second):
  h = SCALING.apply(lambda v: v.astype(HALF), SCALING.layer(wide, first, from_ones((8, 16))))
  return jnp.mean(SCALING.finish(SCALING.layer(wide, second, h)))


def of_half(gain):
  """A loss of a half-precision copy of parameters, whose gradient would be 0 there."""
  low = gain.astype(HALF)
  return jnp.mean(SCALING.finish(SCALING.apply(lambda v: v * low, SCALING.start(X, HALF))) ** 2) * 1e-7


def of_rows(w):
  return jnp.mean(SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, from_ones((4096, 8), value=50.0))))


def of_gain(gain, weights):
  h = SCALING.apply(lambda v: v * gain.astype(v.dtype), from_ones(weights.shape))
  return jnp.sum(SCALING.finish(h) * weights)


def test_sums_neither_overflow_nor_vanish():
  full = lambda value, *shape: np.full(shape, value, np.float32)
  # Loss, arguments, gradient of the first, relative error.
  for loss, args, expected, rtol in (
    (of_rows, [full(0.01, 8, 4)], 12.5, 0.01),
    (after_wide, [full(0.1, 16, 16), full(2.0**-23, 16, 16)], 2.0**-23, 0.01),
    # Float16 sums of a CPU round more than those of an accelerator.
    (of_gain, [np.float32(1), full(1, 512, 512)], 512 * 512, 0.05),
    (of_half, [full(1, chain.WIDTH)], np.nan, 0),
  ):
    found = jit(jax.grad(loss))(*args)
    np.testing.assert_allclose(found, np.full(args[0].shape, expected), rtol=rtol, err_msg=str(loss))


WIDE_ENDS = {
  "layer": lambda p, h: SCALING.layer(lambda p, v: dense(p, v).astype(jnp.float32), p, h),
  "product": lambda p, h: SCALING.layer(lambda p, v: wide(p["w"], v) + p["b"], p, h),
  "apply": lambda p, h: SCALING.apply(lambda v: v.astype(jnp.float32), SCALING.layer(dense, p, h)),
  "bfloat16": lambda p, h: SCALING.layer(lambda p, v: dense(p, v).astype(jnp.bfloat16), p, h),
}


def test_a_gradient_that_enters_half_precision_before_the_end_is_scaled_there():
  loss = lambda p, end: jnp.mean(SCALING.finish(end(p, SCALING.start(X, HALF))) ** 2) * 1e-7
  found = jit(lambda p: {name: jax.grad(loss)(p, end) for name, end in WIDE_ENDS.items()})(FIRST)
  g = 2e-7 * np.float64(X @ FIRST["w"]) / X.size
  for name, grads in found.items():
    assert error(grads, {"w": X.T @ g, "b": g.sum(0)}) < 0.01, name


def test_the_gradient_of_a_gradient_is_an_ordinary_one():
  """As of a gradient penalty (trap 31)."""
  few = jax.tree.map(lambda leaf: leaf[:3], LAYERS)
  penalty = lambda loss, dtype: (
    lambda ps: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(ps, X, dtype, 1.0)))
  )
  half, full = (
    jit(jax.grad(penalty(*of)))(few) for of in ((chain.scaled_loss, HALF), (chain.plain_loss, jnp.float32))
  )
  assert worst(half, jax.tree.map(np.asarray, full)) < 0.02


@pytest.mark.slow
def test_a_deep_float16_network_trains_as_in_float32(monkeypatch):
  """The benchmarks' network in half as many layers: every single scale loses the first of them, or overflows."""
  from benchmarks import layerwise as benchmark

  monkeypatch.setattr(benchmark, "DEPTH", benchmark.DEPTH // 2)
  monkeypatch.setattr(benchmark, "ATTENUATION", benchmark.ATTENUATION**2)
  found = {case: benchmark.gradients(*of) for case, of in benchmark.CASES.items()}
  assert max(found["layer-wise"]["zeros"]) < 0.02
  for case in found.keys() - {"float32", "layer-wise"}:
    assert found[case]["zeros"][0] == 1 or not found[case]["finite"]
  full, half = (benchmark.train(*benchmark.CASES[case], steps=500) for case in ("float32", "layer-wise"))
  assert half["skipped"] == 0
  assert full["eval_loss"] < 0.2  # 0.53 at first
  assert abs(half["eval_loss"] / full["eval_loss"] - 1) < 0.01
