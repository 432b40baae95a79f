"""Layer-wise adaptive loss scaling, against float32 gradients and the paper's formulas in float64."""

import functools
import importlib.util
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from scipy import special

import mpjax
from mpjax.loss_scale import carried

DEPTH, WIDTH = 8, 16
RNG = np.random.default_rng(0)
PARAMS = [
  {
    "w": jnp.asarray(RNG.normal(size=(WIDTH, WIDTH)) * 1.4 / math.sqrt(WIDTH), jnp.float32),
    "b": jnp.zeros(WIDTH),
  }
  for _ in range(DEPTH)
]
X = jnp.asarray(RNG.normal(size=(32, WIDTH)), jnp.float32)
Y = jnp.asarray(RNG.normal(size=(32, WIDTH)), jnp.float32)
SCALING = mpjax.layerwise_loss_scale()


def dense(p, x):
  return x @ p["w"] + p["b"]


def attenuate(h, by=2.0**-6):
  """The identity, whose gradient is `by` times what comes in."""
  by = jnp.asarray(by, h.dtype)
  return jax.lax.stop_gradient(h - h * by) + h * by


def plain_loss(params, x, dtype, by=2.0**-6):
  h = x.astype(dtype)
  for p in params:
    h = attenuate(jnp.tanh(dense(jax.tree.map(lambda a: a.astype(dtype), p), h)), by)
  return jnp.mean((h.astype(jnp.float32) - Y[: len(x)]) ** 2)


def scaled_loss(params, x, dtype, by=2.0**-6, scaling=SCALING):
  h = scaling.start(x, dtype)
  for p in params:
    h = scaling.apply(lambda v: attenuate(jnp.tanh(v), by), scaling.layer(dense, p, h))
  return jnp.mean((scaling.finish(h) - Y[: len(x)]) ** 2)


def error(grads, expected):
  norm = lambda tree: math.sqrt(sum(float((np.float64(g) ** 2).sum()) for g in jax.tree.leaves(tree)))
  return [
    norm(jax.tree.map(lambda a, b: a - b, g, e)) / norm(e) for g, e in zip(grads, expected, strict=True)
  ]


TRUTH = jax.grad(plain_loss)(PARAMS, X, jnp.float32)


def test_every_layer_of_a_chain_that_no_single_scale_can_train_gets_its_gradient():
  grads = jax.jit(jax.grad(scaled_loss), static_argnums=2)(PARAMS, X, jnp.float16)
  assert max(error(grads, TRUTH)) < 0.05
  assert jax.tree.map(lambda g: g.dtype, grads) == jax.tree.map(lambda p: p.dtype, PARAMS)
  for exponent in range(0, 40, 4):
    scaled = lambda p: plain_loss(p, X, jnp.float16) * 2.0**exponent
    single = jax.tree.map(lambda g: g / 2.0**exponent, jax.grad(scaled)(PARAMS))
    lost = not single[0]["w"].any()
    assert lost or not mpjax.all_finite(single), exponent


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


