"""`quantized_state`: moments in 8 bits or bfloat16 round any optax transform, and what is no moment as it is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest

import mpjax
from mpjax.dtypes import STATE_DTYPES
from mpjax.optim import Quantized, dequantize, is_quantized
from mpjax.optim._quantized import quantize, scales_of  # for arrays of any shape and size
from tests.optim._forms import described, normal

F32 = np.float32
SHAPES = [(), (1,), (3,), (257,), (8, 300), (0, 5), (5, 0), (2, 3, 128), (4, 1000)]
BYTES = ("int8", "float8_e4m3fn")


def stored(x, dtype, group=128):
  groups = -(-x.shape[-1] // group) if x.ndim else 1
  scales = None if dtype == "bfloat16" else scales_of(x, groups)
  return quantize(x, scales, STATE_DTYPES[dtype], jax.random.key(0))


@functools.partial(jax.jit, static_argnums=(1, 2))
def there_and_back(arrays, dtype, group=128):
  """Of each array: what is stored, what that stands for, and what is stored of that."""
  each = lambda x: (first := stored(x, dtype, group), back := dequantize(first), stored(back, dtype, group))
  return [each(x) for x in arrays]


@pytest.mark.parametrize(
  ("dtype", "bound"), [("int8", 1 / 16), ("float8_e4m3fn", 1 / 15.9), ("bfloat16", 2**-7)]
)
def test_errors_are_small_for_any_shape_and_storing_twice_is_storing_once(dtype, bound):
  arrays = []
  for i, shape in enumerate(SHAPES):
    x = normal(*shape, seed=i) * np.exp(2 * normal(*shape, seed=20 + i))
    arrays += [x, x * x, -x * x] if i % 2 else [x * F32(10.0 ** (8 * (i - 4))), -abs(x)]
  for group in (128, 100, 1):
    arrays = arrays if group == 128 else [x for x in arrays if x.shape in ((8, 300), (257,))]
    for x, (first, back, again) in zip(arrays, there_and_back(arrays, dtype, group), strict=True):
      back = np.asarray(back)
      assert first.codes.shape == back.shape == x.shape
      assert back.dtype == np.float32
      largest = np.max(np.abs(x), initial=0)
      error = np.abs(np.float64(back) - x) / np.maximum(np.abs(np.float64(x)), largest * 2e-3 + 1e-300)
      assert np.max(error, initial=0) <= bound, (x.shape, group)
      assert (np.sign(back) * np.sign(x) >= 0).all(), (x.shape, group)
      np.testing.assert_array_equal(np.asarray(again.codes), np.asarray(first.codes))
      if dtype != "bfloat16":
        np.testing.assert_array_equal(again.scales, first.scales)
        groups = -(-x.shape[-1] // group) if x.ndim else 1
        assert first.scales.shape == (*x.shape[:-1], groups)
        assert np.max(np.abs(back), initial=0) == largest


@pytest.mark.parametrize("dtype", BYTES)
def test_what_is_not_finite_is_in_the_scale_and_nothing_is_lost_at_the_ends(dtype):
  not_finite = []
  for rows in (2, 64):  # of so many XLA's maximum for a CPU loses a NaN
    x = np.ones((rows, 256), F32)
    x[::2, 3], x[1::2, 200] = np.nan, -np.inf
    not_finite.append(x)
  for first, _, _ in there_and_back(not_finite, dtype):
    assert np.isfinite(F32(first.codes)).all()
    np.testing.assert_array_equal(
      np.isfinite(first.scales), [[False, True], [True, False]] * (len(first.codes) // 2)
    )
  row = np.asarray([[1.0, 0.5, 0.0, 0.25, -1.0]], F32)
  ends = [F32(scale) * x for scale in (2.0**-100, 2.0**-20, 1.0, 2.0**126, 2.0**127) for x in (row, abs(row))]
  for x, (_, back, _) in zip(ends, there_and_back(ends, dtype), strict=True):
    np.testing.assert_array_equal(back, x)
  # A second moment is never rounded to zero.
  moments = np.asarray([[1.0, 1e-20, 0.0] * 40], F32)
  np.testing.assert_array_equal(np.asarray(there_and_back([moments], dtype)[0][1]) > 0, moments > 0)


@pytest.mark.parametrize("dtype", STATE_DTYPES)
def test_any_tree_of_any_dtypes_keeps_the_dtypes_of_its_state(dtype):
  arrays = np.ones((2, 3, 40), jnp.bfloat16), np.ones((64, 300), np.float16), *map(np.ones, SHAPES)
  params = {"list": [(arrays[0],)], "none": None} | {f"{i}": array for i, array in enumerate(arrays)}
  for min_size in (0, 10):
    tx = mpjax.quantized_state(optax.inject_hyperparams(optax.adamw)(1e-2), dtype, min_size=min_size)
    state = jax.eval_shape(tx.init, params)
    updates, after = jax.eval_shape(tx.update, params, state, params)
    assert described(after) == described(state)
    weak = lambda tree: [x.weak_type for x in jax.tree.leaves(tree)]
    assert weak(after) == weak(state)  # no second trace
    assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype("float32")}
    assert jax.tree.map(np.shape, updates) == jax.tree.map(np.shape, params)
    adam = after.inner_state.inner_state[0]
    for moment in (adam.mu, adam.nu):
      for p, m in zip(jax.tree.leaves(params), jax.tree.leaves(moment, is_leaf=is_quantized), strict=True):
        assert isinstance(m, Quantized) == (p.size >= min_size)


SUMS = {"adagrad": optax.adagrad(1e-2), "madgrad": contrib.madgrad(1e-2), "cocob": contrib.cocob()}


def test_sums_without_decay_lose_little_of_what_steps_add():
  sizes, draws = 1e-2 * np.exp(normal(32, 128)), normal(300, 32, 128, seed=1)

  def way(tx):
    def step(carry, draw):
      updates, state = tx.update(sizes * draw, carry[1], carry[0])
      return (optax.apply_updates(carry[0], updates), state), None

    first = jnp.zeros(sizes.shape)
    return jax.lax.scan(step, (first, tx.init(first)), draws)[0][0]

  wraps = (lambda tx: tx, mpjax.quantized_state)
  plain, few = jax.jit(lambda: [[way(wrap(tx)) for tx in SUMS.values()] for wrap in wraps])()
  for name, exact, found in zip(SUMS, plain, few, strict=True):
    assert np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact), name


def test_noise_differs_by_step_so_that_small_steps_add_up():
  tx = mpjax.quantized_state(optax.trace(1.0), "bfloat16", min_size=0)
  # From 1, where numbers are 2^-7 apart, an eighth of that each time.
  draws = np.full(101, 2.0**-10, F32)
  draws[0] = 1
  add = lambda state, draw: (tx.update(jnp.full(512, draw), state)[1], None)
  state = jax.jit(lambda: jax.lax.scan(add, tx.init(jnp.zeros(512)), draws)[0])()
  np.testing.assert_allclose(dequantize(state.inner_state.trace), draws.sum(), atol=16 * 2.0**-7)


def test_bad_arguments():
  for arguments, message in (
    ({"dtype": "int9"}, "did you mean 'int8'"),
    ({"group": 0}, "group=0"),
    ({"min_size": -1}, "min_size=-1"),
    ({"exclude": "("}, "not a regular expression"),
  ):
    with pytest.raises(ValueError, match=message):
      mpjax.quantized_state(optax.adam(1), **arguments)


PARAMS = {"w": normal(64, 64), "b": np.zeros(64, np.float32)}
ADAM = optax.adam(1e-2)
multi = lambda inner: optax.MultiSteps(inner, 2).gradient_transformation()
FREE = contrib.schedule_free_adamw(1e-2)
# One transform inside another, to fields that stay and fields in few bytes; the single ones are in tests/step.
CASES = {
  "masked": (optax.masked(multi(ADAM), {"w": True, "b": False}), {"acc_grads"}, {"mu", "nu"}),
  "both": (multi(FREE), {"acc_grads", "z"}, {"nu"}),
  "hyperparams": (
    optax.inject_hyperparams(lambda lr: contrib.mechanize(optax.adam(lr)))(1.0),
    {"x0"},
    {"mu", "nu"},
  ),
  "a jitted init": (optax.GradientTransformation(jax.jit(FREE.init), FREE.update), {"z"}, {"nu"}),
}


def kept(state):
  """Returns the names of the fields whose leaf `w` is in few bytes, and of those where it is not."""
  found = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_quantized)[0]
  name = lambda key: getattr(key, "name", getattr(key, "key", None))
  of_w = [(name(path[-2]), isinstance(x, Quantized)) for path, x in found if path and name(path[-1]) == "w"]
  return ({field for field, few in of_w if few}, {field for field, few in of_w if not few})


def test_what_is_no_moment_stays_as_it_is():
  for name, (inner, exact, moments) in CASES.items():
    tx = mpjax.quantized_state(inner)
    state = jax.eval_shape(tx.init, PARAMS)
    after = jax.eval_shape(tx.update, PARAMS, state, PARAMS)[1] if "jitted" not in name else state
    for each in (state, after):
      assert kept(each.inner_state) == (moments, exact), name
