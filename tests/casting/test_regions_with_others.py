"""Regions of `half_precision` beside others: shared values, jitted functions, modules, inner autocasts, masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import mpjax
from tests.casting._kernel import ORDERS, W, X, near


@pytest.mark.parametrize("order", ORDERS)
def test_one_value_in_two_regions(order):
  region = mpjax.half_precision(lambda x: jnp.sin(x))
  programs = {
    "twice": lambda x: jnp.sum(region(x) * region(x)),
    "in a loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y + region(x) * region(y), x).sum(),
    "beside a product": lambda x: jnp.sum(region(x) @ x),
  }
  for f in programs.values():
    near(ORDERS[order](f, "bf16")(W["q"]), jax.grad(f)(W["q"]))


def test_modules_of_one_jitted_function_that_differ_run_in_the_wider_dtype():
  region = jax.jit(mpjax.half_precision(lambda x: jnp.sin(x)))

  def f(w, x):
    for name in "ab":
      with jax.named_scope(name):
        x = region(x @ w["q"])
    return jnp.sum(x @ w["o"])

  policy = {"base": "bf16", "overrides": {"a": "fp32"}}
  for order in ("grad of autocast", "autocast of grad"):
    near(ORDERS[order](f, policy)(W, X), jax.grad(f)(W, X))


def test_regions_inside_regions_follow_the_outer_ones_module():
  seen = {}

  def noted(name):
    @mpjax.half_precision
    def region(x):
      seen[name] = str(x.dtype)
      return jnp.sin(x)

    return region

  def f(x):
    for name in "abc":
      with jax.named_scope(name):
        inner = noted(name)
        x = mpjax.half_precision(lambda x, inner=inner: inner(x) * 2)(x)
    return x

  mpjax.autocast(f, {"base": "bf16", "overrides": {"(a|c)": "fp32"}})(X)
  assert seen == {"a": "float32", "b": "bfloat16", "c": "float32"}


def test_an_autocast_inside_has_regions_of_its_own():
  seen = {}

  def noted(name):
    return mpjax.half_precision(lambda x: seen.update({name: str(x.dtype)}) or jnp.sin(x))

  def within(x):
    with jax.named_scope("k"):
      return noted("inner")(x)

  inner = mpjax.autocast(within, {"base": "fp16", "overrides": {"k": "bf16"}})

  def f(x):
    with jax.named_scope("a"):
      x = inner(x)
    with jax.named_scope("m"):
      return noted("outer")(x)

  mpjax.autocast(f, {"base": "fp16", "overrides": {"a": "fp32"}})(X)
  assert seen == {"inner": "bfloat16", "outer": "float16"}


def test_arguments_and_masks_outside_float16s_range():
  mix = mpjax.half_precision(lambda x, bias: jax.nn.softmax(x + bias, axis=-1))

  def f(x, mask):
    return mix(x * 1e5, jnp.where(mask, 0.0, -1e9))

  mask = jnp.ones(X.shape, bool).at[0].set(False)
  assert np.isfinite(mpjax.autocast(f, "fp16")(X, mask)).all()
  out = mpjax.autocast(mpjax.half_precision(lambda x: x), "fp16")(jnp.float32([1e5, -1e9, jnp.inf]))
  np.testing.assert_array_equal(out, np.float32([65504, -65504, np.inf]))


def test_what_is_no_float32_array_is_left_alone():
  seen = {}

  @mpjax.half_precision
  def region(x, *, dtype, scale, config):
    seen.update(scale=type(scale), config=config)
    return (x * scale).astype(dtype)

  class Config:
    dtype = "float32"

  config = Config()
  out = mpjax.autocast(lambda x: region(x, dtype=jnp.float32, scale=np.float32(2), config=config), "bf16")(X)
  assert seen == {"scale": np.float32, "config": config}
  assert out.dtype == jnp.float32
  with pytest.raises(TypeError, match="expected a function"):
    mpjax.half_precision(3)


def test_half_precision_of_the_users_own_stays():
  seen = []

  @mpjax.half_precision
  def step(cache, x):
    seen.append((str(cache.dtype), str(x.dtype)))
    return cache.at[0].set(x.astype(cache.dtype)), x * 2

  def f(cache, xs):
    return jax.lax.scan(step, cache, xs)

  mpjax.autocast(f, "bf16")(jnp.zeros((2, 8), jnp.bfloat16), X)
  assert seen[-1] == ("bfloat16", "bfloat16")


def test_statistics_and_paths_of_an_nnx_module():
  class Counted(nnx.Module):
    def __init__(self):
      self.count = nnx.BatchStat(jnp.float32(1000.5))
      self.w = nnx.Param(W["q"])

    def __call__(self, x):
      self.count[...] += 1
      return x @ self.w[...]

  class Top(nnx.Module):
    def __init__(self):
      self.inner = Counted()

    def __call__(self, x):
      return mpjax.half_precision(self.inner)(x)

  top = Top()
  mpjax.autocast(lambda top, x: top(x), "bf16")(top, X)
  assert top.inner.count[...] == 1001.5
  exact = mpjax.autocast(lambda top, x: top(x), {"base": "bf16", "overrides": {"Top/inner": "fp32"}})(top, X)
  np.testing.assert_array_equal(exact, X @ W["q"])


@pytest.mark.slow
def test_numerics_finds_no_fault_in_a_product_inside():
  def loss(w, x):
    return jnp.mean((mpjax.half_precision(lambda x, k: jnp.tanh(x @ k) @ k)(x, w["q"]) @ w["o"]) ** 2)

  report = mpjax.inspect_numerics(loss, W, X, "bf16")
  assert all(tensor.error is None or tensor.error < 0.05 for tensor in report.tensors)


def test_a_loop_whose_product_is_in_a_region_carries_half_precision():
  def f(x, ws):
    return jax.lax.scan(lambda x, w: (mpjax.half_precision(jnp.matmul)(x, w), None), x, ws)[0]

  [carry] = mpjax.explain(f, "bf16")(X, jnp.stack([W["q"]] * 3)).carries
  assert carry.dtype == "bfloat16"
