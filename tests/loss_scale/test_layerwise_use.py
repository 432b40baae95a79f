"""Layer-wise loss scaling in real models: transforms of JAX, forks, closures, and every misuse that is an error."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import mpjax
from mpjax.loss_scale import _layerwise_vjp  # a fork of scales that no model meets in a few steps
from tests.loss_scale import _deep_chain as chain
from tests.loss_scale._deep_chain import FIRST, LAYERS, SCALING, X, Y, attenuate, dense, error, jit, worst

HALF = jnp.float16
FEW = jax.tree.map(lambda leaf: leaf[:3], LAYERS)
gradient = jax.grad(chain.scaled_loss)
close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20)


def layer_of(layers, i):
  return jax.tree.map(lambda leaf: leaf[i], layers)


def test_a_loop_over_layers_is_the_scan_with_remat():
  def looped(layers):
    h = SCALING.start(X, HALF)
    for i in range(3):
      h = SCALING.apply(lambda v: attenuate(jnp.tanh(v)), SCALING.layer(dense, layer_of(layers, i), h))
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  scanned = lambda layers: chain.scaled_loss(layers, X, HALF, remat=True)
  loop, scan = jit(lambda layers: [jax.grad(looped)(layers), jax.grad(scanned)(layers)])(FEW)
  assert worst(loop, chain.exact_gradients(FEW)[0]) < 0.05
  jax.tree.map(close, scan, loop)


def test_the_gradient_of_a_vmap_and_the_vmap_of_a_gradient():
  """Every example, and every member of an ensemble, has its own scales."""
  x = np.concatenate([X[:2] * np.float32([[1.0], [2.0**-3]]), X[2:]])
  one = lambda x, y: gradient(LAYERS, x[None], HALF, target=y)
  of_examples, alone = jit(jax.vmap(one)), jit(one)
  for i in range(2):
    jax.tree.map(close, layer_of(of_examples(x, Y), i), alone(x[i], Y[i]))
  members = jax.tree.map(lambda leaf: np.stack([leaf, leaf * np.float32(0.9)]), LAYERS)

  per_example = lambda p: jax.vmap(lambda x, y: chain.scaled_loss(p, x[None], HALF, target=y))(X, Y).mean()
  ensemble = lambda ps: jax.vmap(lambda p: chain.scaled_loss(p, X, HALF))(ps).sum()
  examples, of_members = jit(lambda: (jax.grad(per_example)(LAYERS), jax.grad(ensemble)(members)))()
  assert worst(examples, chain.exact_gradients()[0]) < 0.08
  for i in range(2):
    assert worst(layer_of(of_members, i), chain.exact_gradients(layer_of(members, i))[0]) < 0.08


ROWS, COLUMNS, WHOLE = PartitionSpec("d"), PartitionSpec(None, "d"), PartitionSpec()


def mesh():
  return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


@pytest.mark.parametrize("check_vma", [False, True])
def test_every_shard_has_its_own_scales_and_their_gradients_add_up(check_vma):
  def gradients(layers, x, y):
    grads = gradient(layers, x, HALF, target=y)
    # With varying axes tracked, JAX itself sums the gradient of what all shards share.
    return grads if check_vma else jax.lax.psum(grads, "d")

  expected, _ = chain.exact_gradients()
  run = mapped(gradients, (WHOLE, ROWS, ROWS), WHOLE, check_vma)
  # A shard has four rows, so each of its sums rounds more than the whole one.
  found = jax.tree.map(lambda g: g / 8, jit(run)(LAYERS, X, Y))
  assert worst(found, expected) < 0.08


def test_a_residual_network_with_norms_and_shared_input():
  blocks = {
    "in": LAYERS["w"][:2],
    "out": LAYERS["w"][2:4] / 4,
    "gain": np.stack([np.linspace(0.5, 1.5, chain.WIDTH, dtype=np.float32)] * 2),
  }

  def normed(gain, v):
    wide = v.astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide**2).mean(-1, keepdims=True) + 1e-3)).astype(v.dtype) * gain

  times = lambda w, v: v @ w

  def plain(blocks, dtype):
    def body(h, block):
      low = jax.tree.map(lambda a: a.astype(dtype), block)
      return h + attenuate(jnp.tanh(normed(low["gain"], h) @ low["in"]) @ low["out"]), None

    h, _ = jax.lax.scan(body, X.astype(dtype), blocks)
    return jnp.mean((h.astype(jnp.float32) - Y) ** 2) * 2.0**-12

  def scaled(blocks):
    def body(h, block):
      skip, h = SCALING.fork(h)
      h = SCALING.layer(times, block["in"], SCALING.layer(normed, block["gain"], h))
      h = SCALING.layer(times, block["out"], SCALING.apply(jnp.tanh, h))
      return SCALING.apply(lambda a, b: a + attenuate(b), skip, h), None

    h, _ = jax.lax.scan(body, SCALING.start(X, HALF), blocks)
    return jnp.mean((SCALING.finish(h) - Y) ** 2) * 2.0**-12

  full, half = (functools.partial(plain, dtype=dtype) for dtype in (jnp.float32, HALF))
  expected, ours, unscaled = jit(lambda b: [jax.grad(loss)(b) for loss in (full, scaled, half)])(blocks)
  assert error(ours, jax.tree.map(np.asarray, expected)) < 0.05
  assert error(unscaled, jax.tree.map(np.asarray, expected)) > 0.3


def test_what_a_function_closes_over_is_unscaled_too():
  def loss(gain, key, dtype):
    def body(h, p):
      keep = jax.random.bernoulli(key, 0.5, (len(X), chain.WIDTH))
      h = SCALING.layer(dense, p, h)
      return SCALING.apply(lambda v: jnp.where(keep, jnp.tanh(v) * gain.astype(v.dtype), 0), h), None

    h, _ = jax.lax.scan(jax.checkpoint(body), SCALING.start(X, dtype), FEW)
    return jnp.mean((SCALING.finish(h) - Y) ** 2)

  both = lambda gain, seed: [jax.grad(loss)(gain, jax.random.key(seed), d) for d in (HALF, jnp.float32)]
  np.testing.assert_allclose(*jit(both)(np.float32(0.9), 0), rtol=0.01)


def test_copies_that_nothing_is_made_of_integers_and_empty_batches():
  def copies(p):
    first, _, third = SCALING.fork(SCALING.layer(dense, p, SCALING.start(X, HALF)), 3)
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, first, third)))

  def masked(p):  # integers are no kernels
    of = lambda p, v: v @ (p["w"] * p["mask"]) + p["b"]
    return jnp.mean(SCALING.finish(SCALING.layer(of, p, SCALING.start(X, HALF))) ** 2)

  def empty(p):
    return jnp.sum(SCALING.finish(SCALING.layer(dense, p, SCALING.start(X[:0], HALF))))

  mask = np.ones((chain.WIDTH, chain.WIDTH), np.int32)
  of_copies, of_masked, of_empty = jit(
    lambda p: [jax.grad(copies)(p), jax.grad(masked, allow_int=True)({**p, "mask": mask}), jax.grad(empty)(p)]
  )(FIRST)
  ones = np.full((len(X), chain.WIDTH), 2.0 / X.size)
  assert error(of_copies, {"w": np.float64(X).T @ ones, "b": ones.sum(0)}) < 0.01
  g = 2 * np.float64(X @ FIRST["w"]) / X.size
  assert error({k: of_masked[k] for k in "wb"}, {"w": X.T @ g, "b": g.sum(0)}) < 0.01
  assert not any(leaf.any() for leaf in jax.tree.leaves(of_empty))


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: lambda h: f(jax.tree.map(jnp.copy, h))])
def test_an_activation_that_is_used_twice_where_nobody_can_see_it_makes_nan(wrap):
  """Through a transform of JAX it looks like another one: the gradient is NaN, not wrong."""

  def loss(p):
    h = SCALING.layer(dense, p, SCALING.start(X, HALF))
    block = wrap(lambda h: SCALING.layer(dense, layer_of(LAYERS, 1), h))
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, h, block(h))))

  assert np.isnan(jit(jax.grad(loss))(FIRST)["w"]).all()


def used_twice():
  h = SCALING.start(X)
  SCALING.apply(jnp.tanh, h)
  SCALING.layer(dense, FIRST, h)


def mapped(fun, in_specs, out_specs, check_vma=True):
  return jax.shard_map(fun, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def crossing(x):
  return SCALING.finish(SCALING.apply(lambda v: jax.lax.pmean(v, "d"), SCALING.start(x)))


def by_columns(w, x):
  return SCALING.finish(SCALING.layer(lambda w, v: v @ w, w, SCALING.start(x)))


UP_AND_DOWN = {"up": LAYERS["w"][0], "down": LAYERS["w"][1]}
both = lambda p, x: x @ p["up"] @ p["down"]
start = functools.partial(SCALING.start, X)
# What is done, the error and its text.
MISUSES = [
  (used_twice, ValueError, r"used before.*fork"),
  (lambda: mapped(crossing, ROWS, WHOLE, False)(X), ValueError, r"communicates along \['d'\]"),
  (
    lambda: mapped(by_columns, (COLUMNS, WHOLE), COLUMNS)(FIRST["w"], X),
    ValueError,
    r"differ along the mesh axes \['d'\]",
  ),
  (lambda: SCALING.apply(lambda v: (v, v), start()), TypeError, "one floating array"),
  (lambda: SCALING.apply(lambda v: v.argmax(), start()), TypeError, "one floating array"),
  (
    lambda: SCALING.finish(jax.vmap(SCALING.start)(jnp.ones((32, 4)))),
    ValueError,
    r"stack of \(32,\) activations.*vmap",
  ),
  (lambda: start("int8"), ValueError, "floating dtype, not int8"),
  (lambda: SCALING.layer(dense, FIRST, start(), kernel=lambda p: p["b"]), ValueError, "fan_in"),
  (lambda: SCALING.layer(dense, FIRST, X), TypeError, r"scaling\.start"),
  (
    lambda: SCALING.layer(dense, jax.tree.map(lambda p: p.astype(HALF), FIRST), start(HALF)),
    ValueError,
    r"\['b'\] is float16.*master weights",
  ),
  (lambda: SCALING.start(jnp.arange(3)), ValueError, r"int32.*embeddings"),
  (lambda: SCALING.fork(start(), 0), ValueError, "n=0"),
  (lambda: SCALING.layer(both, UP_AND_DOWN, start()), ValueError, r"several.*'down'.*'up'.*kernel="),
  *[
    (
      lambda field=field, value=value: mpjax.loss_scale.layerwise_loss_scale(**{field: value}),
      ValueError,
      field,
    )
    for field, values in {
      "underflow": (0.0, 1.0, -1.0, math.nan),
      "init_scale": (0.0, -1.0, math.inf, 2.0**101),
      "max_layer_scale": (0.5, math.inf, "x"),
      "max_scale": (0.5, 2.0**127),
    }.items()
    for value in values
  ],
]


def test_each_way_to_get_wrong_numbers_is_an_error_with_the_way_out():
  def traced(act):
    jax.eval_shape(lambda: (act(), ())[1])

  for act, error_type, message in MISUSES:
    with pytest.raises(error_type, match=message):
      traced(act)
  # The ways out of two of them.
  traced(lambda: SCALING.layer(both, UP_AND_DOWN, start(), kernel=lambda p: p["up"], fan_in=16))
  np.testing.assert_array_equal(jit(lambda x: jax.vmap(SCALING.finish)(jax.vmap(SCALING.start)(x)))(X), X)


def test_a_fork_adds_gradients_of_any_scales():
  """To what float16 can hold at the scale that comes out, which no gradient overflows at."""
  rng = np.random.default_rng(0)
  for n in (1, 2, 4):

    @jit
    def run(gradients, scales, paths, n=n):
      _, backward = jax.vjp(functools.partial(_layerwise_vjp.fork, n), jnp.zeros(3, HALF), jnp.zeros(2))
      return backward(list(zip(gradients, jnp.stack([scales, paths], 1), strict=True)))

    for row in range(60):
      exponents, sizes, paths = rng.integers(-10, 41, n), rng.integers(-20, 16, n), np.ones(n, np.float32)
      if row == 0:  # each fits, and their sum does not
        exponents, sizes = np.zeros(n), np.full(n, 15)
      if row == 1:  # a copy that nothing was made of has no say
        exponents, paths[1:] = np.full(n, -8), 0
      gradients = [np.float16([1.0, -0.5, 0.75]) * np.float16(factor) for factor in 2.0**sizes * paths]
      scales = np.float32(2.0**exponents)
      total, (scale, came_by) = run(gradients, scales * paths, paths)
      total, scale = np.float64(total), float(scale)
      assert came_by == 1
      assert np.isfinite(total).all(), (n, row)
      assert scale <= scales.max(), (n, row)
      expected = sum(np.float64(g) / s for g, s in zip(gradients, scales, strict=True))
      np.testing.assert_allclose(total / scale, expected, rtol=1e-3, atol=2.0**-24 / scale)
