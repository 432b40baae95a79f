"""`master_weights`: bfloat16 parameters with what a float32 master weight has besides."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.optim._master_weights import join, split

KEY = jax.random.key(0)
BFLOAT16 = np.dtype(jnp.bfloat16)


def test_every_low_half_and_exponent_comes_back():
  low = np.arange(2**16, dtype=np.uint32)
  high = np.arange(2**16, dtype=np.uint32) << 16
  bits = np.concatenate(
    [low | 0x3F800000, low | 0x80010000, low | 0x7F7F0000, high, high | 0x8000, high | 0x7FFF]
  )
  bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
  master = bits.view(np.float32)
  param, correction = split(jnp.asarray(master), "int16", BFLOAT16, KEY)
  back = np.asarray(join(param, correction)).view(np.uint32)
  np.testing.assert_array_equal(back, bits)
  nearest = master.astype(BFLOAT16)
  ties = (bits & 0xFFFF) == 0x8000
  np.testing.assert_array_equal(np.asarray(param)[~ties].view(np.uint16), nearest[~ties].view(np.uint16))


def test_nan_stays_nan():
  bits = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
  for correction in ("int16", "int8", "float32"):
    param, extra = split(jnp.asarray(bits.view(np.float32)), correction, BFLOAT16, KEY)
    assert jnp.isnan(param).all()
    assert jnp.isnan(join(param, extra)).all()


def test_eight_bits_make_24():
  master = jax.random.normal(KEY, (2**16,))
  back = join(*split(master, "int8", BFLOAT16, KEY))
  assert float(jnp.max(jnp.abs(back / master - 1))) <= 2**-16
  largest = jnp.asarray([np.finfo(np.float32).max, -np.finfo(np.float32).max])
  assert jnp.isfinite(join(*split(largest, "int8", BFLOAT16, KEY))).all()


@pytest.mark.parametrize("correction", ["int16", "float32"])
@pytest.mark.parametrize("apply", [optax.apply_updates, mpjax.apply_updates])
def test_parameters_are_those_of_float32_masters(correction, apply):
  inner = optax.adamw(1e-2, weight_decay=0.1)
  tx = mpjax.master_weights(inner, correction)
  masters = {"w": jax.random.normal(KEY, (128, 128)), "scale": jnp.ones(3)}
  reference_state = inner.init(masters)
  params, state = mpjax.split_master_weights(masters, inner.init(masters), correction)

  @jax.jit
  def step(params, state, masters, reference_state, key):
    grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape) + p.astype(jnp.float32), params)
    updates, state = tx.update(grads, state, params)
    theirs, reference_state = inner.update(grads, reference_state, masters)
    return apply(params, updates), state, optax.apply_updates(masters, theirs), reference_state

  for i in range(20):
    params, state, masters, reference_state = step(
      params, state, masters, reference_state, jax.random.fold_in(KEY, i)
    )
  assert params["w"].dtype == jnp.bfloat16
  merged, inner_state = mpjax.merge_master_weights(params, state)
  jax.tree.map(np.testing.assert_array_equal, (merged, inner_state), (masters, reference_state))


def test_small_updates_are_not_lost():
  for correction, steps in (("int16", 1024), ("int8", 1024), ("stochastic", 1024)):
    tx = mpjax.master_weights(optax.sgd(1.0), correction)
    params = {"w": jnp.ones((64,), jnp.bfloat16)}
    grads = {"w": jnp.full((64,), -(2.0**-10))}

    def step(carry, _, tx=tx, grads=grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), None, steps)
    assert abs(float(params["w"].astype(jnp.float32).mean()) - 2) < 0.02, correction


def test_bad_arguments():
  with pytest.raises(ValueError, match="did you mean 'int16'"):
    mpjax.master_weights(optax.sgd(1), "int15")
  tx = mpjax.master_weights(optax.sgd(1))
  with pytest.raises(ValueError, match="parameter 'w' is float16"):
    tx.init({"w": jnp.ones(3, jnp.float16)})
  params = {"w": jnp.ones(3, jnp.bfloat16)}
  with pytest.raises(ValueError, match="without params"):
    tx.update(params, tx.init(params))
