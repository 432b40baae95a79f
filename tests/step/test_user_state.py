"""`TrainStep.user_state`: master parameters and the state of the optimiser that the user gave."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from tests.optim._forms import described
from tests.step._problems import FP16, WIDE_BATCH, WIDE_PARAMS, assert_same, np_tree, train, wide_loss

INT16 = {"base": FP16, "param_dtype": "bfloat16", "master_weights": "int16", "optimizer_dtype": "bfloat16"}
ADAM = optax.adam(1e-2)
ADAMW = optax.inject_hyperparams(optax.adamw, static_args=["mu_dtype"])(1e-2, mu_dtype=jnp.bfloat16)
# What the user puts round an optimiser is a part of it.
SCALED = mpjax.dynamic_loss_scale(mpjax.quantized_state(ADAM))
GUARDED = {"skip_nonfinite": True}


def make(policy, tx=ADAMW, **options):
  return mpjax.make_train_step(wide_loss, tx, policy, **options)


def trained(step, steps=3):
  return train(step, step.init(WIDE_PARAMS), steps, WIDE_BATCH)[0]


def test_the_state_is_as_the_optimiser_makes_it():
  for policy, tx, options in (
    ("fp32", ADAMW, {}),
    ("fp32", ADAMW, GUARDED),
    (FP16, ADAMW, {}),
    ("bf16_lean", ADAMW, GUARDED),
    ("bf16_pure", ADAMW, GUARDED),
    (INT16, ADAMW, {}),
    ("bf16", SCALED, {}),
    ("bf16_lean", mpjax.quantized_state(ADAM, exclude="nu"), {}),
    ("bf16_lean", ADAM, {"wrt": "w"}),
  ):
    step = make(policy, tx, **options)
    params, opt_state = jax.eval_shape(step.user_state, jax.eval_shape(step.init, WIDE_PARAMS))
    assert described(params) == described(WIDE_PARAMS), (policy, options)
    untrained = {"b": optax.MaskedNode(), "v": optax.MaskedNode()} if "wrt" in options else {}
    of_tx = jax.eval_shape(tx.init, WIDE_PARAMS | untrained)
    assert described(opt_state) == described(of_tx), (policy, options)


@pytest.mark.parametrize(("policy", "options"), [("bf16_lean", {"wrt": "w"}), (INT16, {})], ids=str)
def test_a_later_step_does_not_take_the_arrays(policy, options):
  step = make(policy, **options)
  state = trained(step)
  params, opt_state = step.user_state(state)
  assert optax.tree_utils.tree_get(opt_state, "learning_rate") == np.float32(1e-2)
  assert optax.tree_utils.tree_get(opt_state, "b2") == np.float32(0.999)
  before = np_tree((params, opt_state))
  step(state, WIDE_BATCH)
  assert_same((params, opt_state), before)
  with pytest.raises(ValueError, match="deleted"):
    step.user_state(state)
