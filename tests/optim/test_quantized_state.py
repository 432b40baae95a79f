"""`quantized_state`: moments in 8 bits or bfloat16 round any optax transform."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import checkify

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
  for rows in (2, 64):  # of so many XLA's maximum for a CPU loses a NaN
    x = jnp.ones((rows, 256)).at[::2, 3].set(jnp.nan).at[1::2, 200].set(-jnp.inf)
    out = stored(x, dtype)
    assert jnp.isfinite(out.codes.astype(jnp.float32)).all()
    np.testing.assert_array_equal(jnp.isfinite(out.scales[:2]), [[False, True], [True, False]])
    np.testing.assert_array_equal(jnp.isfinite(out.scales).sum(1), [1] * rows)


@pytest.mark.parametrize("dtype", FORMATS)
def test_under_strict_promotion_and_checks(dtype):
  tx = mpjax.quantized_state(optax.sgd(0.1, momentum=0.9), dtype, min_size=0)
  params = {"w": jnp.ones((8, 300)), "s": jnp.ones(())}
  grads = jax.tree.map(jnp.zeros_like, params)
  with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.debug_nans(True):
    state = tx.init(params)
    update = checkify.checkify(jax.jit(tx.update), errors=checkify.all_checks)
    error, _ = update(grads, state, params)
  error.throw()


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**-20, 1.0, 2.0**126, 2.0**127])
def test_the_largest_scales_lose_no_entry(dtype, scale):
  x = scale * jnp.asarray([[1.0, 0.5, 0.0, 0.25, -1.0]])
  np.testing.assert_array_equal(dequantize(stored(x, dtype)) / scale, x / scale)
  np.testing.assert_array_equal(dequantize(stored(jnp.abs(x), dtype)) / scale, jnp.abs(x) / scale)


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


SIZES = st.one_of(st.integers(0, 9), st.sampled_from([127, 128, 129, 255, 300, 1000]))
# Lists of sizes, sometimes one large dimension.
ANY_SHAPE = st.one_of(st.lists(SIZES, max_size=3).map(tuple), st.just((1_000_000,)), st.just((2, 70_001)))


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
  shape=ANY_SHAPE,
  dtype=st.sampled_from(list(FORMATS)),
  group=st.sampled_from([1, 32, 100, 128]),
  exponent=st.integers(-30, 30),
  sign=st.sampled_from(["any", "positive", "negative"]),
)
def test_storing_twice_is_storing_once(shape, dtype, group, exponent, sign):
  """Whatever the shape: the largest of a group is exact, codes are finite, and stored again they stay."""
  x = jax.random.normal(KEY, shape) * 10.0**exponent
  x = {"any": x, "positive": jnp.abs(x), "negative": -jnp.abs(x)}[sign]

  @jax.jit
  def twice(x):
    first = stored(x, dtype, group)
    back = dequantize(first)
    return first, back, stored(back, dtype, group)

  first, back, again = twice(x)
  assert first.codes.shape == back.shape == shape
  assert jnp.isfinite(back).all()
  assert (jnp.sign(back) * jnp.sign(x) >= 0).all()
  np.testing.assert_array_equal(again.codes, first.codes)
  if dtype == "bfloat16":
    return
  np.testing.assert_array_equal(again.scales, first.scales)
  groups = -(-shape[-1] // group) if shape else 1
  assert first.scales.shape == ((*shape[:-1], groups) if shape else (1,))
  if x.size:
    assert float(jnp.max(jnp.abs(back))) == float(jnp.max(jnp.abs(x)))


LEAVES = st.tuples(
  st.lists(st.integers(0, 40), max_size=3).map(tuple), st.sampled_from(["float32", "bfloat16", "float16"])
)
TREES = st.recursive(
  LEAVES,
  lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner),
  max_leaves=5,
)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(tree=TREES, dtype=st.sampled_from(list(FORMATS)), min_size=st.sampled_from([0, 100]))
def test_any_tree_of_any_dtypes(tree, dtype, min_size):
  is_leaf = lambda x: isinstance(x, tuple)
  params = jax.tree.map(lambda leaf: jnp.ones(leaf[0], leaf[1]), tree, is_leaf=is_leaf)
  tx = mpjax.quantized_state(optax.adamw(1e-2), dtype, min_size=min_size)
  state = tx.init(params)
  updates, after = jax.jit(tx.update)(params, state, params)
  describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
  assert describe(after) == describe(state)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, params)
  moments = after.inner_state[0]
  for moment in (moments.mu, moments.nu):
    for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(moment, is_leaf=is_quantized), strict=True):
      assert isinstance(m, Quantized) == (p.size >= min_size)
  plain = optax.adamw(1e-2)
  wide = jax.tree.map(lambda p: p.astype(jnp.float32), params)
  expected, _ = plain.update(wide, plain.init(wide), wide)
  for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("dtype", FORMATS)
def test_the_second_moment_follows_large_and_tiny_gradients(dtype):
  decay, shape, steps = 0.95, (16, 128), 400
  spread = jnp.exp(jax.random.normal(KEY, shape))
  sizes = {"large": 1e-2 * spread, "tiny": 1e-7 * spread}
  tx = mpjax.quantized_state(optax.scale_by_adam(b2=decay), dtype, min_size=0)

  def step(carry, i):
    state, exact = carry
    draw = jax.random.normal(jax.random.fold_in(KEY, i), shape) * jnp.where(i < steps, 1.0, 0.1)
    grads = jax.tree.map(lambda size: size * draw, sizes)
    _, state = tx.update(grads, state)
    return (state, jax.tree.map(lambda v, g: decay * v + (1 - decay) * g * g, exact, grads)), None

  first = (tx.init(sizes), jax.tree.map(jnp.zeros_like, sizes))
  half = jax.jit(lambda carry, start: jax.lax.scan(step, carry, start + jnp.arange(steps))[0])
  carry = first
  for start in (0, steps):
    carry = state, exact = half(carry, start)
    stored_moments = mpjax.dequantize_state(state).nu
    for name in sizes:
      ratio = np.asarray(stored_moments[name], np.float64) / np.asarray(exact[name], np.float64)
      assert abs(np.median(ratio) - 1) < 0.05
      assert 0.7 < np.quantile(ratio, 0.01) < np.quantile(ratio, 0.99) < 1.35


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
