"""What a step gives an optimiser beside gradients, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib
import pytest
from flax import nnx

import mpjax
from tests.step._problems import BATCH, FP16, PARAMS, loss_fn, train


def taking(names, seen):
  """Returns an optimiser whose update takes these keyword arguments, which go to `seen` with the gradients."""

  def value_and_grad(updates, state, params=None, *, value, grad):
    seen.append({"value": value, "grad": grad, "updates": updates})
    return updates, state

  def value_only(updates, state, params=None, *, value):
    seen.append({"value": value})
    return updates, state

  def anything(updates, state, params=None, **extra):
    seen.append(extra)
    return updates, state

  def nothing(updates, state, params=None):
    seen.append({})
    return updates, state

  update = {"value grad": value_and_grad, "value": value_only, "**": anything, "": nothing}[names]
  return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@pytest.mark.parametrize(
  ("names", "given"),
  [("value grad", "grad updates value"), ("value", "value"), ("**", "grad value"), ("", "")],
)
def test_an_update_is_given_what_its_signature_has(names, given):
  seen = []
  step = mpjax.make_train_step(loss_fn, taking(names, seen), "bf16")
  step(step.init(PARAMS), BATCH)
  assert {" ".join(sorted(each)) for each in seen} == {given}


@pytest.mark.parametrize("policy", ["fp32", FP16, "bf16_lean"])
def test_value_and_grad_are_those_of_the_unscaled_loss(policy):
  def init(params):
    return {"value": jnp.zeros([]), "grad": jax.tree.map(jnp.zeros_like, params)}

  def update(updates, state, params=None, *, value, grad):
    return updates, {"value": value, "grad": grad}

  tx = optax.chain(optax.GradientTransformationExtraArgs(init, update), optax.sgd(1e-3))
  step = mpjax.make_train_step(loss_fn, tx, policy)
  state, metrics = step(step.init(PARAMS), BATCH)
  seen = step.user_state(state)[1][0]
  assert seen["value"] == metrics["loss"]
  expected = jax.grad(loss_fn)(PARAMS, BATCH)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=0.05), seen["grad"], expected)
  own = mpjax.make_train_step(loss_fn, mpjax.static_loss_scale(tx, 64.0), "bf16")
  seen = own(own.init(PARAMS), BATCH)[0].opt_state.inner_state[0]
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.02, atol=0.05), seen["grad"], expected)


def test_a_wrapper_that_hands_everything_on_is_tried_without_an_init_too():
  make = lambda: optax.chain(optax.clip(1.0), contrib.sam(optax.sgd(0.1), optax.sgd(0.1)))
  first, restored = (mpjax.make_train_step(loss_fn, make(), FP16, donate=False) for _ in range(2))
  state = first.init(PARAMS)
  jax.tree.map(np.testing.assert_array_equal, restored(state, BATCH), first(state, BATCH))


def test_multi_steps_hands_the_loss_on():
  step = mpjax.make_train_step(
    loss_fn, optax.MultiSteps(optax.polyak_sgd(), 2).gradient_transformation(), FP16
  )
  tx = optax.polyak_sgd()
  value, grads = jax.value_and_grad(loss_fn)(PARAMS, BATCH)
  updates, _ = tx.update(grads, tx.init(PARAMS), PARAMS, value=value)
  state, _ = train(step, step.init(PARAMS), 2)
  expected = optax.apply_updates(PARAMS, updates)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0.01), state.params, expected)


def test_an_optimiser_with_fixed_arguments_updates_a_module_in_place():
  model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
  loss = lambda model, batch: jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
  step = mpjax.make_train_step(loss, contrib.sam(optax.sgd(0.05), optax.sgd(0.01)), "bf16")
  optimizer = nnx.Optimizer(model, step.tx, wrt=nnx.Param)
  first = step(model, optimizer, BATCH)["loss"]
  for _ in range(6):
    metrics = step(model, optimizer, BATCH)
  assert metrics["loss"] < first


def test_the_numerics_give_an_update_the_same():
  step = mpjax.make_train_step(loss_fn, contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), FP16, donate=False)
  report = mpjax.inspect_numerics(step, step.init(PARAMS), BATCH, advise=False)
  assert "w" in str(report)


@pytest.mark.parametrize("policy", ["fp32", "fp16", "bf16_lean"])
def test_an_update_of_another_shape_is_refused_by_name(policy):
  params = {"layer": {"kernel": jnp.ones((8, 4))}}
  loss = lambda p, batch: jnp.mean((batch @ p["layer"]["kernel"]) ** 2)
  tx = optax.chain(contrib.differentially_private_aggregate(1.0, 0.0, 0), optax.sgd(0.1))
  step = mpjax.make_train_step(loss, tx, policy)
  with pytest.raises(ValueError, match=r"'layer/kernel' has shape \[4\]: .*\[8, 4\].*each example"):
    step.init(params)


def test_another_error_of_an_update_is_told_by_init():
  def update(updates, state, params=None, *, value, hessian):
    return updates, state

  tx = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
  step = mpjax.make_train_step(loss_fn, tx, "bf16")
  with pytest.raises(ValueError, match=r"missing 1 required keyword-only argument: 'hessian'.*yourself"):
    step.init(PARAMS)


def test_the_loop_that_a_refusal_shows_runs():
  tx = mpjax.dynamic_loss_scale(optax.lbfgs(), init_scale=256.0)
  params, opt_state = PARAMS, tx.init(PARAMS)
  batch = BATCH
  for _ in range(3):
    loss, grads = mpjax.value_and_grad(loss_fn, opt_state)(params, batch)
    updates, opt_state = tx.update(
      grads, opt_state, params, value=loss, grad=grads, value_fn=lambda p: loss_fn(p, batch)
    )
    params = mpjax.apply_updates(params, updates)
  assert loss_fn(params, batch) < 0.5 * loss_fn(PARAMS, batch)


def test_the_state_of_an_optimiser_can_be_mapped_over():
  step = mpjax.make_train_step(loss_fn, optax.adam(1e-2), "fp32")
  state = step.init(PARAMS)
  halved = optax.tree_utils.tree_map_params(step.tx, lambda x: x + 1, state.opt_state)
  assert float(halved[0].mu["b"][0]) == 1.0
