"""Steps with a loss scale under JAX's modes that find mistakes: none of them finds one here."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

MODES = {
  "checking_leaks": jax.checking_leaks,
  "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
  "disable_jit": jax.disable_jit,
  "debug_nans": lambda: jax.debug_nans(True),
  "x64": lambda: jax.enable_x64(True),
}
# Without weak integer powers, which `optax.adam` has, and which strict promotion refuses in optax itself.
INNER = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
TRANSFORMS = {
  "dynamic": lambda: mpjax.dynamic_loss_scale(
    INNER, init_scale=64.0, hysteresis=2, consecutive_hysteresis=True
  ),
  "static": lambda: mpjax.static_loss_scale(INNER, 8.0),
  "branch": lambda: mpjax.with_loss_scaling(INNER, {"init_scale": 64.0}, branch_on_cpu=True),
  "tracked": lambda: mpjax.track_skips(mpjax.dynamic_loss_scale(INNER, init_scale=64.0)),
}


# Without jit there is nothing to disable.
JIT_AND_MODES = [(jit, mode) for jit in (False, True) for mode in MODES if jit or mode != "disable_jit"]
# All arrays have one shape, for which an operation outside jit is compiled once.
SHAPE = (16, 16)


def params():
  rng = np.random.default_rng(0)
  return {name: jnp.asarray(rng.normal(size=SHAPE) / 4, jnp.float32) for name in ("w", "v")}


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"]) ** 2)


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize(("jit", "mode"), JIT_AND_MODES)
def test_two_lines_round_an_optimiser(mode, name, jit):
  tx = TRANSFORMS[name]()

  def step(params, state):
    low = lambda p: mpjax.cast_floating(p, jnp.float16)
    of = lambda p: mpjax.scale_loss(loss_fn(low(p), jnp.ones(SHAPE, jnp.float16)), state)
    updates, state = tx.update(jax.grad(of)(params), state, params)
    return mpjax.apply_updates(params, updates), state

  with MODES[mode]():
    old, state = params(), tx.init(params())
    run = jax.jit(step) if jit else step
    for _ in range(2):
      new, state = run(old, state)
  assert int(mpjax.get_loss_scale(state).skipped_steps) == 0
  assert np.asarray(new["w"] != old["w"]).any()
  assert new["w"].dtype == jnp.float32


@pytest.mark.slow
@pytest.mark.parametrize(("jit", "mode"), JIT_AND_MODES)
def test_layerwise(mode, jit):
  scaling = mpjax.layerwise_loss_scale()
  dense = lambda p, x: x @ p["w"] + p["v"]

  def loss_of(layers, x):
    h = scaling.start(x, jnp.float16)
    for p in layers:
      skip, h = scaling.fork(h)
      h = scaling.apply(jnp.tanh, scaling.layer(dense, p, h, kernel=lambda p: p["w"]))
      h = scaling.apply(jnp.add, skip, h)
    return jnp.mean(scaling.finish(h) ** 2)

  with MODES[mode]():
    grad = jax.jit(jax.grad(loss_of)) if jit else jax.grad(loss_of)
    grads = grad([params(), params()], jnp.ones(SHAPE, jnp.float32))
  assert mpjax.all_finite(grads)
  assert all(np.asarray(g).any() for g in jax.tree.leaves(grads))


FP8 = {"emulate": True, "min_dim": 16, "first_layer": True, "last_layer": True}
POLICIES = {
  "fp16": {"base": "fp16", "loss_scaling": {"init_scale": 64.0}},
  "fp16 by casts": {"base": "fp16", "autocast": False, "loss_scaling": {"init_scale": 64.0}},
  "bf16": "bf16",
  "fp8": {"base": "fp8", "fp8": {"recipe": "current", **FP8}, "loss_scaling": {"init_scale": 64.0}},
  "fp8 delayed": {"base": "fp8", "fp8": {"recipe": "delayed", **FP8}},
}


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("mode", MODES)
def test_training_steps(mode, name):
  batch = np.ones((32, 16), np.float32)
  with MODES[mode]():
    step = mpjax.make_train_step(loss_fn, INNER, POLICIES[name], accumulate=2 if name == "fp16" else 1)
    state = step.init(params(), batch=batch)
    for _ in range(2):
      state, metrics = step(state, batch)
  assert bool(metrics.get("grads_finite", True))
  assert np.isfinite(metrics["loss"])