class TestTransforms:
  """jit is above; scan, vmap, remat and shard_map."""

  def stacked(self):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *PARAMS)

  def scanned_loss(self, stacked, x, remat=False):
    def body(h, p):
      return SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, p, h)), None

    h, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, SCALING.start(x, jnp.float16), stacked)
    return jnp.mean((SCALING.finish(h) - Y[: len(x)]) ** 2)

  @pytest.mark.parametrize("remat", [False, True])
  def test_a_scan_over_layers_is_the_loop(self, remat):
    grads = jax.grad(functools.partial(self.scanned_loss, remat=remat))(self.stacked(), X)
    expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *jax.grad(scaled_loss)(PARAMS, X, jnp.float16))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20), grads, expected)

  def test_every_example_of_vmap_has_its_own_scales(self):
    one = lambda x: jax.grad(scaled_loss)(PARAMS, x[None], jnp.float16)
    sizes = jnp.asarray([1.0, 2.0**-3])[:, None]
    grads = jax.vmap(one)(X[:2] * sizes)
    for i in range(2):
      expected = one(X[i] * sizes[i])
      close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20)
      jax.tree.map(lambda g, e: close(g[i], e), grads, expected)

  @pytest.mark.parametrize("check_vma", [False, True])
  def test_every_shard_has_its_own_scales_and_their_gradients_add_up(self, check_vma):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(
      jax.shard_map,
      mesh=mesh,
      in_specs=(PartitionSpec(), PartitionSpec("d"), PartitionSpec("d")),
      out_specs=PartitionSpec(),
      check_vma=check_vma,
    )
    def gradients(params, x, y):
      def loss(params):
        h = SCALING.start(x, jnp.float16)
        for p in params:
          h = SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, p, h))
        return jnp.sum((SCALING.finish(h) - y) ** 2) / Y.size

      grads = jax.grad(loss)(params)
      # With varying axes tracked, JAX itself sums the gradient of what all shards share.
      return grads if check_vma else jax.lax.psum(grads, "d")

    # A shard has four rows, so each of its sums rounds more than the whole one.
    assert max(error(jax.jit(gradients)(PARAMS, X, Y), TRUTH)) < 0.08


def test_a_residual_network_with_norms_and_shared_input():
  blocks = [
    {"in": p["w"], "out": q["w"] / 4, "gain": jnp.linspace(0.5, 1.5, WIDTH)}
    for p, q in zip(PARAMS[:4], PARAMS[4:], strict=True)
  ]

  def norm(gain, v):
    wide = v.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-3)).astype(v.dtype) * gain

  def plain(blocks, dtype):
    h = X.astype(dtype)
    for block in blocks:
      low = jax.tree.map(lambda a: a.astype(dtype), block)
      inner = jnp.tanh(norm(low["gain"], h) @ low["in"]) @ low["out"]
      h = h + attenuate(inner)
    return jnp.mean((h.astype(jnp.float32) - Y) ** 2) * 2.0**-12

  def scaled(blocks):
    h = SCALING.start(X, jnp.float16)
    for block in blocks:
      skip, h = SCALING.fork(h)
      h = SCALING.layer(norm, block["gain"], h)
      h = SCALING.apply(jnp.tanh, SCALING.layer(lambda w, v: v @ w, block["in"], h))
      h = SCALING.layer(lambda w, v: v @ w, block["out"], h)
      h = SCALING.apply(lambda a, b: a + attenuate(b), skip, h)
    return jnp.mean((SCALING.finish(h) - Y) ** 2) * 2.0**-12

  expected = jax.grad(plain)(blocks, jnp.float32)
  assert max(error(jax.grad(scaled)(blocks), expected)) < 0.05
  assert max(error(jax.grad(plain)(blocks, jnp.float16), expected)) > 0.3


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

  half, full = (jax.grad(loss, argnums=(0, 1))(kernel, image, d) for d in (jnp.float16, jnp.float32))
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


def test_the_kernel_can_be_named():
  params = {"up": PARAMS[0]["w"], "down": PARAMS[1]["w"]}
  both = lambda p, x: x @ p["up"] @ p["down"]
  with pytest.raises(ValueError, match=r"several parameters.*'down'.*'up'.*kernel="):
    SCALING.layer(both, params, SCALING.start(X))
  SCALING.layer(both, params, SCALING.start(X), kernel=lambda p: p["up"], fan_in=16)


