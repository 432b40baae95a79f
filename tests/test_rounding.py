"""Rounding in programs as XLA optimises them for a user: casts, the skip.

XLA may keep more precision than a program asks for, merge casts and reorder products with a scale; most of the
suite compiles without such passes, since it asks what a program says.
"""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpjax

pytestmark = pytest.mark.optimised

# Halfway between two numbers of the format, or a quarter of the way: what a cast that was left out would keep.
TIES = {
  "bfloat16": np.float32([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, -3.14159, 1e-20]),
  "float16": np.float32([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-12, -3.14159, 2.0**-24 * 1.4]),
}
half = pytest.mark.parametrize(("policy", "dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])


def through(x, dtype):
  """Returns float32 values rounded to `dtype`, by ml_dtypes and NumPy."""
  return x.astype(np.dtype(getattr(ml_dtypes, dtype, dtype))).astype(np.float32)


@half
def test_a_round_trip_through_half_precision_rounds(policy, dtype):
  policy = mpjax.get_policy(policy)
  round_trip = jax.jit(lambda x: policy.cast_to_param(policy.cast_to_compute(x) * 1))
  np.testing.assert_array_equal(round_trip(TIES[dtype]), through(TIES[dtype], dtype))


@half
def test_both_operands_of_a_product_are_rounded(policy, dtype):
  x = np.diag(TIES[dtype])
  product = jax.jit(mpjax.autocast(lambda x, w: (x @ w).astype(jnp.float32), policy=policy))
  one = np.eye(len(x), dtype=np.float32)
  np.testing.assert_array_equal(product(x, one), through(x, dtype))
  np.testing.assert_array_equal(product(one, x), through(x, dtype))


@half
def test_gradients_of_both_operands_are_those_of_rounded_values(policy, dtype):
  x, w = np.diag(TIES[dtype]), np.diag(TIES[dtype][::-1])
  loss = mpjax.autocast(lambda x, w: (x @ w).astype(jnp.float32).sum(), policy=policy)
  dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
  ones = np.ones_like(x)
  np.testing.assert_array_equal(dx, ones @ through(w, dtype).T)
  np.testing.assert_array_equal(dw, through(x, dtype).T @ ones)


@half
def test_a_value_between_two_products_is_rounded_once(policy, dtype):
  """The first product has two terms, so that its sum lies between two numbers of the format."""
  x = np.float32([[1, 2**-8 if dtype == "bfloat16" else 2**-11]])
  ones = jnp.ones((2, 2))
  twice = jax.jit(mpjax.autocast(lambda x: (x @ ones) @ ones, policy=policy))
  np.testing.assert_array_equal(np.float32(twice(x)), [[2, 2]])


def train(loss_scaling, xs):
  """Returns the states of an Adam of one weight before and after each batch."""
  tx = optax.adam(0.1)
  policy = {"base": "fp32", "loss_scaling": loss_scaling}
  step = mpjax.make_train_step(lambda p, b: ((p["w"] * b) ** 2).mean(), tx, policy)
  states = [step.init({"w": jnp.float32(np.linspace(-1, 1, 1000))})]
  for x in xs:
    states.append(step(jax.tree.map(jnp.copy, states[-1]), np.float32(x))[0])  # a step takes its state
  return jax.device_get(states)


def adam_of(state):
  """Returns the parameters and Adam's count and moments."""
  find = optax.tree_utils.tree_get
  return [state.params["w"], *(find(state.opt_state, name)["w"] for name in ("mu", "nu"))]


def test_a_skipped_step_leaves_parameters_and_moments_bit_for_bit():
  states = train("dynamic", [1.5, np.inf, 0.3])
  before, after = adam_of(states[1]), adam_of(states[2])
  for old, new in zip(before, after, strict=True):
    np.testing.assert_array_equal(old.view(np.int32), new.view(np.int32))
  count = optax.tree_utils.tree_get_all_with_path(states[2].opt_state, "count")
  assert {int(value) for _, value in count} == {1}
  # What follows is what would have followed without it, but for the scale, which is a power of two.
  np.testing.assert_array_equal(adam_of(states[3])[0], adam_of(train("dynamic", [1.5, 0.3])[2])[0])
