"""Layer-wise loss scaling in real models: transforms of JAX, forks, closures, and every misuse that is an error."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

import mpjax
from mpjax.loss_scale import _layerwise_vjp
from tests.casting._jaxprs import jit
from tests.loss_scale._deep_chain import (
  PARAMS,
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
    grads = jit(jax.grad(functools.partial(self.scanned_loss, remat=remat)))(self.stacked(), X)
    looped = jit(jax.grad(lambda params: scaled_loss(params, X, jnp.float16)))(PARAMS)
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *looped)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20), grads, expected)

  @pytest.mark.slow
  def test_every_example_of_vmap_has_its_own_scales(self):
    one = lambda x: jax.grad(scaled_loss)(PARAMS, x[None], jnp.float16)
    sizes = jnp.asarray([1.0, 2.0**-3])[:, None]
    grads = jit(jax.vmap(one))(X[:2] * sizes)
    for i in range(2):
      expected = jit(one)(X[i] * sizes[i])
      close = functools.partial(np.testing.assert_allclose, rtol=2e-2, atol=1e-20)
      jax.tree.map(lambda g, e: close(g[i], e), grads, expected)

  @pytest.mark.slow
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


@pytest.mark.slow
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

  full, half = (functools.partial(plain, dtype=dtype) for dtype in (jnp.float32, jnp.float16))
  expected, ours, unscaled = (jit(jax.grad(loss))(blocks) for loss in (full, scaled, half))
  assert max(error(ours, expected)) < 0.05
  assert max(error(unscaled, expected)) > 0.3


def test_the_kernel_can_be_named():
  params = {"up": PARAMS[0]["w"], "down": PARAMS[1]["w"]}
  both = lambda p, x: x @ p["up"] @ p["down"]
  with pytest.raises(ValueError, match=r"several parameters.*'down'.*'up'.*kernel="):
    SCALING.layer(both, params, SCALING.start(X))
  SCALING.layer(both, params, SCALING.start(X), kernel=lambda p: p["up"], fan_in=16)


@pytest.mark.slow
def test_an_ensemble_and_per_example_losses_under_vmap():
  """The gradient of a vmap, not only the vmap of a gradient."""
  per_example = lambda params: jax.vmap(lambda x: scaled_loss(params, x[None], jnp.float16))(X).mean()
  plain = lambda params: jax.vmap(lambda x: plain_loss(params, x[None], jnp.float32))(X).mean()
  ours, expected = (jit(jax.grad(loss))(PARAMS) for loss in (per_example, plain))
  assert max(error(ours, expected)) < 0.08
  members = jax.tree.map(lambda p: jnp.stack([p, p * 0.9]), PARAMS)
  ensemble = lambda loss, dtype: jit(jax.grad(lambda ps: jax.vmap(lambda p: loss(p, X, dtype))(ps).sum()))(
    members
  )
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

  half, full = (
    jit(jax.grad(functools.partial(loss, dtype=d)))(jnp.float32(0.9), jax.random.key(0))
    for d in (jnp.float16, jnp.float32)
  )
  np.testing.assert_allclose(half, full, rtol=0.01)


def test_a_copy_that_nothing_is_made_of():
  def loss(p):
    first, _, third = SCALING.fork(SCALING.layer(dense, p, SCALING.start(X, jnp.float16)), 3)
    return jnp.mean(SCALING.finish(SCALING.apply(jnp.add, first, third)))

  plain = lambda p: jnp.mean(2 * dense(p, X))
  ours, expected = (jit(jax.grad(f))(PARAMS[0]) for f in (loss, plain))
  assert error([ours], [expected])[0] < 0.01


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

  def test_a_stack_of_activations(self):
    stack = jax.vmap(SCALING.start)(X)
    with pytest.raises(ValueError, match=r"stack of \(32,\) activations.*vmap"):
      SCALING.finish(stack)
    np.testing.assert_array_equal(jax.vmap(SCALING.finish)(jax.vmap(SCALING.start)(X)), X)

  def test_a_dtype_that_is_not_floating(self):
    with pytest.raises(ValueError, match="floating dtype, not int8"):
      SCALING.start(X, "int8")

  def test_integers_are_no_kernels(self):
    p = {**PARAMS[0], "mask": jnp.ones((WIDTH, WIDTH), jnp.int32)}
    masked = lambda p, v: v @ (p["w"] * p["mask"]) + p["b"]
    loss = lambda p: jnp.mean(SCALING.finish(SCALING.layer(masked, p, SCALING.start(X, jnp.float16))) ** 2)
    grads = jax.grad(loss, allow_int=True)(p)
    expected = jax.grad(lambda p: jnp.mean(dense(p, X) ** 2))(PARAMS[0])
    assert error([{k: grads[k] for k in "wb"}], [expected])[0] < 0.01

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


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
  exponents=st.lists(st.integers(-10, 40), min_size=1, max_size=4),
  sizes=st.lists(st.integers(-20, 15), min_size=4, max_size=4),
)
def test_a_fork_adds_gradients_of_any_scales(exponents, sizes):
  """To what float16 can hold at the scale that comes out, which no gradient overflows at."""
  n = len(exponents)
  fork = functools.partial(_layerwise_vjp.fork, n)
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
