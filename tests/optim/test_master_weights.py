"""`master_weights`: bfloat16 parameters with what a float32 one has besides; and `stochastic_round` for those without."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.optim import join, split_like
from tests.optim._forms import normal, same_bits

F32 = np.float32


def start(masters, tx, correction):
  """bfloat16 parameters of these master weights, and the state of `tx` for them."""
  params, corrections = split_like(masters, mpjax.cast_floating(masters, jnp.bfloat16), correction)
  return params, tx.init(params)._replace(correction=corrections)


def halved(masters, correction):
  """Parameters of these master weights, and the master weights that they give back."""
  tx = mpjax.master_weights(optax.identity(), correction)
  params, state = jax.jit(lambda masters: start(masters, tx, correction))(masters)
  return np.asarray(params), np.asarray(jax.jit(join)(params, state.correction))


def test_every_low_half_and_exponent_comes_back():
  low = np.arange(2**16, dtype=np.uint32)
  high = np.arange(2**16, dtype=np.uint32) << 16
  bits = np.concatenate(
    [low | 0x3F800000, low | 0x80010000, low | 0x7F7F0000, high, high | 0x8000, high | 0x7FFF]
  )
  bits = bits[(bits & 0x7FFFFFFF) <= 0x7F800000]
  param, back = halved(bits.view(F32), "int16")
  np.testing.assert_array_equal(back.view(np.uint32), bits)
  nearest = bits.view(F32).astype(jnp.bfloat16)
  ties = (bits & 0xFFFF) == 0x8000
  np.testing.assert_array_equal(param[~ties].view(np.uint16), nearest[~ties].view(np.uint16))


def test_nan_stays_nan_and_eight_bits_make_24():
  bits = np.array([0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
  for correction in ("int16", "int8", "float32"):
    param, back = halved(bits.view(F32), correction)
    assert np.isnan(F32(param)).all(), correction
    assert np.isnan(back).all(), correction
  master = normal(2**16)
  assert np.max(np.abs(halved(master, "int8")[1] / master - 1)) <= 2**-16
  top = np.finfo(F32).max
  assert np.isfinite(halved(np.asarray([top, -top]), "int8")[1]).all()


@pytest.mark.parametrize("correction", ["int16", "float32"])
@pytest.mark.parametrize("apply", [optax.apply_updates, mpjax.apply_updates])
def test_parameters_are_those_of_float32_masters(correction, apply):
  inner = optax.adamw(1e-2, weight_decay=0.1)
  tx = mpjax.master_weights(inner, correction)
  masters = {"w": normal(128, 128), "scale": np.ones(3, F32)}
  reference_state = inner.init(masters)
  params, state = start(masters, tx, correction)

  @jax.jit
  def step(params, state, masters, reference_state, noise):
    grads = jax.tree.map(lambda p, n: n + p.astype(jnp.float32), params, noise)
    updates, state = tx.update(grads, state, params)
    theirs, reference_state = inner.update(grads, reference_state, masters)
    return apply(params, updates), state, optax.apply_updates(masters, theirs), reference_state

  for i in range(20):
    noise = {"w": normal(128, 128, seed=i), "scale": normal(3, seed=i)}
    params, state, masters, reference_state = step(params, state, masters, reference_state, noise)
  assert params["w"].dtype == jnp.bfloat16
  found = (join(params, state.correction), state.inner_state)
  jax.tree.map(np.testing.assert_array_equal, found, (masters, reference_state))


def decayed(correction, seed=0, steps=1000):
  """Master weights, of both signs and several binades, whose only updates are weight decay of 1e-5."""
  tx = mpjax.master_weights(
    optax.chain(optax.add_decayed_weights(0.1), optax.sgd(1e-4)), correction, seed=seed
  )
  params = {"w": np.tile(np.asarray([[0.73], [-1.3], [2.0], [-0.11]], jnp.bfloat16), (1, 2048))}
  grads = jax.tree.map(lambda p: np.zeros(p.shape, F32), params)

  def step(carry, _):
    params, state = carry
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state), None

  run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, steps)[0])
  return params["w"].astype(F32), *run((params, tx.init(params)))


@pytest.mark.parametrize(("correction", "deviation"), [("int8", 1e-5), ("stochastic", 2e-4)])
def test_updates_that_the_format_does_not_hold_are_kept_on_average(correction, deviation):
  first, params, state = decayed(correction)
  masters = np.asarray(
    params["w"] if correction == "stochastic" else join(params, state.correction)["w"], F32
  )
  want = first.astype(np.float64) * (1 - 1e-5) ** 1000
  bound = 3 * deviation * np.abs(first[:, 0])  # of the mean of a row; all that decays is 1e-2
  assert (np.abs(masters.mean(1) - want[:, 0]) < bound).all()
  assert deviation < np.std(masters[0] / want[0]) < 200 * deviation  # not all at once
  same_bits(decayed(correction)[1:], (params, state))
  again = decayed(correction, seed=1)[1:]
  assert any((a != b).any() for a, b in zip(*map(jax.tree.leaves, (again, (params, state))), strict=True))


def test_bad_arguments():
  with pytest.raises(ValueError, match="did you mean 'int16'"):
    mpjax.master_weights(optax.sgd(1), "int15")
  tx = mpjax.master_weights(optax.sgd(1))
  with pytest.raises(ValueError, match="parameter 'w' is float16"):
    tx.init({"w": np.ones(3, np.float16)})
  params = {"w": np.ones(3, jnp.bfloat16)}
  with pytest.raises(ValueError, match="without params"):
    tx.update(params, tx.init(params))


TARGETS = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
DRAWS = 100_000


@functools.partial(jax.jit, static_argnums=1)
def compiled(x, dtype, seed):
  return mpjax.stochastic_round(x, jax.random.key(seed), dtype)


def rounded(x, dtype, seed=0):
  return np.asarray(compiled(F32(x), dtype, seed))


@pytest.mark.parametrize("dtype", TARGETS)
def test_the_mean_of_many_draws_is_the_value(dtype):
  info = jnp.finfo(dtype)
  bound = 3e-5 * 2.0 ** (7 - info.nmant)  # a step of bfloat16 has 7 bits
  for value in (1.001, -0.3, 3.14159, 200.7, 0.0331):
    found = F32(rounded(np.full(DRAWS, value), dtype))
    assert len(np.unique(found)) == 2
    assert abs(found.mean(dtype=np.float64) / value - 1) <= bound, value
  step = float(info.smallest_subnormal)
  for whole, part in ((0, 0.25), (1, 0.5), (3, 0.75)):
    found = rounded(np.full(DRAWS, (whole + part) * step), dtype)
    bits = found.view(np.uint8 if found.dtype.itemsize == 1 else np.uint16)
    assert set(np.unique(bits)) == {whole, whole + 1}  # subnormal numbers are counted by their bits
    assert abs(bits.mean() - whole - part) < 0.01


@pytest.mark.parametrize("dtype", TARGETS)
def test_what_the_format_has_stays_and_what_is_too_large_becomes_its_largest(dtype):
  bits = np.arange(2**8, dtype=np.uint8) if "8_" in dtype else np.arange(2**16, dtype=np.uint16)
  exact = bits.view(jnp.dtype(dtype))
  found, nan = rounded(exact, dtype), np.isnan(F32(exact))
  np.testing.assert_array_equal(found.view(bits.dtype)[~nan], bits[~nan])  # with infinities and signs of zero
  assert np.isnan(F32(found[nan])).all()
  largest = float(jnp.finfo(dtype).max)
  beyond = min(largest * 1.01, float(np.finfo(F32).max))
  found = F32(rounded([np.inf, -np.inf, np.nan, beyond, -beyond], dtype))
  infinite = np.isnan if dtype == "float8_e4m3fn" else np.isinf  # which has no infinities
  assert infinite(found[:2]).all()
  assert np.isnan(found[2])
  np.testing.assert_array_equal(found[3:], [largest, -largest])
  for seed in range(20):  # no draw carries the largest float32 to infinity
    assert (F32(rounded(np.full(1000, beyond), dtype, seed)) == largest).all()


def test_bfloat16_is_made_and_what_cannot_be_is_named():
  x = np.ones((2, 3), F32)
  assert jax.eval_shape(lambda x: mpjax.stochastic_round(x, jax.random.key(0)), x).dtype == "bfloat16"
  with pytest.raises(ValueError, match="dtype='float32'"):
    mpjax.stochastic_round(x, jax.random.key(0), jnp.float32)
  with pytest.raises(TypeError, match="x is int32"):
    mpjax.stochastic_round(np.ones(3, np.int32), jax.random.key(0))