def test_an_ensemble_and_per_example_losses_under_vmap():
  """The gradient of a vmap, not only the vmap of a gradient."""
  per_example = lambda params: jax.vmap(lambda x: scaled_loss(params, x[None], jnp.float16))(X).mean()
  expected = jax.grad(lambda params: jax.vmap(lambda x: plain_loss(params, x[None], jnp.float32))(X).mean())(
    PARAMS
  )
  assert max(error(jax.grad(per_example)(PARAMS), expected)) < 0.08
  members = jax.tree.map(lambda p: jnp.stack([p, p * 0.9]), PARAMS)
  ensemble = lambda loss, dtype: jax.grad(lambda ps: jax.vmap(lambda p: loss(p, X, dtype))(ps).sum())(members)
  assert max(error(ensemble(scaled_loss, jnp.float16), ensemble(plain_loss, jnp.float32))) < 0.08


def test_what_a_function_closes_over_is_unscaled_too():
  def loss(gain, key, dtype):
    def body(h, p):
      keep = jax.random.bernoulli(key, 0.5, (len(X), WIDTH))
      h = SCALING.layer(dense, p, h)
      return SCALING.apply(lambda v: jnp.where(keep, jnp.tanh(v) * gain.astype(v.dtype), 0), h), None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *PARAMS[:3])
    h, _ = jax.lax.scan(jax.checkpoint(body), SCALING.start(X, dtype), stacked)
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  half, full = (jax.grad(loss)(jnp.float32(0.9), jax.random.key(0), d) for d in (jnp.float16, jnp.float32))
  np.testing.assert_allclose(half, full, rtol=0.01)


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


def test_a_copy_that_nothing_is_made_of():
  def loss(p):
    first, _, third = SCALING.fork(SCALING.layer(dense, p, SCALING.start(X, jnp.float16)), 3)
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, first, third)))

  expected = jax.grad(lambda p: jnp.mean(2 * dense(p, X)))(PARAMS[0])
  assert error([jax.grad(loss)(PARAMS[0])], [expected])[0] < 0.01


def test_an_empty_batch():
  grads = jax.grad(
    lambda p: jnp.sum(SCALING.finish(SCALING.layer(dense, p, SCALING.start(X[:0], jnp.float16))))
  )(PARAMS[0])
  assert not any(g.any() for g in jax.tree.leaves(grads))


class TestMisuse:
  """Each way to get wrong numbers is an error with the way out."""

  def test_an_activation_that_is_used_twice(self):
    h = SCALING.start(X)
    SCALING.apply(jnp.tanh, h)
    with pytest.raises(ValueError, match=r"used before.*fork"):
      SCALING.layer(dense, PARAMS[0], h)

  @pytest.mark.parametrize(
    "wrap", [jax.jit, jax.checkpoint, lambda f: lambda h: f(jax.tree.map(jnp.copy, h))]
  )
  def test_an_activation_that_is_used_twice_where_nobody_can_see_it(self, wrap):
    """Through a transform of JAX it looks like another one: the gradient is NaN, not wrong."""

    def loss(p):
      h = SCALING.layer(dense, p, SCALING.start(X, jnp.float16))
      block = wrap(lambda h: SCALING.layer(dense, PARAMS[1], h))
      return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, h, block(h))))

    assert np.isnan(jax.grad(loss)(PARAMS[0])["w"]).all()

  def test_communication_between_start_and_finish(self):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mean = lambda x: SCALING.finish(SCALING.apply(lambda v: jax.lax.pmean(v, "d"), SCALING.start(x)))
    with pytest.raises(ValueError, match=r"communicates along \['d'\]"):
      jax.shard_map(mean, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec(), check_vma=False)(
        X
      )

  def test_tensor_parallel_parameters(self):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    of = lambda w, x: SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, SCALING.start(x)))
    spec = PartitionSpec(None, "d")
    with pytest.raises(ValueError, match=r"differ along the mesh axes \['d'\]"):
      jax.shard_map(of, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)(PARAMS[0]["w"], X)

  @pytest.mark.parametrize("fun", [lambda v: (v, v), lambda v: v.argmax()])
  def test_a_function_that_returns_something_else(self, fun):
    with pytest.raises(TypeError, match="one floating array"):
      SCALING.apply(fun, SCALING.start(X))

  def test_a_kernel_without_a_fan_in(self):
    with pytest.raises(ValueError, match="fan_in"):
      SCALING.layer(dense, PARAMS[0], SCALING.start(X), kernel=lambda p: p["b"])

  def test_an_array_in_place_of_an_activation(self):
    with pytest.raises(TypeError, match=r"scaling\.start"):
      SCALING.layer(dense, PARAMS[0], X)

  def test_half_precision_parameters(self):
    low = jax.tree.map(lambda p: p.astype(jnp.float16), PARAMS[0])
    with pytest.raises(ValueError, match=r"\['b'\] is float16.*master weights"):
      SCALING.layer(dense, low, SCALING.start(X, jnp.float16))

  def test_integer_inputs(self):
    with pytest.raises(ValueError, match=r"int32.*embeddings"):
      SCALING.start(jnp.arange(3))

  def test_forking_into_none(self):
    with pytest.raises(ValueError, match="n=0"):
      SCALING.fork(SCALING.start(X), 0)

  @pytest.mark.parametrize(
    ("field", "value"),
    [
      *[("underflow", v) for v in (0.0, 1.0, -1.0, math.nan)],
      *[("init_scale", v) for v in (0.0, -1.0, math.inf, 2.0**101)],
      *[("max_layer_scale", v) for v in (0.5, math.inf, "x")],
      *[("max_scale", v) for v in (0.5, 2.0**127)],
    ],
  )
  def test_unfit_arguments(self, field, value):
    with pytest.raises(ValueError, match=field):
      mpjax.layerwise_loss_scale(**{field: value})


