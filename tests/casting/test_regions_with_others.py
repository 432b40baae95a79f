"""Regions of `half_precision` beside others: shared values, jitted functions, modules, inner autocasts, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.casting._conformance import leaf_failures
from tests.casting._jaxprs import jit, run_together
from tests.casting._kernel import ORDERS, W, X

half = mpjax.half_precision


def same_gradients(f, policy, *args):
  """Compares gradients under autocast, in any order, with those in float32."""
  casts = {how: order(f, policy) for how, order in ORDERS.items()}
  results, _ = run_together({"plain": jax.grad(f), **casts}, *args)
  for how in casts:
    assert [*leaf_failures("gradient", results[how], results["plain"], 0.04)] == [], how


def noted(seen, name):
  """A region that notes the dtype that it runs in."""
  return half(lambda x: seen.update({name: str(x.dtype)}) or jnp.sin(x))


def test_one_value_in_two_regions():
  region = half(lambda x: jnp.sin(x))
  for f in (
    lambda x: jnp.sum(region(x) * region(x)),
    lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + region(x) * region(y), x).sum(),
    lambda x: jnp.sum(region(x) @ x),
  ):
    same_gradients(f, "bf16", W["q"])


def test_arguments_and_masks_outside_float16s_range():
  mix = half(lambda x, bias: jax.nn.softmax(x + bias, axis=-1))
  f = mpjax.autocast(lambda x, mask: mix(x * 1e5, jnp.where(mask, 0.0, -1e9)), "fp16")
  identity = mpjax.autocast(half(lambda x: x), "fp16")
  mask = np.arange(X.shape[0])[:, None] > np.zeros(X.shape)  # but for the first row
  wide = np.float32([1e5, -1e9, np.inf])
  mixed, out = jit(lambda x, mask, wide: (f(x, mask), identity(wide)))(X, mask, wide)
  assert np.isfinite(mixed).all()
  np.testing.assert_array_equal(out, np.float32([65504, -65504, np.inf]))


def test_what_is_no_float32_array_is_left_alone():
  seen, config = {}, type("Config", (), {"dtype": "float32"})()

  @half
  def region(x, *, dtype, scale, config):
    seen.update(scale=type(scale), config=config)
    return (x * scale).astype(dtype)

  f = lambda x: region(x, dtype=jnp.float32, scale=np.float32(2), config=config)
  assert jax.eval_shape(mpjax.autocast(f, "bf16"), X).dtype == jnp.float32
  assert seen == {"scale": np.float32, "config": config}
  with pytest.raises(TypeError, match="expected a function"):
    half(3)


def test_half_precision_of_the_users_own_stays():
  seen = []

  @half
  def step(cache, x):
    seen.append((str(cache.dtype), str(x.dtype)))
    return cache.at[0].set(x.astype(cache.dtype)), x * 2

  loop = lambda cache, xs: jax.lax.scan(step, cache, xs)
  jax.eval_shape(mpjax.autocast(loop, "bf16"), np.zeros((2, 8), jnp.bfloat16), X)
  assert seen[-1] == ("bfloat16", "bfloat16")


def test_statistics_and_paths_of_an_nnx_module():
  class Counted(nnx.Module):
    def __init__(self):
      self.count, self.w = nnx.BatchStat(jnp.float32(1000.5)), nnx.Param(W["q"])

    def __call__(self, x):
      self.count[...] += 1
      return x @ self.w[...]

  class Top(nnx.Module):
    def __init__(self):
      self.inner = Counted()

    def __call__(self, x):
      return half(self.inner)(x)

  top, call = Top(), lambda top, x: top(x)
  mpjax.autocast(call, "bf16")(top, X)
  assert top.inner.count[...] == 1001.5
  with pytest.raises(ValueError, match="'Top/inner' runs in bfloat16, and its module in float32"):
    mpjax.autocast(call, {"base": "bf16", "overrides": {"Top/inner": "fp32"}})(top, X)


def test_numerics_finds_no_fault_in_a_product_inside():
  loss = lambda w, x: jnp.mean((half(lambda x, k: jnp.tanh(x @ k) @ k)(x, w["q"]) @ w["o"]) ** 2)
  report = mpjax.inspect_numerics(loss, W, X, policy="bf16")
  assert all(tensor.error is None or tensor.error < 0.05 for tensor in report.tensors)


def test_a_loop_whose_product_is_in_a_region_carries_half_precision():
  f = lambda x, ws: jax.lax.scan(lambda x, w: (half(jnp.matmul)(x, w), None), x, ws)[0]
  [carry] = mpjax.explain(f, X, np.stack([W["q"]] * 3), policy="bf16").carries
  assert carry.dtype == "bfloat16"
