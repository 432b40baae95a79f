"""Digits that survive random rounding are those that the error against float32 leaves."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import mpjax

# The odds of single roundings show in no report of digits.
from mpjax.numerics._random_rounding import with_random_rounding

ALL = 24 * np.log10(2)
RNG = np.random.default_rng(0)
NORMAL = lambda *shape: RNG.standard_normal(shape).astype(np.float32)
PARAMS = {"up": {"w": NORMAL(32, 64) / 6}, "down": {"w": NORMAL(64, 32) / 8}}
BATCH = {"x": NORMAL(16, 32), "y": NORMAL(16, 32)}


def loss_fn(params, batch):
  with jax.named_scope("up"):
    h = jnp.tanh(batch["x"] @ params["up"]["w"])
  with jax.named_scope("down"):
    return jnp.mean((h @ params["down"]["w"] - batch["y"]) ** 2)


@functools.cache
def digits(policy, **options):
  return mpjax.numerics.significant_digits(loss_fn, PARAMS, BATCH, policy, **options)


def test_digits_are_those_of_the_error_against_float32():
  gradients = {p: jax.jit(jax.value_and_grad(mpjax.autocast(loss_fn, p))) for p in ("fp32", "bf16", "fp16")}
  value, exact = gradients["fp32"](PARAMS, BATCH)
  for policy in ("bf16", "fp16"):
    found, (_, rounded) = digits(policy), gradients[policy](PARAMS, BATCH)
    for name in PARAMS:
      error = np.linalg.norm(rounded[name]["w"] - exact[name]["w"]) / np.linalg.norm(exact[name]["w"])
      # Random rounding has 1.4 times the spread of rounding to the nearest.
      assert found.gradients[f"{name}/w"] == pytest.approx(-np.log10(error * 2**0.5), abs=0.15), policy
      assert found.modules[name] == found.gradients[f"{name}/w"]
    assert min(found.modules.values()) <= found.whole <= max(found.modules.values())
    assert found.mean_loss == pytest.approx(float(value), rel=2e-2)
    assert 0 < found.loss < ALL
  assert digits("fp16").whole - digits("bf16").whole == pytest.approx(3 * np.log10(2), abs=0.15)
  assert digits("fp32").whole == ALL  # nothing is rounded to half precision
  text = str(digits("bf16"))
  assert text.startswith("significant digits under bf16, of 8 runs with random rounding: loss ")
  assert all(name in text for name in PARAMS)
  assert digits("bf16").to_dict()["gradients"] == digits("bf16").gradients


def test_a_gradient_that_cancels_has_fewer_digits():
  """The difference of two numbers that agree in their first digits."""

  def difference(params, batch):
    with jax.named_scope("near"):
      near = (batch @ params["near"]["w"]) - (batch @ params["near"]["v"])
    with jax.named_scope("far"):
      far = batch @ params["far"]["w"]
    return jnp.mean(near**2) + jnp.mean(far**2)

  w, far, x = np.random.default_rng(1).standard_normal((3, 32, 32)).astype(np.float32)
  params = {"near": {"w": w, "v": w * np.float32(1.01)}, "far": {"w": far}}
  found = mpjax.numerics.significant_digits(difference, params, x, "bf16", samples=4)
  assert found.modules["near"] < found.modules["far"] - 0.8


def test_digits_are_the_same_for_a_seed_and_a_step():
  again = [
    mpjax.numerics.significant_digits(loss_fn, PARAMS, BATCH, "bf16", samples=3, seed=s) for s in (0, 0, 1)
  ]
  assert again[0] == again[1] != again[2]
  step = mpjax.make_train_step(loss_fn, optax.sgd(1e-2), "bf16")
  of_step = mpjax.numerics.significant_digits(step, step.init(PARAMS), BATCH, samples=3)
  assert of_step.gradients == pytest.approx(again[0].gradients, abs=1e-3)


def test_small_gradients_and_those_of_zero_have_the_digits_that_they_have():
  scaled = lambda p, b: b["factor"] * loss_fn(p, b)
  run = lambda factor: mpjax.numerics.significant_digits(
    scaled, PARAMS, BATCH | {"factor": np.float32(factor)}, "bf16", samples=3
  )
  assert run(1e-30).gradients == pytest.approx(run(1).gradients, abs=0.2)
  assert run(0).whole == ALL


def test_what_is_in_a_body_is_rounded_too_and_computed_again_alike():
  w, x = jnp.asarray(RNG.standard_normal((2, 32, 32), np.float32) / 6), NORMAL(8, 32)
  layer = lambda x, w: jnp.tanh(x @ w)

  def one_by_one(call):
    return lambda x: call(lambda x: layer(x, w[1]), call(lambda x: layer(x, w[0]), x))

  kinds = {
    "scan": lambda x: jax.lax.scan(lambda x, w: (layer(x, w), None), x, w)[0],
    "while": lambda x: jax.lax.fori_loop(0, 2, lambda i, x: layer(x, jnp.asarray(w)[i]), x),
    "cond": one_by_one(lambda f, x: jax.lax.cond(x[0, 0] > -10, f, lambda x: x, x)),
    "checkpoint": one_by_one(lambda f, x: jax.checkpoint(f)(x)),
    "jit": one_by_one(lambda f, x: jax.jit(f)(x)),
  }
  half = {kind: mpjax.autocast(fun, "bf16") for kind, fun in kinds.items()}
  all_of_them = lambda x: {kind: fun(x) for kind, fun in half.items()}
  run = jax.jit(with_random_rounding(all_of_them, x))
  drawn = [run(jax.random.key(i), x) for i in range(3)]
  exact = x.astype(np.float64)
  for matrix in np.asarray(w):
    exact = np.tanh(exact @ matrix)
  share = lambda a, b: (
    np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b, np.float64)) / np.linalg.norm(exact)
  )
  for kind in kinds:
    values = [d[kind] for d in drawn]
    errors = [share(v, exact) for v in values]
    assert all(2**-9 < e < 2**-5 for e in errors), kind
    assert share(*values[:2]) == pytest.approx(2**0.5 * errors[0], rel=0.25), kind
    assert values[0].dtype == jax.eval_shape(half[kind], x).dtype, kind


def test_the_mean_of_many_draws_is_the_exact_product():
  x = NORMAL(16, 16).astype(ml_dtypes.bfloat16)
  rounding = jax.vmap(with_random_rounding(lambda x: x @ x, x), (0, None))
  run = jax.jit(lambda key, x: rounding(jax.random.split(key, 2000), x))
  drawn = np.asarray(run(jax.random.key(5), x), np.float64)
  exact = x.astype(np.float64) @ x.astype(np.float64)
  assert np.abs(drawn.mean(0) - exact).max() < 5 * drawn.std(0).max() / 2000**0.5
  assert drawn.std(0).max() > 0


@pytest.mark.parametrize(
  ("policy", "samples", "message"),
  [("bf16", 1, "samples=1: expected"), ("fp8", 4, "without FP8, whose products round inside")],
)
def test_what_cannot_be_is_refused(policy, samples, message):
  with pytest.raises(ValueError, match=message):
    mpjax.numerics.significant_digits(loss_fn, PARAMS, BATCH, policy, samples=samples)
