"""Layer-wise adaptive loss scaling, against gradients in float64 and the paper's formulas."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from scipy import special

import mpjax
from tests.loss_scale import _deep_chain as chain
from tests.loss_scale._deep_chain import FIRST, LAYERS, SCALING, X, Y, attenuate, dense, error, jit, worst

HALF = jnp.float16
FEW = jax.tree.map(lambda leaf: leaf[:3], LAYERS)
start = functools.partial(SCALING.start, X)
gradient = jax.grad(chain.scaled_loss)
close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20)


def layer_of(layers, i):
  return jax.tree.map(lambda leaf: leaf[i], layers)


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
  assert not any(mpjax.all_finite(grads(value)) for value in (np.inf, np.nan))
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
      assert math.frexp(scale)[0] == 0.5
      # Between powers of two the rounding of float32 may decide.
      low, high = (1, 1) if expected is None else (expected / 2 * (1 - 1e-5), expected * (1 + 1e-5))
      assert low <= scale <= high, (size, width, passed)
  assert seen >= {None, 0, 3, 9}
  for g in (np.full((5, 3), np.inf, np.float16), np.ones((0, 3), np.float16), np.ones((5, 3), np.float32)):
    assert measure(g, np.float32(rng.normal(size=(7, 3))), np.float32(1)) == 1


def test_scales_can_be_measured_now_and_reused_later():
  def loss(layers, scales):
    def body(h, layer):
      p, scale = layer
      return SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, p, h, scale=scale)), None

    h, _ = jax.lax.scan(body, start(HALF), (layers, scales))
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  step = jit(jax.grad(loss, argnums=(0, 1)))
  measured, scales = step(LAYERS, np.zeros(chain.DEPTH, np.float32))
  assert max(scales) > 1
  jax.tree.map(np.testing.assert_array_equal, step(LAYERS, scales), (measured, scales))
  np.testing.assert_array_equal(step(LAYERS, np.asarray(scales) / 2)[1], scales / 2)


def of_half(gain):
  """A loss of a half-precision copy of parameters, whose gradient would be 0 there."""
  low = gain.astype(HALF)
  return jnp.mean(SCALING.finish(SCALING.apply(lambda v: v * low, start(HALF))) ** 2) * 1e-7


def of_rows(w):
  h = SCALING.start(jnp.full((4096, 8), 50.0), HALF)
  return jnp.mean(SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, h)))


def of_gain(gain, weights):
  h = SCALING.start(jnp.ones(weights.shape), HALF)
  return jnp.sum(SCALING.finish(SCALING.apply(lambda v: v * gain.astype(v.dtype), h)) * weights)


def test_sums_neither_overflow_nor_vanish():
  full = lambda value, *shape: np.full(shape, value, np.float32)
  # Loss, arguments, gradient, relative error: float16 sums of a CPU round more than those of an accelerator.
  for loss, args, expected, rtol in (
    (of_rows, [full(0.01, 8, 4)], 12.5, 0.01),
    (of_gain, [full(1), full(1, 512, 512)], 512 * 512, 0.05),
    (of_half, [full(1, chain.WIDTH)], np.nan, 0),
  ):
    found = jit(jax.grad(loss))(*args)
    np.testing.assert_allclose(found, np.full(args[0].shape, expected), rtol=rtol, err_msg=str(loss))


wide = lambda w, v: jnp.dot(v, w, preferred_element_type=jnp.float32)
MASK = np.ones((chain.WIDTH, chain.WIDTH), np.int32)  # an integer array is no kernel
ENDS = {
  "float16": lambda p, h: SCALING.layer(lambda p, v: v @ (p["w"] * p["m"]) + p["b"], {**p, "m": MASK}, h),
  "float32": lambda p, h: SCALING.layer(lambda p, v: dense(p, v).astype(jnp.float32), p, h),
  "product": lambda p, h: SCALING.layer(lambda p, v: wide(p["w"], v) + p["b"], p, h),
  "apply": lambda p, h: SCALING.apply(lambda v: v.astype(jnp.float32), SCALING.layer(dense, p, h)),
  "bfloat16": lambda p, h: SCALING.layer(lambda p, v: dense(p, v).astype(jnp.bfloat16), p, h),
  "copies": lambda p, h: SCALING.layer(dense, p, SCALING.fork(h, 3)[1]),
}


def test_a_gradient_is_scaled_where_it_enters_half_precision():
  loss = lambda p, end, x: jnp.mean(SCALING.finish(end(p, SCALING.start(x, HALF))) ** 2) * 1e-7
  found = jit(lambda p: {name: jax.grad(loss)(p, end, X) for name, end in ENDS.items()})(FIRST)
  g = 2e-7 * np.float64(X @ FIRST["w"]) / X.size
  for name, grads in found.items():
    assert error(grads, {"w": X.T @ g, "b": g.sum(0)}) < 0.01, name
  of_empty = lambda p: jnp.sum(SCALING.finish(SCALING.layer(dense, p, SCALING.start(X[:0], HALF))))
  assert not any(g.any() for g in jax.tree.leaves(jit(jax.grad(of_empty))(FIRST)))


def test_a_convolution():
  kernel, image = (np.float32(chain.RNG.normal(size=shape)) for shape in ((3, 3, 4, 8), (2, 8, 8, 4)))
  convolve = lambda k, x: jax.lax.conv_general_dilated(
    x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
  )

  def loss(kernel, image, dtype):
    h = SCALING.layer(convolve, kernel, SCALING.start(image, dtype))
    return SCALING.finish(SCALING.layer(convolve, kernel.swapaxes(2, 3), h)).mean() * 2.0**-16

  both = lambda *args: [jax.grad(loss, argnums=(0, 1))(*args, dtype) for dtype in (HALF, jnp.float32)]
  assert max(map(error, *jit(both)(kernel, image))) < 0.02


def test_the_gradient_of_a_gradient_is_an_ordinary_one():
  """As of a gradient penalty (trap 31)."""
  penalty = lambda loss, dtype: (
    lambda ps: sum((g**2).sum() for g in jax.tree.leaves(jax.grad(loss)(ps, X, dtype, 1.0)))
  )
  both = (chain.scaled_loss, HALF), (chain.plain_loss, jnp.float32)
  half, full = (jit(jax.grad(penalty(*of)))(FEW) for of in both)
  assert worst(half, jax.tree.map(np.asarray, full)) < 0.02


def test_the_gradient_of_a_vmap_and_the_vmap_of_a_gradient():
  """Every example, and every member of an ensemble, has its own scales."""
  x = np.concatenate([X[:2] * np.float32([[1.0], [2.0**-3]]), X[2:]])
  one = lambda x, y: gradient(LAYERS, x[None], HALF, target=y)
  of_examples, alone = jit(jax.vmap(one)), jit(one)
  for i in range(2):
    jax.tree.map(close, layer_of(of_examples(x, Y), i), alone(x[i], Y[i]))
  per_example = lambda p: jax.vmap(lambda x, y: chain.scaled_loss(p, x[None], HALF, target=y))(X, Y).mean()
  assert worst(jit(jax.grad(per_example))(LAYERS), chain.exact_gradients()[0]) < 0.08


ROWS, COLUMNS, WHOLE = PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec()


def mapped(fun, in_specs, out_specs, check_vma=True):
  mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
  return jax.shard_map(fun, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [False, True])
def test_every_shard_has_its_own_scales_and_their_gradients_add_up(check_vma):
  def gradients(layers, x, y):
    grads = gradient(layers, x, HALF, target=y)
    # With varying axes tracked, JAX itself sums the gradient of what all shards share.
    return grads if check_vma else jax.lax.psum(grads, "d")

  run = mapped(gradients, (WHOLE, ROWS, ROWS), WHOLE, check_vma)
  # A shard has four rows, so each of its sums rounds more than the whole one.
  found = jax.tree.map(lambda g: g / 8, jit(run)(LAYERS, X, Y))
  assert worst(found, chain.exact_gradients()[0]) < 0.08


def test_a_residual_network_with_norms_and_what_a_function_closes_over():
  """In a scan with remat, and dropout of a key that is not differentiated."""
  blocks = {"in": LAYERS["w"][:2], "out": LAYERS["w"][2:4] / 4, "gain": np.ones((2, chain.WIDTH), np.float32)}
  times = lambda w, v: v @ w

  def normed(gain, v):
    wide = v.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-3)).astype(v.dtype) * gain

  def loss(args, key, dtype):
    blocks, factor = args

    def body(h, block):
      keep = jax.random.bernoulli(key, 0.5, X.shape)
      skip, h = SCALING.fork(h)
      h = SCALING.layer(times, block["in"], SCALING.layer(normed, block["gain"], h))
      h = SCALING.apply(lambda v: jnp.where(keep, jnp.tanh(v) * factor.astype(v.dtype), 0), h)
      h = SCALING.layer(times, block["out"], h)
      return SCALING.apply(lambda a, b: a + attenuate(b), skip, h), None

    h, _ = jax.lax.scan(jax.checkpoint(body), start(dtype), blocks)
    return jnp.mean((SCALING.finish(h) - Y) ** 2) * 2.0**-12

  both = lambda *args: [jax.grad(loss)(args, jax.random.key(0), dtype) for dtype in (HALF, jnp.float32)]
  half, full = jit(both)(blocks, np.float32(0.9))
  assert all(g.any() for g in jax.tree.leaves(full))
  for ours, expected in zip(half, full, strict=True):
    assert error(ours, jax.tree.map(np.asarray, expected)) < 0.05


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: lambda h: f(jax.tree.map(jnp.copy, h))])
def test_an_activation_that_is_used_twice_where_nobody_can_see_it_makes_nan(wrap):
  """Through a transform of JAX it looks like another one: the gradient is NaN, not wrong."""

  def loss(p):
    h = SCALING.layer(dense, p, start(HALF))
    block = wrap(lambda h: SCALING.layer(dense, layer_of(LAYERS, 1), h))
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, h, block(h))))

  assert np.isnan(jit(jax.grad(loss))(FIRST)["w"]).all()


def used_twice(h):
  SCALING.apply(jnp.tanh, h)
  SCALING.layer(dense, FIRST, h)


def crossing(x):
  return SCALING.finish(SCALING.apply(lambda v: jax.lax.pmean(v, "d"), SCALING.start(x)))


def by_columns(w, x):
  return SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, SCALING.start(x)))


made = mpjax.loss_scale.layerwise_loss_scale
TWO = {"up": LAYERS["w"][0], "down": LAYERS["w"][1]}
both = lambda p, x: x @ p["up"] @ p["down"]
# What is done, and the error's text.
MISUSES = [
  (lambda: used_twice(start()), r"used before.*fork"),
  (lambda: mapped(crossing, ROWS, WHOLE, False)(X), r"communicates along \['d'\]"),
  (
    lambda: mapped(by_columns, (COLUMNS, WHOLE), COLUMNS)(FIRST["w"], X),
    r"differ along the mesh axes \['d'\]",
  ),
  (lambda: SCALING.apply(lambda v: (v, v), start()), "one floating array"),
  (lambda: SCALING.apply(lambda v: v.argmax(), start()), "one floating array"),
  (lambda: SCALING.finish(jax.vmap(SCALING.start)(jnp.ones((32, 4)))), r"stack of \(32,\) activations.*vmap"),
  (lambda: start("int8"), "floating dtype, not int8"),
  (lambda: SCALING.start(jnp.arange(3)), r"int32.*embeddings"),
  (lambda: SCALING.layer(dense, FIRST, start(), kernel=lambda p: p["b"]), "fan_in"),
  (lambda: SCALING.layer(dense, FIRST, X), r"scaling\.start"),
  (lambda: SCALING.layer(dense, mpjax.cast_floating(FIRST, HALF), start()), r"\['b'\] is float16.*master"),
  (lambda: SCALING.fork(start(), 0), "n=0"),
  (lambda: SCALING.layer(both, TWO, start()), r"several.*'down'.*'up'.*kernel="),
  *((lambda value=value: made(underflow=value), "underflow") for value in (0.0, 1.0, -1.0, math.nan)),
  *((lambda value=value: made(init_scale=value), "init_scale") for value in (0.0, -1.0, math.inf, 2.0**101)),
  *((lambda value=value: made(max_layer_scale=value), "max_layer_scale") for value in (0.5, math.inf, "x")),
  *((lambda value=value: made(max_scale=value), "max_scale") for value in (0.5, 2.0**127)),
]


def test_each_way_to_get_wrong_numbers_is_an_error_with_the_way_out():
  def traced(act):
    jax.eval_shape(lambda: (act(), ())[1])

  for act, message in MISUSES:
    with pytest.raises((TypeError, ValueError), match=message):
      traced(act)
  # The ways out of two of them.
  traced(lambda: SCALING.layer(both, TWO, start(), kernel=lambda p: p["up"], fan_in=16))
  np.testing.assert_array_equal(jit(lambda x: jax.vmap(SCALING.finish)(jax.vmap(SCALING.start)(x)))(X), X)


def test_a_fork_adds_gradients_of_any_scales():
  """To what float16 can hold at the scale that comes out, which no gradient overflows at."""
  rng = np.random.default_rng(0)

  @jit
  def run(gradients, tokens):
    forked = lambda *h: [(copy.value, copy.token) for copy in SCALING.fork(mpjax.loss_scale.Scaled(*h), 2)]
    return jax.vjp(forked, jnp.zeros(3, HALF), jnp.zeros(2))[1](list(zip(gradients, tokens, strict=True)))

  for row in range(60):
    exponents, sizes, paths = rng.integers(-10, 41, 2), rng.integers(-20, 16, 2), np.ones(2)
    if row == 0:  # each fits, and their sum does not
      exponents, sizes = np.zeros(2), np.full(2, 15)
    if row == 1:  # a copy that nothing was made of has no say
      exponents, paths[1] = np.full(2, -8), 0
    gradients = [np.float16([1.0, -0.5, 0.75]) * np.float16(factor) for factor in 2.0**sizes * paths]
    total, (scale, came_by) = run(gradients, np.float32(np.stack([2.0**exponents * paths, paths], 1)))
    total, scale = np.float64(total), float(scale)
    assert came_by == 1
    assert np.isfinite(total).all(), row
    assert scale <= 2.0 ** exponents.max(), row
    expected = sum(np.float64(g) / 2.0**e for g, e in zip(gradients, exponents, strict=True))
    np.testing.assert_allclose(total / scale, expected, rtol=1e-3, atol=2.0**-24 / scale)
