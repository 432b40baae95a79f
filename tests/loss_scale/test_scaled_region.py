"""`scaled_region`: one loss, and a loss scale for each group of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

RNG = np.random.default_rng(0)
PARAMS = {name: jnp.asarray(RNG.normal(size=(4, 4)), jnp.float32) for name in ("body", "head")}
X = jnp.asarray(RNG.normal(size=(8, 4)), jnp.float32)
half = lambda f: lambda w, x: f(x.astype(jnp.float16) @ w.astype(jnp.float16))
BODY, HEAD = half(jnp.tanh), half(lambda v: v * jnp.float16(2.0**-12))
SCALED = lambda scale: mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=scale, min_scale=2.0**-8)
TX = optax.partition({"body": SCALED(2.0**20), "head": SCALED(2.0**14)}, {"body": "body", "head": "head"})


def loss(params, state):
  of = lambda group: mpjax.get_loss_scale(state, path=f"'{group}'").scale
  h = mpjax.scaled_region(BODY, of("body"))(params["body"], X)
  return jnp.mean(mpjax.scaled_region(HEAD, of("head"))(params["head"], h) ** 2)


def plain_loss(params, dtype):
  h = jnp.tanh(X.astype(dtype) @ params["body"].astype(dtype))
  h = (h @ params["head"].astype(dtype)) * jnp.asarray(2.0**-12, dtype)
  return jnp.mean(h.astype(jnp.float32) ** 2)


def test_each_group_has_its_own_scale_and_the_update_is_that_of_the_loss():
  state = TX.init(PARAMS)
  grads = jax.jit(jax.grad(loss))(PARAMS, state)
  updates, state = TX.update(grads, state, PARAMS)
  expected = jax.grad(plain_loss)(PARAMS, jnp.float32)
  for name in PARAMS:
    np.testing.assert_allclose(
      -updates[name], expected[name], rtol=0.05, atol=1e-3 * abs(expected[name]).max()
    )
  assert not jax.grad(plain_loss)(PARAMS, jnp.float16)["body"].any()  # all of it underflows


def test_a_group_that_overflows_backs_off_alone():
  state = optax.partition({"body": SCALED(2.0**20), "head": SCALED(1.0)}, {k: k for k in PARAMS}).init(PARAMS)
  tx = optax.partition({"body": SCALED(2.0**20), "head": SCALED(1.0)}, {k: k for k in PARAMS})
  big = {**PARAMS, "body": PARAMS["body"] * 2}
  of = lambda group: mpjax.get_loss_scale(state, path=f"'{group}'")

  def loss(params):
    h = mpjax.scaled_region(BODY, of("body").scale)(params["body"], X)
    return jnp.sum(mpjax.scaled_region(half(lambda v: v), of("head").scale)(params["head"], h))

  updates, state = tx.update(jax.grad(loss)(big), state, big)
  assert not updates["body"].any()
  assert updates["head"].any()
  assert (float(of("body").scale), float(of("head").scale)) == (2.0**19, 1.0)


def test_inputs_in_half_precision_are_refused():
  region = mpjax.scaled_region(BODY, jnp.float32(8))
  with pytest.raises(ValueError, match=r"float16.*float32"):
    region(PARAMS["body"], X.astype(jnp.float16))


def test_integer_inputs_and_the_gradient_of_floating_ones():
  embed = lambda table, tokens, x: (table[tokens] + x).astype(jnp.float16)
  region = mpjax.scaled_region(embed, jnp.float32(8))
  tokens = jnp.asarray([1, 2, 1])
  of = lambda table, x: region(table, tokens, x).sum()
  table, x = jax.grad(of, argnums=(0, 1))(PARAMS["body"], jnp.ones((3, 4)))
  np.testing.assert_array_equal(x, np.ones((3, 4)))
  np.testing.assert_array_equal(table[:, 0], [0, 16, 8, 0])


def test_what_a_region_closes_over():
  """A dropout key of a scan, and a parameter of nobody's group."""

  def loss(gain, key):
    def body(h, key):
      keep = lambda w, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), half(jnp.tanh)(w, x) * gain, 0)
      return mpjax.scaled_region(keep, jnp.float32(2.0**10))(PARAMS["body"], h), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), X, jax.random.split(key, 3))[0])

  def plain(gain, key):
    h = X
    for k in jax.random.split(key, 3):
      h = jnp.where(jax.random.bernoulli(k, 0.5, h.shape), jnp.tanh(h @ PARAMS["body"]) * gain, 0)
    return jnp.sum(h)

  key = jax.random.key(0)
  np.testing.assert_allclose(jax.grad(loss)(0.9, key), jax.grad(plain)(0.9, key), rtol=0.02)


def test_half_precision_arrays_that_a_region_closes_over():
  def loss(w, factor):
    low = w.astype(jnp.float16)
    region = mpjax.scaled_region(
      lambda p, x: x.astype(jnp.float16) @ low + p.astype(jnp.float16), jnp.float32(8)
    )
    return jnp.mean(region(jnp.zeros(4), X) ** 2) * factor + jnp.sum(low).astype(jnp.float32)

  expected = jax.grad(lambda w: jnp.mean((X @ w) ** 2) + jnp.sum(w))(PARAMS["body"])
  np.testing.assert_allclose(jax.grad(loss)(PARAMS["body"], 1.0), expected, rtol=0.01, atol=2e-3)
  assert np.isnan(jax.grad(loss)(PARAMS["body"], 1e-6)).any()
