"""Steps with a loss scale under JAX's modes that find mistakes: none of them finds one here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

# Modes that find mistakes as a program is traced.
TRACED = {
  "checking_leaks": jax.checking_leaks,
  "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "x64": lambda: jax.enable_x64(True),
}
# Without weak integer powers, which `optax.adam` has, and which strict promotion refuses in optax itself.
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
TX = mpjax.dynamic_loss_scale(INNER, init_scale=64.0, hysteresis=2)
SHAPE = (16, 16)
RNG = np.random.default_rng(0)
PARAMS = {name: np.float32(RNG.normal(size=SHAPE) / 4) for name in ("w", "v")}
ONES = np.ones(SHAPE, np.float32)
STATS = {"mean": np.zeros(16, np.float32), "count": np.zeros([], np.int32)}


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


def with_stats(params, x):
  low = mpjax.cast_floating(params, jnp.float16)
  new = {"mean": jnp.mean(x, 0), "count": jnp.ones([], jnp.int32)}
  return loss_fn(low, x.astype(jnp.float16)), new


def step(params, state, stats, x):
  (loss, new), grads = mpjax.value_and_grad(with_stats, state, has_aux=True)(params, x)
  by_hand = jax.grad(lambda p: mpjax.scale_loss(with_stats(p, x)[0], state))(params)
  updates, state = TX.update(jax.tree.map(lambda a, b: (a + b) / 2, grads, by_hand), state, params)
  return mpjax.apply_updates(params, updates), state, mpjax.keep_if_finite(state, new, stats), loss


def described(tree):
  return jax.tree.map(lambda x: (np.shape(x), jnp.result_type(x)), tree)


def test_two_lines_round_an_optimiser():
  for mode, enter in TRACED.items():
    with enter():
      first = (PARAMS, jax.eval_shape(TX.init, PARAMS), STATS)
      *new, loss = jax.eval_shape(step, *first, ONES)
    assert described(tuple(new)) == described(first), mode
    assert loss.dtype == np.float32, mode
  with jax.debug_nans(True):
    carry = (PARAMS, TX.init(PARAMS), STATS)
    run = jax.jit(step)
    for _ in range(2):
      *carry, loss = run(*carry, ONES)
  assert mpjax.get_loss_scale(carry[1]).skipped_steps == 0
  assert loss < loss_fn(PARAMS, ONES)
  assert int(carry[2]["count"]) == 1


FP8 = {"emulate": True, "min_dim": 16, "first_layer": True, "last_layer": True}
SCALED = {"init_scale": 64.0}
POLICIES = {
  "fp16": {"base": "fp16", "loss_scaling": SCALED},
  "fp8": {"base": "fp8", "fp8": {"recipe": "current", **FP8}, "loss_scaling": SCALED},
  "fp8 delayed": {"base": "fp8", "fp8": {"recipe": "delayed", **FP8}},
}
BATCH = np.ones((32, 16), np.float32)


def made_step(name):
  return mpjax.make_train_step(loss_fn, INNER, POLICIES[name], accumulate=2 if name == "fp16" else 1)


@pytest.mark.parametrize("name", POLICIES)
def test_training_steps(name):
  for mode, enter in TRACED.items():
    with enter():
      step = made_step(name)
      state = jax.eval_shape(lambda params, step=step: step.init(params, batch=BATCH), PARAMS)
      new, metrics = jax.eval_shape(step, state, BATCH)
    assert described(new) == described(state), mode
    assert metrics["loss"].dtype == np.float32, mode
  for around in (jax.debug_nans(True), *([jax.disable_jit()] if name == "fp16" else [])):
    with around:
      step = made_step(name)
      state = step.init(PARAMS, batch=BATCH)
      for _ in range(2):
        state, metrics = step(state, BATCH)
    assert bool(metrics.get("grads_finite", True))
    assert np.isfinite(metrics["loss"])
