"""The learning rate among a step's metrics, where the optimiser's state says it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax

PARAMS = {"w": jnp.asarray([1.0, -2.0])}
SCHEDULE = optax.linear_schedule(0.5, 0.1, 4)
INJECTED = optax.inject_hyperparams(optax.adam)


def loss_fn(params, batch):
  return jnp.mean((params["w"] * batch) ** 2)


def rates(tx, policy, steps=3, batch=1.0, **options):
  step = mpjax.make_train_step(loss_fn, tx, policy, **options)
  state, found = step.init(PARAMS), []
  for _ in range(steps):
    state, metrics = step(state, jnp.full((4, 2), batch))
    found.append(metrics["learning_rate"])
    assert (metrics["learning_rate"].shape, metrics["learning_rate"].dtype) == ((), jnp.float32)
  return np.asarray(found)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16_lean"])
def test_an_injected_schedule_is_logged_as_each_update_was_made(policy):
  np.testing.assert_allclose(rates(INJECTED(SCHEDULE), policy), [SCHEDULE(i) for i in range(3)], rtol=1e-6)


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
    lambda tx: optax.MultiSteps(tx, 1).gradient_transformation(),
    lambda tx: mpjax.dynamic_loss_scale(tx),
  ],
)
def test_it_is_found_wherever_it_is_nested(wrap):
  np.testing.assert_allclose(rates(wrap(INJECTED(0.25)), "fp32", accumulate=2), 0.25)


def test_a_rate_that_is_set_by_hand_is_the_next_steps():
  step = mpjax.make_train_step(loss_fn, INJECTED(0.25), "bf16")
  state, metrics = step(step.init(PARAMS), jnp.ones((4, 2)))
  assert metrics["learning_rate"] == 0.25
  state.opt_state.hyperparams["learning_rate"] = jnp.asarray(0.125)
  _, metrics = step(state, jnp.ones((4, 2)))
  assert metrics["learning_rate"] == 0.125


def test_a_skipped_step_says_the_rate_of_the_update_before():
  np.testing.assert_allclose(rates(INJECTED(SCHEDULE), "fp16", batch=jnp.inf), SCHEDULE(0))


@pytest.mark.parametrize(
  "tx",
  [
    optax.adam(SCHEDULE),
    optax.inject_hyperparams(optax.scale)(step_size=0.1),
    # Two rates: neither is the step's.
    optax.partition({"a": INJECTED(0.1), "b": INJECTED(0.2)}, {"w": "a"}),
  ],
  ids=["a schedule", "another hyperparameter", "two rates"],
)
def test_a_state_that_says_no_rate_adds_nothing(tx):
  step = mpjax.make_train_step(loss_fn, tx, "fp32")
  assert step(step.init(PARAMS), jnp.ones((4, 2)))[1].keys() == {"loss"}


def test_a_metric_of_that_name_stays_the_loss_functions():
  step = mpjax.make_train_step(lambda p, b: (loss_fn(p, b), {"learning_rate": 7.0}), INJECTED(0.25), "fp32")
  assert step(step.init(PARAMS), jnp.ones((4, 2)))[1]["learning_rate"] == 7


def test_on_a_mesh():
  mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
  np.testing.assert_allclose(rates(INJECTED(SCHEDULE), "fp32", mesh=mesh), [0.5, 0.4, 0.3], rtol=1e-6)
