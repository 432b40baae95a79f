"""`quantized_state`: moments in 8 bits or bfloat16 round any optax transform."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.optim import Quantized, is_quantized
from mpjax.optim._quantized import FORMATS, dequantize, quantize, scales_of

KEY = jax.random.key(0)
SHAPES = [(), (1,), (3,), (257,), (8, 300), (0, 5), (5, 0), (2, 3, 128), (4, 1000)]


def stored(x, dtype, group=128):
  dtype = FORMATS[dtype]
  return quantize(x, scales_of(x, dtype, group), dtype, KEY)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
  ("dtype", "bound"), [("int8", 1 / 16), ("float8_e4m3fn", 1 / 15.9), ("bfloat16", 2**-7)]
)
def test_errors_are_small_for_any_shape(shape, dtype, bound):
  spread = jnp.exp(2 * jax.random.normal(jax.random.key(1), shape))
  x = jax.random.normal(KEY, shape) * spread
  for values in (x, x * x, -x * x):
    out = stored(values, dtype)
    back = dequantize(out)
    assert out.codes.shape == back.shape == shape
    assert back.dtype == jnp.float32
    largest = float(jnp.max(jnp.abs(values), initial=0))
    error = jnp.abs(back - values) / jnp.maximum(jnp.abs(values), largest * 2e-3)
    assert float(jnp.max(error, initial=0)) <= bound


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
def test_what_is_not_finite_is_in_the_scale(dtype):
  x = jnp.ones((2, 256)).at[0, 3].set(jnp.nan).at[1, 200].set(jnp.inf)
  out = stored(x, dtype)
  assert jnp.isfinite(out.codes.astype(jnp.float32)).all()
  np.testing.assert_array_equal(jnp.isfinite(out.scales), [[False, True], [True, False]])


def test_a_second_moment_is_never_rounded_to_zero():
  for dtype in ("int8", "float8_e4m3fn"):
    x = jnp.asarray([[1.0, 1e-20, 0.0] * 40])
    assert (np.asarray(dequantize(stored(x, dtype)) > 0) == np.asarray(x > 0)).all()


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_state_of_inject_hyperparams_keeps_its_dtypes(dtype):
  tx = mpjax.quantized_state(optax.inject_hyperparams(optax.adamw)(1e-2), dtype, min_size=10)
  params = {"a": {"w": jnp.ones((64, 300), jnp.bfloat16)}, "b": jnp.ones(7)}
  state = tx.init(params)
  described = jax.tree.map(lambda x: (x.shape, x.dtype), state)
  update = jax.jit(tx.update)
  for _ in range(3):
    updates, state = update(params, state, params)
  assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == described
  assert update._cache_size() == 1
  assert jax.tree.leaves(updates)[0].dtype == jnp.float32
  moments = [x for x in jax.tree.leaves(state, is_leaf=is_quantized) if isinstance(x, Quantized)]
  assert [m.codes.shape for m in moments] == [(64, 300)] * 2


def test_small_and_excluded_leaves_are_those_of_the_inner_transform():
  params = {"embed": jnp.ones((64, 128)), "w": jnp.ones((64, 128)), "b": jnp.ones(128)}
  inner = optax.adam(1e-2)
  tx = mpjax.quantized_state(inner, exclude=["embed", "nu"])
  state, plain = tx.init(params), inner.init(params)
  for _ in range(3):
    _, state = tx.update(params, state, params)
    _, plain = inner.update(params, plain, params)
  moments = state.inner_state[0]
  assert is_quantized(moments.mu["w"])
  jax.tree.map(np.testing.assert_array_equal, moments.nu, plain[0].nu)
  for name in ("embed", "b"):
    np.testing.assert_array_equal(moments.mu[name], plain[0].mu[name])


@pytest.mark.parametrize("dtype", FORMATS)
def test_there_and_back(dtype):
  params = {"w": jax.random.normal(KEY, (64, 128)), "b": jnp.ones(128)}
  inner = optax.adam(1e-2)
  _, plain = inner.update(params, inner.init(params), params)
  state = mpjax.quantize_state(plain, params, dtype)
  tx = mpjax.quantized_state(inner, dtype)
  assert jax.tree.structure(state) == jax.tree.structure(tx.init(params))
  back = mpjax.dequantize_state(state)
  assert jax.tree.structure(back) == jax.tree.structure(plain)
  np.testing.assert_allclose(back[0].mu["w"], plain[0].mu["w"], rtol=0.07, atol=1e-4)
  np.testing.assert_array_equal(back[0].mu["b"], plain[0].mu["b"])


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"dtype": "int9"}, "did you mean 'int8'"),
    ({"group": 0}, "group=0"),
    ({"min_size": -1}, "min_size=-1"),
    ({"exclude": "("}, "not a regular expression"),
  ],
)
def test_bad_arguments(arguments, message):
  with pytest.raises(ValueError, match=message):
    mpjax.quantized_state(optax.adam(1), **arguments)
