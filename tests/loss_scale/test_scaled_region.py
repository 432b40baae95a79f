"""`scaled_region`: one loss, and a loss scale for each group of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

RNG = np.random.default_rng(0)
PARAMS = {name: np.float32(RNG.normal(size=(4, 4))) for name in ("body", "head")}
X = np.float32(RNG.normal(size=(8, 4)))
half = lambda f: lambda w, x: f(x.astype(jnp.float16) @ w.astype(jnp.float16))
BODY, HEAD = half(jnp.tanh), half(lambda v: v * jnp.float16(2.0**-12))
SCALED = lambda scale: mpjax.dynamic_loss_scale(optax.sgd(1.0), init_scale=scale, min_scale=2.0**-8)
GROUPS = {name: name for name in PARAMS}


def scale_of(state, group):
  return mpjax.get_loss_scale(state, path=f"'{group}'").scale


def plain_loss(params, dtype):
  h = jnp.tanh(X.astype(dtype) @ params["body"].astype(dtype))
  h = (h @ params["head"].astype(dtype)) * jnp.asarray(2.0**-12, dtype)
  return jnp.mean(h.astype(jnp.float32) ** 2)


def step(scales, params, loss, head):
  """The updates and the state of a step of `loss(output)` with a scale for each group."""
  tx = optax.partition({name: SCALED(scale) for name, scale in scales.items()}, GROUPS)

  @jax.jit
  def run(params):
    state = tx.init(params)

    def of(params):
      h = mpjax.loss_scale.scaled_region(BODY, scale_of(state, "body"))(params["body"], X)
      return loss(mpjax.loss_scale.scaled_region(head, scale_of(state, "head"))(params["head"], h))

    return tx.update(jax.grad(of)(params), state, params)

  return run(params)


def test_each_group_has_its_own_scale_and_the_update_is_that_of_the_loss():
  updates, _ = step({"body": 2.0**20, "head": 2.0**14}, PARAMS, lambda out: jnp.mean(out**2), HEAD)
  both = jax.jit(lambda params: [jax.grad(plain_loss)(params, dtype) for dtype in (jnp.float32, jnp.float16)])
  expected, without = both(PARAMS)
  for name, of_name in expected.items():
    atol = 1e-3 * np.abs(of_name).max()
    np.testing.assert_allclose(-updates[name], of_name, rtol=0.05, atol=atol)
  assert not np.asarray(without["body"]).any()  # all of it underflows


def test_a_group_that_overflows_backs_off_alone():
  big = {**PARAMS, "body": PARAMS["body"] * 2}
  updates, state = step({"body": 2.0**20, "head": 1.0}, big, jnp.sum, half(lambda v: v))
  assert not np.asarray(updates["body"]).any()
  assert np.asarray(updates["head"]).any()
  assert (float(scale_of(state, "body")), float(scale_of(state, "head"))) == (2.0**19, 1.0)


def test_inputs_are_integers_or_at_least_float32():
  with pytest.raises(ValueError, match=r"float16.*float32"):
    mpjax.loss_scale.scaled_region(BODY, np.float32(8))(PARAMS["body"], X.astype(jnp.float16))
  embed = lambda table, tokens, x: (table[tokens] + x).astype(jnp.float16)
  tokens = np.asarray([1, 2, 1])
  of = lambda table, x: mpjax.loss_scale.scaled_region(embed, jnp.float32(8))(table, tokens, x).sum()
  table, x = jax.jit(jax.grad(of, argnums=(0, 1)))(PARAMS["body"], np.ones((3, 4), np.float32))
  np.testing.assert_array_equal(x, np.ones((3, 4)))
  np.testing.assert_array_equal(table[:, 0], [0, 16, 8, 0])


def test_what_a_region_closes_over():
  """A dropout key of a scan, and a parameter of nobody's group."""

  def loss(gain, keys, product, wrap):
    def body(h, key):
      keep = lambda w, x: jnp.where(jax.random.bernoulli(key, 0.5, x.shape), product(w, x) * gain, 0)
      return wrap(keep)(PARAMS["body"], h), None

    return jnp.sum(jax.lax.scan(jax.checkpoint(body), X, keys)[0])

  forms = (
    (half(jnp.tanh), lambda fun: mpjax.loss_scale.scaled_region(fun, jnp.float32(2.0**10))),
    (lambda w, x: jnp.tanh(x @ w), lambda fun: fun),
  )
  both = jax.jit(lambda gain, keys: [jax.grad(loss)(gain, keys, *form) for form in forms])
  np.testing.assert_allclose(*both(np.float32(0.9), jax.random.split(jax.random.key(0), 3)), rtol=0.02)


def test_half_precision_arrays_that_a_region_closes_over():
  def loss(w, factor):
    low = w.astype(jnp.float16)
    product = lambda p, x: x.astype(jnp.float16) @ low + p.astype(jnp.float16)
    out = mpjax.loss_scale.scaled_region(product, jnp.float32(8))(jnp.zeros(4), X)
    return jnp.mean(out**2) * factor + jnp.sum(low).astype(jnp.float32)

  run = jax.jit(jax.grad(loss))
  w = np.float64(PARAMS["body"])
  expected = np.float64(X).T @ (2 * (X @ w) / X.size) + 1
  np.testing.assert_allclose(run(PARAMS["body"], 1.0), expected, rtol=0.01, atol=2e-3)
  assert np.isnan(run(PARAMS["body"], 1e-6)).any()
