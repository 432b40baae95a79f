"""What `TrainStep.adopt` says of what begins anew."""

import os
import warnings

import jax
import jax.numpy as jnp
import optax
import pytest

import mpjax
from tests.step._problems import BATCH, FP16, PARAMS, loss_fn, train

SCHEDULE = optax.linear_schedule(1e-2, 1e-3, 100)


def make(policy="bf16", tx=None):
  return mpjax.make_train_step(loss_fn, tx or optax.adamw(SCHEDULE), policy, donate=False)


def test_moments_and_schedules_that_begin_anew_are_named():
  old, new = make(), make(tx=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE)))
  state, _ = train(old, old.init(PARAMS), 5)
  message = (
    r"anew while step is 5: the optimizer's state, its moments .*schedules \('1/0/count' was not there"
  )
  with pytest.warns(UserWarning, match=message):
    adopted = new.adopt(state, before=old)
  assert adopted.step == 5
  assert optax.tree_utils.tree_get(adopted.opt_state, "mu")["w"].any() == False  # noqa: E712


def test_a_dtype_that_does_not_fit_is_named():
  old, new = make("fp32"), make("params=float16,compute=float16,output=float16")
  state, _ = train(old, old.init(PARAMS), 2)
  with pytest.warns(UserWarning, match=r"'0/mu/b' was float32\[1\] and is float16\[1\]"):
    new.adopt(state, old)


def test_a_loss_scale_that_begins_anew_is_named():
  old, new = make(FP16), make({"base": "fp16", "loss_scaling": {"init_scale": 64.0}})
  state, _ = train(old, old.init(PARAMS), 2)
  with pytest.warns(UserWarning, match="anew while step is 2: the loss scale[.]") as caught:
    adopted = new.adopt(state, old)
  if "MPJAX_TYPECHECK" not in os.environ:  # which puts a call of its own between
    assert caught[0].filename == __file__
  assert adopted.opt_state.scale == 64.0
  with pytest.warns(UserWarning, match="anew: the loss scale[.]"):
    jax.eval_shape(lambda state: new.adopt(state, old), state)


@pytest.mark.parametrize("policy", ["fp32", "bf16", "bf16_lean", FP16])
def test_what_stays_needs_no_word(policy):
  old, new = make("bf16"), make(policy)
  state, _ = train(old, old.init(PARAMS), 2)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    new.adopt(state, old)


def test_a_first_state_and_one_that_is_meant_need_no_word():
  old, new = make(), make(tx=optax.sgd(1e-2))
  state = old.init(PARAMS)
  with warnings.catch_warnings():
    warnings.simplefilter("error")
    new.adopt(state, old)
    new.adopt(train(old, state, 2)[0], old, warn=False)
  assert jnp.isfinite(BATCH["x"]).all()
