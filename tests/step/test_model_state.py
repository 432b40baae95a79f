"""State of the model over micro-batches and devices: BatchNorm's, a teacher's, and what nobody changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

import mpjax

BATCH = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
PARAMS = {"w": np.full((4, 2), 0.5, np.float32)}


def mesh(devices):
  return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])


def loss_fn(params, batch, model_state):
  teacher = 0.9 * model_state["teacher"] + 0.1 * params["w"]
  moved = {"teacher": teacher, "count": model_state["count"] + 1, "table": model_state["table"]}
  return jnp.mean((batch @ params["w"] + model_state["table"]) ** 2), {}, moved


def first_state():
  # 0.1, of which three do not sum to three times as much.
  return {"teacher": np.zeros((4, 2), np.float32), "count": np.int32(0), "table": np.full(2, 0.1, np.float32)}


@pytest.mark.parametrize(
  "options", [{}, {"accumulate": 4}, {"mesh": mesh(3)}, {"mesh": mesh(3), "accumulate": 2}]
)
def test_what_moves_once_a_step(options):
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", model_state="step", **options)
  state, _ = step(step.init(PARAMS, model_state=first_state()), BATCH)
  np.testing.assert_allclose(state.model_state["teacher"], 0.1 * PARAMS["w"], rtol=1e-6)
  assert state.model_state["count"] == 1
  assert np.asarray(state.model_state["table"]).tobytes() == first_state()["table"].tobytes()


def test_what_goes_on_from_the_last_micro_batch():
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", accumulate=4)
  state, _ = step(step.init(PARAMS, model_state=first_state()), BATCH)
  np.testing.assert_allclose(state.model_state["teacher"], (1 - 0.9**4) * PARAMS["w"], rtol=1e-6)
  assert state.model_state["count"] == 4


def test_what_nobody_changes_crosses_no_devices():
  def fixed(params, batch, model_state):
    return jnp.mean((batch @ params["w"] * model_state["table"]) ** 2), {}, model_state

  step = mpjax.make_train_step(fixed, optax.sgd(0.1), "fp32", mesh=mesh(3), accumulate=2)
  table = {"table": np.full(2, 0.1, np.float32)}
  state = step.init(PARAMS, model_state=table)
  text = step.jitted.lower(state, BATCH).compile().as_text()
  assert sum(" all-reduce(" in line for line in text.splitlines()) == 1  # of the gradient, with the loss
  for _ in range(20):
    state, _ = step(state, BATCH)
  assert np.asarray(state.model_state["table"]).tobytes() == table["table"].tobytes()


@pytest.mark.parametrize("options", [{"policy": "fp16"}, {"policy": "bf16", "skip_nonfinite": True}])
def test_a_step_whose_model_state_is_not_finite_is_skipped(options):
  def grows(params, batch, model_state):
    statistic = model_state["statistic"] / jnp.where(batch.sum() > 100, 0, 1)
    return jnp.mean((batch @ params["w"]) ** 2), {}, {"statistic": statistic}

  step = mpjax.make_train_step(grows, optax.adam(0.1), donate=False, **options)
  state, _ = step(step.init(PARAMS, model_state={"statistic": np.ones(3, np.float32)}), BATCH)
  after, metrics = step(state, np.full((24, 4), 2.0, np.float32))
  assert metrics["grads_finite"]
  assert not metrics["updates_finite"]
  assert metrics["skipped_steps"] == 1
  assert mpjax.get_loss_scale(after.opt_state).scale == mpjax.get_loss_scale(state.opt_state).scale
  for new, old in zip(
    jax.tree.leaves((after.params, after.model_state)),
    jax.tree.leaves((state.params, state.model_state)),
    strict=True,
  ):
    np.testing.assert_array_equal(new, old)
  _, metrics = step(after, BATCH)
  assert metrics["updates_finite"]


def test_an_infinity_that_was_there_before_decides_nothing():
  def masked(params, batch, model_state):
    mask = model_state["mask"] * 1.0
    return jnp.mean(jax.nn.softmax(batch @ params["w"] + mask)[:, 0]), {}, {"mask": mask}

  step = mpjax.make_train_step(masked, optax.sgd(0.1), "fp16")
  state = step.init(PARAMS, model_state={"mask": np.float32([0, -np.inf])})
  assert step(state, BATCH)[1]["skipped_steps"] == 0


def unused_leaf(params, batch):
  return jnp.mean((batch @ params["w"]) ** 2) + 0 * params["unused"].sum()


@pytest.mark.parametrize(
  "policy", ["fp16", "bf16", "bf16_lean", "params=bfloat16,compute=bfloat16,output=float32"]
)
def test_a_step_whose_optimiser_makes_nan_is_skipped(policy):
  params = {"w": np.full((4, 2), 0.5, np.float32), "unused": np.ones(3, np.float32)}
  tx = optax.rmsprop(1e-3, eps=0.0)  # 0 / 0 for a gradient of 0
  step = mpjax.make_train_step(unused_leaf, tx, policy, donate=False, skip_nonfinite=True)
  state = step.init(params)
  after, metrics = step(state, BATCH)
  assert metrics["grads_finite"]
  assert not metrics["updates_finite"]
  assert metrics["skipped_steps"] == metrics["consecutive_skips"] == 1
  for new, old in zip(jax.tree.leaves(after.params), jax.tree.leaves(state.params), strict=True):
    np.testing.assert_array_equal(new, old)
  inner = lambda s: s.opt_state.inner_state
  for new, old in zip(jax.tree.leaves(inner(after)), jax.tree.leaves(inner(state)), strict=True):
    np.testing.assert_array_equal(new, old)


def test_a_parameter_that_leaves_float16_is_not_taken():
  step = mpjax.make_train_step(
    lambda p, b: -p["w"].sum() * b.mean(),
    optax.sgd(1e3),
    "params=float16,compute=float16,output=float32",
    skip_nonfinite=True,
    donate=False,
  )
  state = step.init({"w": np.full(2, 65000.0)})
  after, metrics = step(state, np.full(4, 1.0))
  assert not metrics["updates_finite"]
  assert np.isfinite(after.params["w"]).all()
