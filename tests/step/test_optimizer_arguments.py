"""What a step gives an optimiser beside gradients, what it refuses, and the rate that a state says."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest
from flax import nnx

import mpjax
from tests.step._problems import BATCH, FP16, PARAMS, X, assert_near, loss_and_gradients, loss_fn, mesh


def make(tx, policy="fp32", loss=loss_fn, **options):
  return mpjax.make_train_step(loss, tx, policy, **options)


sam = lambda: contrib.sam(optax.sgd(0.05), optax.sgd(0.01))


def own(update):
  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def test_an_update_is_given_what_its_signature_has():
  def saw(names, *result):
    seen.append(names)
    return result

  for given, update in (
    ("grad value", lambda grads, state, params=None, *, value, grad: saw("grad value", grads, state)),
    ("value", lambda grads, state, params=None, *, value: saw("value", grads, state)),
    ("grad value", lambda grads, state, params=None, **extra: saw(" ".join(sorted(extra)), grads, state)),
    ("", lambda grads, state, params=None: saw("", grads, state)),
  ):
    seen, step = [], make(own(update), "bf16")
    jax.eval_shape(step.jitted, jax.eval_shape(step.init, PARAMS), BATCH)
    assert set(seen) == {given}


SEEN = optax.GradientTransformationExtraArgs(
  lambda params: {"value": jnp.zeros([]), "grad": jax.tree.map(jnp.zeros_like, params)},
  lambda updates, state, params=None, *, value, grad: (updates, {"value": value, "grad": grad}),
)


@pytest.mark.parametrize(
  ("tx", "policy"),
  [
    *((SEEN, policy) for policy in ("fp32", FP16, "bf16_lean")),
    (mpjax.static_loss_scale(SEEN, 64.0), "bf16"),
    (optax.MultiSteps(SEEN, 1).gradient_transformation(), FP16),
  ],
)
def test_value_and_grad_are_those_of_the_unscaled_loss(tx, policy):
  step = make(tx, policy)
  state, metrics = step(step.init(PARAMS), BATCH)
  seen = step.user_state(state)[1]
  assert optax.tree_utils.tree_get(seen, "value") == metrics["loss"]
  found = optax.tree_utils.tree_get(seen, "grad")
  assert_near(found, loss_and_gradients(PARAMS)[1], rtol=0.02, atol=0.05)


def test_an_optimiser_with_fixed_arguments_updates_a_module_in_place():
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
  step = make(sam(), "bf16", loss)
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  losses = [step(model, optimizer, BATCH)["loss"] for _ in range(7)]
  assert losses[-1] < losses[0]


def test_an_update_that_a_step_cannot_make_is_refused_by_init():
  params = {"layer": {"kernel": np.ones((8, 4), np.float32)}}
  loss = lambda p, batch: jnp.mean((batch @ p["layer"]["kernel"]) ** 2)
  tx = optax.chain(contrib.differentially_private_aggregate(1.0, 0.0, 0), optax.sgd(0.1))
  with pytest.raises(ValueError, match=r"'layer/kernel' has shape \[4\]: .*\[8, 4\].*each example"):
    make(tx, "bf16_lean", loss).init(params)
  tx = own(lambda grads, state, params=None, *, value, hessian: (grads, state))
  with pytest.raises(ValueError, match=r"missing .*'hessian'.*write the loop yourself"):
    make(tx, "bf16").init(PARAMS)


SCHEDULE = optax.linear_schedule(0.5, 0.1, 4)
INJECTED = optax.inject_hyperparams(optax.adam)


@pytest.mark.parametrize(
  ("tx", "policy", "options"),
  [
    (INJECTED(SCHEDULE), FP16, {}),
    (INJECTED(SCHEDULE), "bf16_lean", {"accumulate": 2}),
    (INJECTED(SCHEDULE), "fp32", {"mesh": mesh(data=2)}),
    (optax.chain(optax.clip_by_global_norm(1.0), INJECTED(SCHEDULE)), "fp32", {}),
    (optax.MultiSteps(INJECTED(SCHEDULE), 1).gradient_transformation(), "fp32", {}),
    (mpjax.dynamic_loss_scale(INJECTED(SCHEDULE), init_scale=256.0), "fp32", {}),
  ],
)
def test_an_injected_schedule_is_logged_as_each_update_was_made(tx, policy, options):
  step = make(tx, policy, **options)
  state = step.init(PARAMS)
  for expected in (0.5, 0.4, 0.3):
    state, metrics = step(state, BATCH)
    assert (metrics["learning_rate"].shape, metrics["learning_rate"].dtype) == ((), jnp.float32)
    assert float(metrics["learning_rate"]) == pytest.approx(expected)
  if policy == FP16:
    _, metrics = step(state, BATCH | {"x": X * np.float32(np.inf)})
    assert not metrics["grads_finite"]
    assert float(metrics["learning_rate"]) == pytest.approx(0.3)  # that of the update before


def test_a_state_that_says_no_rate_adds_nothing_and_a_metric_of_that_name_stays_the_loss_functions():
  for tx in (
    optax.adam(SCHEDULE),
    optax.inject_hyperparams(optax.scale)(step_size=0.1),
    # Two rates: neither is the step's.
    optax.partition({"a": INJECTED(0.1), "b": INJECTED(0.2)}, {"w": "a", "b": "b"}),
  ):
    step = make(tx)
    _, metrics = jax.eval_shape(step.jitted, jax.eval_shape(step.init, PARAMS), BATCH)
    assert metrics.keys() == {"loss"}
  step = make(INJECTED(0.25), loss=lambda p, b: (loss_fn(p, b), {"learning_rate": 7.0}))
  assert step(step.init(PARAMS), BATCH)[1]["learning_rate"] == 7
