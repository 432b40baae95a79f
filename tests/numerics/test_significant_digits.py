"""Digits that survive random rounding are those that the error against float64 leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax.numerics._random_rounding import with_random_rounding

ALL = 24 * np.log10(2)


def setting():
  keys = jax.random.split(jax.random.key(0), 4)
  normal = lambda key, *shape: jax.random.normal(key, shape)
  params = {"up": {"w": normal(keys[0], 32, 64) / 6}, "down": {"w": normal(keys[1], 64, 32) / 8}}
  return params, {"x": normal(keys[2], 16, 32), "y": normal(keys[3], 16, 32)}


def loss_fn(params, batch):
  with jax.named_scope("up"):
    h = jnp.tanh(batch["x"] @ params["up"]["w"])
  with jax.named_scope("down"):
    return jnp.mean((h @ params["down"]["w"] - batch["y"]) ** 2)


def digits_by_hand(policy):
  """Of rounding to the nearest, against float32's."""
  params, batch = setting()
  run = lambda fun: jax.jit(jax.grad(fun))(params, batch)
  mine, wide = run(mpjax.autocast(loss_fn, policy)), run(loss_fn)
  error = lambda a, b: -np.log10(np.linalg.norm(a - b) / np.linalg.norm(b))
  return {name: error(np.asarray(mine[name]["w"]), np.asarray(wide[name]["w"])) for name in params}


@pytest.mark.parametrize("policy", ["bf16", "fp16"])
def test_digits_are_those_of_the_error_against_float32(policy):
  params, batch = setting()
  found = mpjax.significant_digits(loss_fn, params, batch, policy)
  wanted = digits_by_hand(policy)
  for name, digits in wanted.items():
    # Random rounding has 1.4 times the spread of rounding to the nearest.
    assert found.gradients[f"{name}/w"] == pytest.approx(digits - np.log10(2**0.5), abs=0.15)
    assert found.modules[name] == found.gradients[f"{name}/w"]
  assert min(found.modules.values()) <= found.whole <= max(found.modules.values())
  assert found.mean_loss == pytest.approx(float(loss_fn(params, batch)), rel=2e-2)
  assert 0 < found.loss < ALL


def test_float16_has_about_three_bits_more_than_bfloat16():
  params, batch = setting()
  whole = {p: mpjax.significant_digits(loss_fn, params, batch, p).whole for p in ("bf16", "fp16", "fp32")}
  assert whole["fp16"] - whole["bf16"] == pytest.approx(3 * np.log10(2), abs=0.15)
  assert whole["fp32"] == ALL  # nothing is rounded to half precision


def test_a_gradient_that_cancels_has_fewer_digits():
  """The difference of two numbers that agree in their first digits."""

  def difference(params, batch):
    with jax.named_scope("near"):
      near = (batch @ params["near"]["w"]) - (batch @ params["near"]["v"])
    with jax.named_scope("far"):
      far = batch @ params["far"]["w"]
    return jnp.mean(near**2) + jnp.mean(far**2)

  keys = jax.random.split(jax.random.key(1), 3)
  w, far, x = (jax.random.normal(key, (32, 32)) for key in keys)
  params = {"near": {"w": w, "v": w * (1 + 1e-2)}, "far": {"w": far}}
  found = mpjax.significant_digits(difference, params, x, "bf16", samples=4)
  assert found.modules["near"] < found.modules["far"] - 0.8


def test_digits_are_the_same_for_a_seed_and_a_step():
  params, batch = setting()
  again = [mpjax.significant_digits(loss_fn, params, batch, "bf16", samples=3, seed=s) for s in (0, 0, 1)]
  assert again[0] == again[1] != again[2]
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
  of_step = mpjax.significant_digits(step, step.init(params), batch, samples=3)
  assert of_step.gradients == pytest.approx(again[0].gradients, abs=1e-3)


def test_small_gradients_and_those_of_zero_have_the_digits_that_they_have():
  params, batch = setting()
  small = mpjax.significant_digits(lambda p, b: 1e-30 * loss_fn(p, b), params, batch, "bf16", samples=3)
  plain = mpjax.significant_digits(loss_fn, params, batch, "bf16", samples=3)
  assert small.gradients == pytest.approx(plain.gradients, abs=0.2)
  none = mpjax.significant_digits(lambda p, b: 0 * loss_fn(p, b), params, batch, "bf16", samples=2)
  assert none.whole == ALL


@pytest.mark.parametrize("kind", ["scan", "checkpoint", "cond", "while", "jit"])
def test_what_is_in_a_body_is_rounded_too_and_computed_again_alike(kind):
  w = jax.random.normal(jax.random.key(2), (4, 32, 32)) / 6
  x = jax.random.normal(jax.random.key(3), (8, 32))
  layer = lambda x, w: jnp.tanh(x @ w)

  def fun(x):
    if kind == "scan":
      return jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0]
    if kind == "while":
      return jax.lax.fori_loop(0, 4, lambda i, x: layer(x, w[i]), x)
    for i in range(4):
      one = lambda x, i=i: layer(x, w[i])
      if kind == "cond":
        x = jax.lax.cond(x[0, 0] > -10, one, lambda x: x, x)
      else:
        x = {"checkpoint": jax.checkpoint, "jit": jax.jit}[kind](one)(x)
    return x

  half = mpjax.autocast(fun, "bf16")
  run = jax.jit(with_random_rounding(half, x))
  exact = np.asarray(fun(x))
  drawn = [np.asarray(run(jax.random.key(i), x)) for i in range(3)]
  errors = [np.linalg.norm(d - exact) / np.linalg.norm(exact) for d in drawn]
  apart = np.linalg.norm(drawn[0] - drawn[1]) / np.linalg.norm(exact)
  assert all(2**-9 < e < 2**-5 for e in errors)
  assert apart == pytest.approx(2**0.5 * errors[0], rel=0.25)
  assert drawn[0].dtype == half(x).dtype


def test_the_mean_of_many_draws_is_the_exact_product():
  x = jax.random.normal(jax.random.key(4), (16, 16)).astype(jnp.bfloat16)
  run = jax.jit(jax.vmap(with_random_rounding(lambda x: x @ x, x), (0, None)))
  drawn = np.asarray(run(jax.random.split(jax.random.key(5), 2000), x), np.float64)
  exact = np.asarray(x, np.float64) @ np.asarray(x, np.float64)
  assert np.abs(drawn.mean(0) - exact).max() < 5 * drawn.std(0).max() / 2000**0.5
  assert drawn.std(0).max() > 0


@pytest.mark.parametrize(
  ("policy", "samples", "message"),
  [("bf16", 1, "samples=1: expected"), ("fp8", 4, "without FP8, whose products round inside")],
)
def test_what_cannot_be_is_refused(policy, samples, message):
  params, batch = setting()
  with pytest.raises(ValueError, match=message):
    mpjax.significant_digits(loss_fn, params, batch, policy, samples=samples)


def test_the_text_has_a_line_for_each_module():
  params, batch = setting()
  found = mpjax.significant_digits(loss_fn, params, batch, "bf16", samples=2)
  text = str(found)
  assert text.startswith("significant digits under bf16, of 2 runs with random rounding: loss ")
  assert all(f"{name}" in text for name in params)
  assert found.to_dict()["gradients"] == found.gradients