@settings(max_examples=30, deadline=None)
@given(
  exponents=st.lists(st.integers(-10, 40), min_size=1, max_size=4),
  sizes=st.lists(st.integers(-20, 15), min_size=4, max_size=4),
)
def test_a_fork_adds_gradients_of_any_scales(exponents, sizes):
  """To what float16 can hold at the scale that comes out, which no gradient overflows at."""
  n = len(exponents)
  fork = functools.partial(carried.fork, n)
  _, backward = jax.vjp(fork, jnp.zeros(3, jnp.float16), jnp.zeros(2))
  gradients = [jnp.asarray([1.0, -0.5, 0.75], jnp.float16) * jnp.float16(2.0**s) for s in sizes[:n]]
  scales = [jnp.float32(2.0**e) for e in exponents]
  tokens = [jnp.stack([scale, 1.0]) for scale in scales]
  total, (scale, paths) = backward(list(zip(gradients, tokens, strict=True)))
  assert paths == 1
  expected = sum(np.float64(g) / float(s) for g, s in zip(gradients, scales, strict=True))
  assert np.isfinite(np.float64(total)).all()
  assert float(scale) <= max(map(float, scales))
  np.testing.assert_allclose(
    np.float64(total) / float(scale), expected, rtol=1e-3, atol=2.0**-24 / float(scale)
  )


@pytest.mark.slow
def test_a_deep_float16_network_trains_as_in_float32():
  """The network of benchmarks/layerwise.py: every single scale loses its first layers, or overflows."""
  path = pathlib.Path(__file__).parents[2] / "benchmarks" / "layerwise.py"
  spec = importlib.util.spec_from_file_location("layerwise_benchmark", path)
  benchmark = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(benchmark)
  table = benchmark.gradient_table()
  assert max(table["layerwise"]["zeros"]) == 0
  for single in table["single"].values():
    assert single["zeros"][0] == 1 or not single["finite"]
  full, half = (
    benchmark.train(lambda *args, loss=loss, dtype=dtype: loss(*args, dtype), 1500)
    for loss, dtype in ((benchmark.plain_loss, jnp.float32), (benchmark.layerwise_loss, jnp.float16))
  )
  assert half["skipped"] == 0
  # The benchmark reports 0.1%; another processor rounds otherwise.
  assert abs(half["eval_loss"] / full["eval_loss"] - 1) < 0.02
