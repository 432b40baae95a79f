"""State of the model over micro-batches and devices: BatchNorm's, a teacher's, and what nobody changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.step._problems import assert_same, mesh

BATCH = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
PARAMS = {"w": np.full((4, 2), 0.5, np.float32)}
# 0.1, of which three do not sum to three times as much.
TABLE = np.full(2, 0.1, np.float32)
FIRST = {"teacher": np.zeros((4, 2), np.float32), "count": np.int32(0), "table": TABLE}
MESH = mesh(data=3)
# 0 / 0 for a gradient of 0.
MAKES_NAN = optax.rmsprop(1e-3, eps=0.0)
FLOAT16 = "params=float16,compute=float16,output=float32"


def loss_fn(params, batch, model_state):
  teacher = 0.9 * model_state["teacher"] + 0.1 * params["w"]
  moved = {"teacher": teacher, "count": model_state["count"] + 1, "table": model_state["table"]}
  return ((batch @ params["w"] + model_state["table"]) ** 2).mean(), {}, moved


@pytest.mark.parametrize(
  ("options", "moves"),
  [
    ({"model_state": "step"}, 1),
    ({"model_state": "step", "mesh": MESH, "accumulate": 2}, 1),
    ({"accumulate": 4}, 4),
  ],
)
def test_what_moves_once_a_step_or_goes_on_from_the_last_micro_batch(options, moves):
  step = mpjax.make_train_step(loss_fn, optax.sgd(0.1), "fp32", **options)
  state, _ = step(step.init(PARAMS, model_state=FIRST), BATCH)
  np.testing.assert_allclose(state.model_state["teacher"], (1 - 0.9**moves) * PARAMS["w"], rtol=1e-6)
  assert state.model_state["count"] == moves
  assert np.asarray(state.model_state["table"]).tobytes() == TABLE.tobytes()


def test_what_nobody_changes_crosses_no_devices():
  def loss(params, batch, model_state):
    return ((batch @ params["w"] * model_state["table"]) ** 2).mean(), {}, model_state

  step = mpjax.make_train_step(loss, optax.sgd(0.1), "fp32", mesh=MESH, accumulate=2)
  state = step.init(PARAMS, model_state={"table": TABLE})
  text = step.jitted.lower(state, BATCH).compile().as_text()
  assert sum(" all-reduce(" in line for line in text.splitlines()) == 1  # of the gradient, with the loss


@pytest.mark.parametrize("options", [{"policy": "fp16"}, {"policy": "bf16", "skip_nonfinite": True}])
def test_a_step_whose_model_state_is_not_finite_is_skipped(options):
  def grows(params, batch, model_state):
    statistic = model_state["statistic"] / jnp.where(batch.sum() > 100, 0, 1)
    mask = model_state["mask"] * 1.0  # an infinity that was there before decides nothing
    loss = jax.nn.softmax(batch @ params["w"] + mask)[:, 0].mean()
    return loss, {}, {"statistic": statistic, "mask": mask}

  step = mpjax.make_train_step(grows, optax.adam(0.1), donate=False, **options)
  first = {"statistic": np.ones(3, np.float32), "mask": np.float32([0, -np.inf])}
  state, metrics = step(step.init(PARAMS, model_state=first), BATCH)
  assert metrics["skipped_steps"] == 0
  after, metrics = step(state, np.full((24, 4), 2.0, np.float32))
  flags = {name: int(metrics[name]) for name in ("grads_finite", "updates_finite", "skipped_steps")}
  assert flags == {"grads_finite": 1, "updates_finite": 0, "skipped_steps": 1}
  assert mpjax.get_loss_scale(after.opt_state).scale == mpjax.get_loss_scale(state.opt_state).scale
  assert_same((after.params, after.model_state), (state.params, state.model_state))
  _, metrics = step(after, BATCH)
  assert metrics["updates_finite"]


@pytest.mark.parametrize(
  ("policy", "tx", "start"),
  [
    *((policy, MAKES_NAN, 1.0) for policy in ("fp16", "bf16", "bf16_lean")),
    (FLOAT16, optax.sgd(1e4), 65e3),
    *(({"base": "bf16_pure", "master_weights": master}, optax.sgd(3e38), 3e38) for master in (None, "int16")),
  ],
  ids=lambda value: str(value) if not isinstance(value, tuple) else "",
)
def test_a_step_whose_optimiser_makes_nan_or_a_parameter_infinite_is_skipped(policy, tx, start):
  loss = lambda params, batch: -batch.mean() * params["w"].sum() + 0 * params["unused"].sum()
  step = mpjax.make_train_step(loss, tx, policy, donate=False, skip_nonfinite=True)
  state = step.init({"w": np.full(2, start), "unused": np.ones(3, np.float32)})
  after, metrics = step(state, np.full(4, 0.25, np.float32))
  assert metrics["grads_finite"]
  assert not metrics["updates_finite"]
  assert metrics["skipped_steps"] == metrics["consecutive_skips"] == 1
  kept = lambda state: (state.params, state.opt_state.inner_state)
  assert_same(kept(after), kept(state))
